"""Any request gets an answer, and an error of it has the body of every error."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("schemathesis")

import httpx
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from service_helpers import Words, address_of, scheduler

from rsrank_rag.ranking.explanation import Explanation
from rsrank_rag.service.app import RANK_PATHS
from rsrank_rag.service.schemas.request import RankRequest

load_all_checks()

pytestmark = pytest.mark.slow

LIMITS = {"max_documents": 50, "max_body": 100_000}
# A blank query or an object without text is no wrong type, and still cannot be scored.
NOT_CHECKED = ["positive_data_acceptance"]


class Explaining(Words):
    """Gives the whole score to one token."""

    def explain(self, query, document):
        score = self.score(query, [document])[0]
        return Explanation(query, document, score, False, ("all",), (1,), ((score,),), ())


@pytest.fixture(scope="module")
def address():
    with address_of(scheduler(Explaining()), **LIMITS) as url:
        yield url


TEXT = {"type": "string"}
ERROR = {
    "type": "object",
    "properties": {"error": TEXT, "message": TEXT, "detail": TEXT, "documents": {"type": "array"}},
    "required": ["error", "message", "detail"],
    "additionalProperties": False,
}
STATUSES = ("400", "404", "405", "408", "413", "422", "429")


def described(body):
    """The description of an endpoint whose requests have such bodies."""
    json_schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    COMPONENTS.update(json_schema.pop("$defs", {}))
    errors = {"description": "", "content": {"application/json": {"schema": ERROR}}}
    responses = {"200": {"description": ""}, **dict.fromkeys(STATUSES, errors)}
    content = {"content": {"application/json": {"schema": json_schema}}, "required": True}
    return {"post": {"requestBody": content, "responses": responses}}


COMPONENTS = {}
PATHS = {path: described(RankRequest) for path in RANK_PATHS}
PATHS["/explain"] = described(RankRequest)
schema = schemathesis.openapi.from_dict(
    {
        "openapi": "3.1.0",
        "info": {"title": "rsrank_rag", "version": "1"},
        "paths": PATHS,
        "components": {"schemas": COMPONENTS},
    }
)


@schema.parametrize()
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_endpoint_breaks_and_every_error_has_the_same_body(case, address):
    case.call_and_validate(
        base_url=address, excluded_checks=schemathesis.checks.CHECKS.get_by_names(NOT_CHECKED)
    )


def test_the_service_is_as_well_after_it_as_before(address):
    assert httpx.get(f"{address}/ready").status_code == 200
    actual = httpx.post(
        f"{address}/v1/rerank", json={"query": "a b", "documents": ["b", "a b"]}
    ).json()
    assert [row["index"] for row in actual["results"]] == [1, 0]

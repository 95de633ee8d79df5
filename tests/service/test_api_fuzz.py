"""Every answer to any request matches the endpoint's OpenAPI description and is no failure."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

import httpx
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from service_helpers import Words, address_of, scheduler

from rsrank_rag.ranking.explanation import Explanation
from rsrank_rag.service.app import create_app

load_all_checks()

pytestmark = pytest.mark.slow

LIMITS = {"max_documents": 50, "max_body_bytes": 100_000}
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


schema = schemathesis.openapi.from_dict(create_app(scheduler(Explaining())).openapi())


@schema.parametrize()
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_endpoint_breaks_and_every_answer_is_as_described(case, address):
    case.call_and_validate(
        base_url=address, excluded_checks=schemathesis.checks.CHECKS.get_by_names(NOT_CHECKED)
    )


def test_the_service_is_as_well_after_it_as_before(address):
    assert httpx.get(f"{address}/ready").status_code == 200
    found = httpx.post(
        f"{address}/v1/rerank", json={"query": "a b", "documents": ["b", "a b"]}
    ).json()
    assert [row["index"] for row in found["results"]] == [1, 0]

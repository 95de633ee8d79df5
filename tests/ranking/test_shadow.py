"""Shadow mode through both frameworks, and the report of its log."""

import json
import logging
import math

import pytest
from click.testing import CliRunner

from rsrank_rag import RankedDocument, RankResult, Reranker, Rule
from rsrank_rag.cli import app
from rsrank_rag.ranking.shadow import log as log_shadow
from rsrank_rag.ranking.shadow import read, report
from rsrank_rag.reranker import BLANK_SCORE

TEXTS = ["1 one", "-4 four four", "3 three", "0.05"]


class Numbers(Reranker):
    def score(self, query, documents):
        return [float(text.split()[0]) for text in documents]


def entries(caplog):
    lines = [record.message for record in caplog.records if record.name == "rsrank_rag.shadow"]
    return [json.loads(line)["shadow"] for line in lines]


def of_langchain(**settings):
    pytest.importorskip("langchain_core")
    from langchain_core.documents import Document

    from rsrank_rag.langchain import RSRankCompressor

    compressor = RSRankCompressor(model=Numbers(), **settings)
    actual = compressor.compress_documents([Document(text) for text in TEXTS], "q")
    return [(document.page_content, document.metadata["relevance_score"]) for document in actual]


def of_llama_index(**settings):
    pytest.importorskip("llama_index.core")
    from llama_index.core.schema import NodeWithScore, TextNode

    from rsrank_rag.llama_index import RSRankPostprocessor

    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    actual = RSRankPostprocessor(model=Numbers(), **settings).postprocess_nodes(
        nodes, query_str="q"
    )
    return [(scored.node.text, scored.score) for scored in actual]


@pytest.mark.parametrize("call", [of_langchain, of_llama_index])
@pytest.mark.parametrize("options", [{}, {"top_n": 1}, {"extract": "sentences"}])
def test_an_adapter_in_shadow_mode_returns_everything_as_it_came_and_logs_what_would_go(
    call, options, caplog
):
    caplog.set_level(logging.INFO, "rsrank_rag.shadow")
    assert call(mode="shadow", **options) == list(zip(TEXTS, [1.0, -4.0, 3.0, 0.05], strict=True))
    (entry,) = entries(caplog)
    kept = call(**options)
    assert [TEXTS[one["index"]] for one in entry["kept"]] == [text for text, _ in kept]
    assert (entry["query"], entry["threshold"], entry["none_relevant"]) == ("q", 0.0, False)
    assert len(entry["request_id"]) >= 36
    dropped = [TEXTS[one["index"]] for one in entry["dropped"]]
    assert sorted(dropped) == sorted(set(TEXTS) - {text for text, _ in kept})
    assert entry["characters_saved"] == sum(map(len, dropped))
    assert not any(text in caplog.text for text in TEXTS[:3])


def test_the_report_adds_up_what_was_logged(caplog, tmp_path):
    caplog.set_level(logging.INFO, "rsrank_rag.shadow")
    of_langchain(mode="shadow")
    of_langchain(mode="shadow", threshold=5.0)
    of_langchain(mode="shadow", threshold=None)
    # Nothing has text, and there is no threshold that anything could score above.
    log_shadow(RankResult("q", Rule(), (RankedDocument(0, " ", BLANK_SCORE),), ()))
    # Nothing is below minus infinity, which is a threshold like any other.
    log_shadow(RankResult("q", Rule(-math.inf), (RankedDocument(0, "a", 1.0),), ()))
    log = tmp_path / "app.log"
    lines = [f"2026-01-01 {{app}} INFO {record.message}" for record in caplog.records]
    # As a log of JSON lines has it.
    lines[0] = json.dumps({"time": "2026-01-01", "message": caplog.records[0].message})
    # A last line with neither a brace nor a line break.
    assert report(read(["shadow 5"]))["calls"] == 0
    foreign = ['{"shadow": true}', '{"message": ["shadow"]}', '{"message": "{\\"shadow\\": 5}"}']
    foreign.append('{"shadow": ' * 100_000)
    text = "\n".join(["started", *lines, "{shadow", *foreign])
    log.write_text(text, encoding="utf-8")
    with log.open(encoding="utf-8") as opened:
        actual = report(read(opened))
    saved = len(TEXTS[1]) + sum(map(len, TEXTS))
    assert actual == {
        "calls": 5,
        "documents": 14,
        "dropped": 5 / 14,
        "tokens_saved": saved // 4,
        "none_relevant": 1,
        "with_threshold": 3,
    }
    message = CliRunner().invoke(app, ["report", str(log)])
    assert message.exit_code == 0
    assert message.stdout == (
        "5 calls, 3 with a threshold\n"
        "14 documents, 35.7% would have been dropped\n"
        f"about {saved // 4} tokens would have been saved\n"
        "1 calls with nothing above the threshold\n"
    )
    log.write_text(lines[3], encoding="utf-8")
    message = CliRunner().invoke(app, ["report", str(log)]).stdout
    assert message.endswith("about 0 tokens would have been saved\n")
    log.write_text("nothing", encoding="utf-8")
    assert CliRunner().invoke(app, ["report", str(log)]).exit_code == 2
    for missing in (tmp_path / "no.log", tmp_path):
        assert CliRunner().invoke(app, ["report", str(missing)]).exit_code == 2


def test_the_report_lists_the_calls_with_what_each_would_have_dropped(caplog, tmp_path):
    caplog.set_level(logging.INFO, "rsrank_rag.shadow")
    documents = [{"text": "-1 secret", "id": "a7"}, "2 two", "-3 three"]
    log_shadow(Numbers().rank("which?", documents), "run-1")
    log_shadow(Numbers().rank("none", ["1 one"]))
    log = tmp_path / "app.log"
    log.write_text("\n".join(record.message for record in caplog.records), encoding="utf-8")
    message = CliRunner().invoke(app, ["report", str(log), "--calls"]).stdout
    assert message.splitlines()[:2] == [
        "run-1  'which?': 1 kept, 2 dropped: a7 -1.00, [2] -3.00",
        "-  'none': 1 kept, 0 dropped: -",
    ]
    assert "secret" not in log.read_text(encoding="utf-8")

"""The comparison and its page: numbers by hand, valid HTML, hostile text, no outside links."""

import json
import random
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from test_metrics import Length

from rsrank_rag.errors import MissingDependencyError
from rsrank_rag.evaluation import report
from rsrank_rag.evaluation.comparison import METRICS, Comparison, Measured, compare
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery, read_sets
from rsrank_rag.evaluation.evaluate import recommend, score_dataset, summarise
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.ranking.rule import Rule

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

HOSTILE = "<script>alert('x')</script> & \"quotes\" {{ 7 * 7 }} </table>"
VOID = {"br", "col", "hr", "img", "input", "link", "meta"}


class Page(HTMLParser):
    """Reads a page and checks that every tag is closed where it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def made_up(count, seed, hostile=False):
    rng = random.Random(seed)
    queries = []
    for number in range(count):
        documents = tuple(
            LabelledDocument(
                id=f"d{i}",
                text=HOSTILE if hostile and not i else f"passage {i}",
                title="Title",
                relevant=rng.random() < 0.3,
            )
            for i in range(rng.randint(3, 8))
        )
        name = f"{seed}-{number}" + ("<b>" if hostile else "")
        queries.append(
            LabelledQuery(
                id=name, query=HOSTILE if hostile else f"question {number}?", documents=documents
            )
        )
    return queries


SETS = {"first.set": made_up(8, 0, hostile=True), "second": made_up(6, 1)}


def measured(name, seed, skill, threshold=0.0):
    """A system whose scores rise with the labels, and less so with noise."""
    rng = random.Random(seed)
    scored = {
        label: [
            ScoredQuery(
                [
                    rng.gauss(skill if document.relevant else -skill, 1.0)
                    for document in query.documents
                ],
                [document.relevant for document in query.documents],
            )
            for query in queries
        ]
        for label, queries in SETS.items()
    }
    return Measured(name, Rule(threshold, max_gap=2.0), "native", scored)


SYSTEMS = [measured("good <i>", 2, 1.0), measured("bad", 3, 0.1, threshold=0.5)]


@pytest.fixture(scope="module")
def found():
    return compare(SYSTEMS, SETS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports") / "report"
    report.write_report(folder, SYSTEMS, SETS)
    return folder


@pytest.fixture(scope="module")
def html(folder):
    return (folder / "index.html").read_text(encoding="utf-8")


# Numbers


def test_means_equal_those_of_the_plain_evaluation(found):
    for system, result in zip(SYSTEMS, found.systems, strict=True):
        for name, queries in system.scored.items():
            summary = summarise(queries, system.rule)
            expected = {**summary, **summary["rules"]["in_use"]}
            expected["lost"] /= summary["answerable"]
            assert {m: result.sets[name].metrics[m].mean for m in METRICS} == pytest.approx(
                {m: expected[m] for m in METRICS}
            )
        for metric in METRICS:
            means = [result.sets[name].metrics[metric].mean for name in SETS]
            assert result.metrics[metric].mean == pytest.approx(sum(means) / 2)


def test_a_metric_that_means_nothing_is_left_out_and_shown_as_a_dash():
    queries = [ScoredQuery([-1.0], [False])] * 2
    documents = (LabelledDocument(id="d", text="x", relevant=False),)
    sets = {"s": [LabelledQuery(id=str(n), query="?", documents=documents) for n in range(2)]}
    systems = [Measured(name, Rule(0.0), "native", {"s": queries}) for name in "xy"]
    result = compare(systems, sets)
    assert set(METRICS) - set(result.systems[0].metrics) == {"lost", "recall"}
    assert set(METRICS) - set(result.differences[0].mean) == {"lost", "recall"}
    assert '<td class="n">–</td>' in re.sub(r"\s*\n\s*", "", report.page(result, systems, sets))


@pytest.mark.parametrize("origin", ["native", "the best over all sets; no native one"])
def test_the_page_says_where_a_rule_comes_from(origin):
    systems = [replace(SYSTEMS[1], origin=origin)]
    page = report.page(compare(systems, SETS), systems, SETS)
    assert f'<small class="wrap">{origin}</small>' in page


def test_differences_are_paired_and_over_sets_each_counts_the_same(found):
    first, second = found.systems
    (pair,) = found.differences
    assert (pair.first, pair.second) == ("good <i>", "bad")
    for metric in METRICS:
        by_set = {
            n: first.sets[n].metrics[metric].mean - second.sets[n].metrics[metric].mean
            for n in SETS
        }
        assert {n: pair.sets[n][metric].mean for n in SETS} == pytest.approx(by_set)
        assert pair.mean[metric].mean == pytest.approx(sum(by_set.values()) / 2)
    assert pair.mean["ndcg@5"].mean > 0.2  # it is much better


def test_a_comparison_by_hand():
    documents = tuple(
        LabelledDocument(id=str(i), text="x", relevant=label)
        for i, label in enumerate([True, False, True])
    )
    queries = [LabelledQuery(id="a", query="?", documents=documents)] * 2
    scored = [
        ScoredQuery([4.0, -1.0, -2.0], [True, False, True]),
        ScoredQuery([-4.0, 1.0, 0.0], [True, False, True]),
    ]
    (system,) = compare([Measured("x", Rule(0.5), "given", {"s": scored})], {"s": queries}).systems
    result = system.sets["s"]
    assert [row.metrics["f1"] for row in result.queries] == pytest.approx([2 / 3, 0.0])
    assert [row.metrics["kept"] for row in result.queries] == [1, 1]
    assert result.metrics["lost"].mean == 0.5


def test_the_report_reads_back_as_what_was_measured(folder, found):
    text = (folder / "report.json").read_text(encoding="utf-8")
    again = Comparison.model_validate_json(text)
    assert again == compare(SYSTEMS, SETS)
    assert (
        json.loads(text)["systems"][0]["sets"]["second"]["queries"][0]["scores"]
        == SYSTEMS[0].scored["second"][0].scores
    )
    assert again.labels["second"][0].relevant == tuple(
        document.relevant for document in SETS["second"][0].documents
    )


# The page


def test_the_page_is_well_formed_and_every_table_has_a_caption_and_headers(html):
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("table")) == len(page.all("caption")) == len(page.all("thead")) > 20
    assert all(attributes["scope"] in ("col", "colgroup", "row") for attributes in page.all("th"))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert {attributes["href"].removeprefix("#") for attributes in page.all("a")} <= ids
    assert all(image["alt"] for image in page.all("img"))
    scrolling = [
        attributes for attributes in page.all("div") if attributes.get("class") == "scroll"
    ]
    assert all(
        attributes["tabindex"] == "0" and attributes["aria-label"] for attributes in scrolling
    )


def test_the_page_shows_lost_answers_alternatives_and_advice(html):
    text = " ".join(" ".join(Page(html).text).split())
    for system in SYSTEMS:
        for name, scored in system.scored.items():
            summary = summarise(scored, system.rule)
            unanswerable = summary["queries"] - summary["answerable"]
            table = text.partition(f"{system.name}, {name}: the rule in use and what")[2]
            rows, _, advice = table.partition("On these queries")
            for one in summary["rules"].values():
                lost = f"{one['lost']} of {summary['answerable']}"
                numbers = f"{one['kept']:.2f} {one['recall']:.3f} {one['f1']:.3f}"
                called_relevant = f"{one['called_relevant']} of {unanswerable}"
                assert f" {one['rule']} {lost} {numbers} {called_relevant} " in rows
            # The advice and the table before it round alike.
            kept = re.search(r"keeps ([\d.]+) passages", advice)[1]
            assert f" {kept} " in rows
            assert recommend(scored, system.rule) in text
            assert f"AUROC of the best score: {summary['auroc']:.3f}; false accepts" in advice
    assert text.count("first 3 in the file's order") == 4


def test_the_page_holds_every_query(html):
    text = Page(html).text
    assert {query.id for queries in SETS.values() for query in queries} <= set(text)
    assert HOSTILE in text  # as a query, as it is
    assert any(f"Title {HOSTILE}" in part for part in text)  # as a document


def test_hostile_text_stays_text(html):
    page = Page(html)
    assert page.all("script") == page.all("b") == page.all("i") == []
    assert "good <i>" in page.text
    assert " 49 " not in html


def test_the_page_needs_nothing_from_elsewhere(html):
    page = Page(html)
    assert page.all("link") == page.all("iframe") == []
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    outside = re.sub(r"base64,[A-Za-z0-9+/=]+", "", html)
    assert not re.search(r"https?://|url\(|@import", outside)


def test_worst_queries_show_a_line_between_kept_and_dropped_documents(html, found):
    tables = re.findall(r"<caption>Documents of.*?</table>", html, flags=re.DOTALL)
    shown = []
    for rows in tables:
        above, below = re.split(r'<tr class="threshold">.*?</tr>', rows, flags=re.DOTALL)
        scores = [
            [float(number) for number in re.findall(r"[+-]\d+\.\d{3}", part)]
            for part in (above, below)
        ]
        assert scores[0] + scores[1] == sorted(scores[0] + scores[1], reverse=True)
        shown.append(len(scores[0]))
    kept = []
    for system in found.systems:
        for name in SETS:
            queries = system.sets[name].queries
            kept += [queries[row].metrics["kept"] for row in report.worst_queries(queries)]
    assert shown == kept


def test_the_worst_queries_are_those_with_the_lowest_f1(found):
    queries = found.systems[1].sets["first.set"].queries
    worst = report.worst_queries(queries)
    lowest = sorted(query.metrics["f1"] for query in queries)[: report.WORST]
    assert [queries[row].metrics["f1"] for row in worst] == lowest


def test_perfect_queries_are_not_the_worst():
    perfect = {
        name: [
            ScoredQuery(
                [1.0 if d.relevant else -1.0 for d in q.documents],
                [d.relevant for d in q.documents],
            )
            for q in qs
        ]
        for name, qs in SETS.items()
    }
    systems = [Measured("x", Rule(0.0), "given", perfect)]
    found = compare(systems, SETS)
    assert report.worst_queries(found.systems[0].sets["second"].queries) == []
    assert "every query is selected perfectly" in report.page(found, systems, SETS)


def test_the_page_has_a_figure_of_each_system_and_nothing_lies_beside_it(folder, html):
    captions = [f"{s.name}: scores of relevant and of irrelevant documents." for s in SYSTEMS]
    assert [image["alt"] for image in Page(html).all("img")] == captions
    assert {path.name for path in folder.iterdir()} == {"index.html", "report.json"}


def test_a_set_of_one_query_has_numbers_without_intervals(tmp_path):
    sets = {"one": made_up(1, 5)}
    scored = {"one": score_dataset(Length(), sets["one"])}
    found = report.write_report(tmp_path, [Measured("length", Rule(3.0), "given", scored)], sets)
    assert found.systems[0].metrics["ndcg@5"].low is None
    Page((tmp_path / "index.html").read_text(encoding="utf-8"))


def test_the_page_shows_no_interval_without_width(tmp_path):
    sets = {"one": made_up(12, 5)}
    perfect = [
        ScoredQuery(
            [float(one.relevant) for one in query.documents],
            [one.relevant for one in query.documents],
        )
        for query in sets["one"]
    ]
    found = report.write_report(
        tmp_path, [Measured("perfect", Rule(0.5), "given", {"one": perfect})], sets
    )
    f1 = found.systems[0].metrics["f1"]
    assert f1.low == f1.high == 1.0
    assert "1.000 to 1.000" not in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_document_is_shown_as_it_was_scored_and_cut_where_it_is_long():
    document = LabelledDocument(id="d", text="word " * 500, title="Title", relevant=True)
    sets = {"s": [LabelledQuery(id="q", query="?", documents=(document,))]}
    systems = [Measured("x", Rule(0.0), "given", {"s": [ScoredQuery([-1.0], [True])]})]
    shown = report.page(compare(systems, sets), systems, sets)
    assert len(re.search(r"Title word[^<]*…", shown)[0]) == report.TEXT_LENGTH


@pytest.mark.parametrize(("module", "extra"), [("jinja2", "eval,plots"), ("matplotlib", "plots")])
def test_a_missing_package_is_said_before_the_work(monkeypatch, tmp_path, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{extra}\]"):
        report.check_report(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="report"):
        report.check_report(tmp_path / "file" / "report")


def test_sets_that_share_a_name_go_by_their_paths(tmp_path):
    paths = []
    for name in ("a/one.jsonl", "b/one.jsonl", "b/two.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "\n".join(query.model_dump_json() for query in SETS["second"]), encoding="utf-8"
        )
        paths.append(path)
    found = read_sets([*paths, paths[0]])
    assert list(found) == ["one", str(paths[1]), "two"]
    assert found["two"] == SETS["second"]

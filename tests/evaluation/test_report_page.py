"""The evaluation report in a real browser: its layout, its dark colours, and no requests."""

import contextlib
import itertools
import re

import pytest
from browser import CHROMIUM, CONTRASTS, browsing, fits
from conftest import DOCUMENTS, QUERIES
from test_report import Page

from rsrank_rag.evaluation.comparison import Measured
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.evaluate import score_dataset
from rsrank_rag.evaluation.report import write_report
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.ranking.rule import Rule

pytestmark = pytest.mark.browser
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

HOSTILE = [
    "<script>alert('script')</script>",
    "<img src=x onerror=alert('image')> <svg onload=alert('svg')>",
    (
        "</td></tr></table></details></main><b id=bold>out of the table</b><style>body { display: "
        "none }</style>"
    ),
    "<a href=javascript:alert('link')>link</a> --> ]]> &lt;b&gt; {{ 7 * 7 }}",
    "unbroken" * 60,
]
NAMES = ["hotpotqa.paragraph", "2wiki.sentence", "musique.paragraph", "--> <b>fever</b>"]
SIZES = {"desk": (1280, 900), "phone": (400, 800), "small phone": (320, 640), "paper": (718, 1047)}


@pytest.fixture(scope="module")
def report(ranker, tmp_path_factory):
    """Where a report lies: a tiny model and BM25, on sets that hold markup and endless words."""
    texts = [*DOCUMENTS, *HOSTILE]
    documents = [
        tuple(
            LabelledDocument(
                id=f"<i>{i}", text=text, title="<u>Title</u>", relevant=(i + shift) % 3 == 0
            )
            for i, text in enumerate(texts)
        )
        for shift in range(3)
    ]
    queries = [*QUERIES, HOSTILE[0], HOSTILE[1], HOSTILE[4]]
    sets = {
        name: [
            LabelledQuery(id=f"{name} {i}", query=query, documents=documents[(i + j) % 3])
            for i, query in enumerate(queries)
        ]
        for j, name in enumerate(NAMES)
    }
    measured = [
        Measured(
            title,
            Rule(threshold, max_gap=2.0),
            origin,
            {name: score_dataset(system, rows) for name, rows in sets.items()},
        )
        for title, system, threshold, origin in (
            ("me/a-tiny-model-of-four-layers", ranker, 0.0, "native"),
            ("bm25", BM25(), 0.7, "the best over all files; this system has no native threshold"),
        )
    ]
    folder = tmp_path_factory.mktemp("report")
    write_report(folder, measured, sets)
    return folder / "index.html"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
    with browsing() as browser:
        yield browser


@contextlib.contextmanager
def reading(browser, path, size="desk", heard=None, unfold=True, **options):
    """The unfolded report from the disk; `heard` records the browser's messages and requests."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, locale="en-GB", **options
    )
    heard = {} if heard is None else heard
    heard.update(asked=[], alarms=[])
    context.on("request", lambda request: heard["asked"].append(request.url))
    page = context.new_page()
    page.on("dialog", lambda dialog: (heard["alarms"].append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: heard["alarms"].append(str(error)))
    page.on("console", lambda message: heard["alarms"].append(message.text))
    page.set_default_timeout(20_000)
    page.goto(path.as_uri())
    if unfold:
        page.evaluate(
            "for (const details of document.querySelectorAll('details')) details.open = true"
        )
    try:
        yield page
    finally:
        context.close()


def test_nothing_goes_wrong_and_nothing_is_asked_of_others(browser, report):
    heard = {}
    with reading(browser, report, heard=heard) as page:
        page.wait_for_load_state("networkidle")
        assert page.title() == "Evaluation of me/a-tiny-model-of-four-layers, bm25"
    assert heard["alarms"] == []
    assert heard["asked"][0] == report.as_uri()
    assert all(url.startswith("data:image/png;base64,") for url in heard["asked"][1:])


def test_every_figure_is_shown(browser, report):
    with reading(browser, report) as page:
        figures = page.evaluate(
            "[...document.images].map((i) => [i.complete, i.naturalWidth, i.clientWidth, "
            "i.clientHeight])"
        )
    assert len(figures) == 2
    assert all(complete and min(sizes) > 100 for complete, *sizes in figures)


@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_as_wide_as_the_window_and_wide_tables_scroll_in_their_own_box(
    browser, report, size
):
    with reading(browser, report, size) as page:
        assert fits(page)
        boxes = page.evaluate(
            """[...document.querySelectorAll("table, figure img")].map((inside) => {
                const scroll = inside.closest(".scroll");
                const box = scroll.getBoundingClientRect();
                return [box.left, box.right, scroll.scrollWidth - Math.ceil(box.width)];
            })"""
        )
        assert len(boxes) > 40
        assert all(left >= 0 and right <= SIZES[size][0] for left, right, _ in boxes)
        wide = [number for number, (_, _, beyond) in enumerate(boxes) if beyond > 0]
        assert wide or size == "desk"
        for number in wide[:1]:
            box = page.locator(".scroll").nth(number)
            box.focus()
            page.keyboard.press("ArrowRight")
            page.wait_for_function("(box) => box.scrollLeft > 0", arg=box.element_handle())


@pytest.mark.parametrize(
    ("scheme", "size"), list(itertools.product(("light", "dark"), ("desk", "phone")))
)
def test_every_text_stands_out_from_its_ground(browser, report, scheme, size):
    with reading(browser, report, size, color_scheme=scheme) as page:
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.search(r"\d+", ground)[0]) < 128) == (scheme == "dark")
        pale = page.evaluate(CONTRASTS)
        assert len(pale) > 1000
        assert min(pale.values()) >= 4.5, sorted(pale.items(), key=lambda item: item[1])[:5]


def test_figures_are_no_bright_boxes_in_the_dark(browser, report):
    with reading(browser, report, color_scheme="dark") as page:
        image = page.locator("figure img").first
        assert "invert" in image.evaluate("(image) => getComputedStyle(image).filter")
        page.emulate_media(color_scheme="light")
        assert image.evaluate("(image) => getComputedStyle(image).filter") == "none"


def test_markup_in_texts_is_shown_and_not_obeyed(browser, report):
    with reading(browser, report) as page:
        assert (
            page.locator("script, #bold, main b, main i, main u, main svg, main a, td img").count()
            == 0
        )
        text = page.locator("main").inner_text()
        for hostile in HOSTILE:
            assert hostile[:60] in text
        assert "<u>Title</u>" in text
        assert "--> <b>fever</b>" in text
        page.locator("nav").get_by_text("Worst queries").click()
        assert page.evaluate("location.hash") == "#worst"
    Page(report.read_text(encoding="utf-8"))


def test_the_page_is_printed_with_all_that_is_folded_in_and_nothing_beyond_the_edge(
    browser, report
):
    with reading(browser, report, "paper", unfold=False) as page:
        folded = page.locator("details table").last
        assert not folded.is_visible()
        page.emulate_media(media="print")
        assert folded.is_visible()
        assert folded.bounding_box()["height"] > 100
        assert not page.locator("nav").is_visible()
        beyond = page.evaluate(
            "[...document.querySelectorAll('table, img')].map((e) => "
            "e.getBoundingClientRect().right - innerWidth)"
        )
        assert max(beyond) <= 0

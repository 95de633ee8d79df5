"""The service's page in a real browser, with a real model behind it.

``python tests/test_page.py`` writes the hashes into the page's policy and renews its picture in the
docs.
"""

import base64
import contextlib
import hashlib
import io
import itertools
import random
import re
import threading
import time
from pathlib import Path

import pytest
from browser import CHROMIUM, CONTRASTS, browsing, fits
from service_helpers import address_of, in_thread

from rsrank_rag import RSRank
from rsrank_rag.errors import InputError, ScoringError
from rsrank_rag.ranking.explanation import Explanation
from rsrank_rag.reranker import Pair, Reranker, Scored

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "rsrank_rag" / "service" / "page.html"
PICTURE = ROOT / "docs" / "images" / "page.png"
SIZES = {"desk": (1180, 900), "phone": (390, 844), "small phone": (320, 640)}

QUERY = "Why is bread dough left to rest?"
PASSAGES = [
    "The ferry to the islands leaves twice a day, at eight and at four.",
    "While the dough rests, yeast turns sugar into gas, and the bubbles make the bread rise.",
    "Rye is sown in autumn and cut in July.",
    "A long rest relaxes the gluten in the dough, so that a loaf can be shaped without tearing.",
    "Bread goes stale more slowly in a clay pot than in a bag.",
]


class Measured(Reranker):
    """Scores a text by its length against ten characters, and cannot say why."""

    def __init__(self, threshold=0.0):
        self.threshold, self.seconds = threshold, 0.0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def score(self, query, documents):
        if query == "slow":
            self.may_go_on.wait(120)
        time.sleep(self.seconds)
        for index, text in enumerate(documents):
            if text == "no score":
                raise ScoringError("has no score.", index)
        return [len(text) - 10.0 for text in documents]


class Mute(Measured):
    """Could explain, and does not want to."""

    def explain(self, query, document):
        raise InputError("I do not explain this.")


class ShortSighted(Measured):
    """Reads at most 100 characters of a text."""

    def score_documents(self, query, documents):
        return [Scored(len(text) - 10.0, truncated=len(text) > 100) for text in documents]


class Deep(Measured):
    """Explains by 35 layers, another score than it gave."""

    def explain(self, query, document):
        chance = random.Random(0)
        parts = tuple(tuple(chance.gauss(0, 1) for _ in range(35)) for _ in query.split())
        score = sum(map(sum, parts))
        return Explanation(
            query, document, score, False, tuple(query.split()), tuple(range(1, 36)), parts, ()
        )


def sealed(page):
    """The page with hashes of its script and style in its policy; a browser uses no others."""
    for tag in ("script", "style"):
        content = re.search(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        page = re.sub(f"{tag}-src 'sha256-[^']*'", f"{tag}-src 'sha256-{digest}'", page)
    return page


def served(reranker, key=None):
    """A service with a model in this process; gives its address."""
    return address_of(in_thread(lambda: reranker, "mini"), api_keys=(key,) if key else ())


def opened(browser, address, size="desk", **options):
    """A new page at the address, which has its focus where a visitor would start."""
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, locale="en-GB", **options)
    page.set_default_timeout(20_000)
    page.goto(address)
    # Focus and keys come with the first picture, which may be drawn after the page is loaded.
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert focus(page) == "Question"
    return page


def type_in(page, query, passages, separator="\n"):
    """Fill both fields and rank, without a mouse."""
    page.get_by_label("Question").fill(query)
    page.get_by_label("Passages").fill(separator.join(passages))
    page.keyboard.press("Control+Enter")


def ranked_in_vain(page, words):
    """The same, and wait for the reason why there is no answer."""
    with page.expect_response("**/v1/rerank"):
        type_in(page, QUERY, PASSAGES)
    page.get_by_role("alert").get_by_text(words).wait_for()


def ranked(page, query=QUERY, passages=PASSAGES, separator="\n"):
    """The same, and wait for the answer."""
    with page.expect_response("**/v1/rerank"):
        type_in(page, query, passages, separator)
    page.locator("#results[aria-busy=false]").wait_for()
    return page


def rows(page, name):
    """(index, score) of the rows in one of the lists, from what can be read there."""
    texts = page.get_by_role("list", name=name, exact=True).get_by_role("button").all_inner_texts()
    actual = [re.search(r"([+−]?\d+(?:\.\d+)?).*?\[(\d+)\]", text, re.DOTALL) for text in texts]
    return [(int(row[2]), number(row[1])) for row in actual]


def number(text):
    return float(text.replace("−", "-"))


def focus(page):
    """What has the focus, by its label."""
    return page.evaluate(
        "(document.activeElement.labels?.[0] ?? document.activeElement).innerText.trim()"
    )


def focus_after(page, key):
    page.keyboard.press(key)
    return focus(page)


@pytest.fixture(scope="module")
def mini():
    return RSRank.from_pretrained(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def address(mini):
    with served(mini) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser, address):
    page = opened(browser, address)
    yield page
    page.close()


@pytest.fixture
def visit(browser):
    """Function: reranker -> the page of a service with it."""
    with contextlib.ExitStack() as stack:

        def call(reranker, size="desk", **options):
            page = opened(browser, stack.enter_context(served(reranker, **options)), size)
            stack.callback(page.close)
            return page

        yield call


def test_the_policy_names_the_script_and_the_style_that_are_in_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert page == sealed(page), "run python tests/test_page.py"


def test_everything_can_be_done_by_keyboard(page):
    keys = page.keyboard
    assert focus(page) == "Question"
    keys.type(QUERY)
    keys.press("Tab")
    assert focus(page) == "Passages"
    keys.type("\n".join(PASSAGES))
    keys.press("Control+Enter")
    page.get_by_role("heading", name="kept").wait_for()
    (best, _), (second, _), *_ = rows(page, "kept")
    stops = []
    for _ in range(4):
        keys.press("Tab")
        stops.append(focus(page))
    assert stops[:3] == ["Rank", "Fill in an example", "Rank as I type"]
    assert PASSAGES[best] in stops[3]
    last = rows(page, "dropped")[-1][0]
    places = [("ArrowDown", second), ("End", last), ("ArrowDown", last), ("Home", best)]
    for key, place in [*places, ("ArrowUp", best)]:
        assert PASSAGES[place] in focus_after(page, key)
    keys.press("Enter")
    page.get_by_role("table").wait_for()
    keys.press("Tab")
    label = page.evaluate("document.activeElement.ariaLabel")
    assert label == f"Parts of the score of passage {best}"
    keys.press("Tab")
    # All rows together are one stop.
    assert page.evaluate("document.activeElement === document.body")
    keys.press("Shift+Tab")
    keys.press("Shift+Tab")
    keys.press("Space")
    assert not page.get_by_role("table").is_visible()


def test_kept_and_dropped_are_what_the_ranker_says(page, mini):
    ranked(page)
    expected = mini.rank(QUERY, PASSAGES)
    for name in ("kept", "dropped"):
        documents = getattr(expected, name)
        assert documents
        actual = rows(page, name)
        assert [index for index, _ in actual] == [document.index for document in documents]
        assert [score for _, score in actual] == pytest.approx(
            [document.score for document in documents], abs=1e-3
        )
        verdicts = page.get_by_role("list", name=name, exact=True).locator(".verdict")
        assert verdicts.all_inner_texts() == [name] * len(documents)
    outcome = f"{len(expected.kept)} kept, {len(expected.dropped)} dropped"
    assert page.locator("#outcome").inner_text() == outcome
    pairs = [Pair(QUERY, text) for text in PASSAGES]
    tokens = sum(scored.tokens for scored in mini.score_pairs(pairs))
    assert page.locator("#latency dd").last.inner_text() == f"{tokens:,}"
    assert page.get_by_role("status").inner_text() == page.locator("#outcome").inner_text()


def test_one_line_at_the_threshold_parts_the_bars_of_the_kept_from_those_of_the_dropped(page):
    ranked(page)
    lines = [line.bounding_box() for line in page.locator(".line").all()]
    assert len(lines) == 1 + len(PASSAGES)
    middle = lines[0]["x"] + lines[0]["width"] / 2
    assert [line["x"] for line in lines] == pytest.approx([lines[0]["x"]] * len(lines), abs=0.1)
    lengths = []
    for name, side in (("kept", 1), ("dropped", -1)):
        bars = page.locator(f".{name} .bar").all()
        for (_, score), bar in zip(rows(page, name), bars, strict=True):
            box = bar.bounding_box()
            near, far = (box["x"], box["x"] + box["width"])[::side]
            assert near == pytest.approx(middle, abs=1)
            assert (far - middle) * side > 0
            lengths.append(box["width"] / abs(score))
    assert lengths == pytest.approx([lengths[0]] * len(lengths), rel=0.03)
    divider = page.get_by_text("Threshold 0: kept above, dropped below").bounding_box()
    assert page.locator(".kept li").last.bounding_box()["y"] < divider["y"]
    end = divider["y"] + divider["height"]
    assert page.locator(".dropped li").first.bounding_box()["y"] >= end - 1


def test_the_parts_are_those_of_the_score_and_add_up_to_it(page, mini):
    ranked(page)
    index, score = rows(page, "dropped")[0]
    page.get_by_role("list", name="dropped").get_by_role("button").first.click()
    table = page.get_by_role("table")
    table.wait_for()
    expected = mini.explain(QUERY, PASSAGES[index])
    head = table.locator("thead tr:last-child th[scope=col]").all_inner_texts()
    assert head == list(map(str, expected.layers))
    assert table.locator("tbody th[scope=row]").all_inner_texts() == list(expected.tokens)
    body = []
    for row in table.locator("tbody tr").all():
        body.append(list(map(number, row.locator("td").all_inner_texts())))
    for actual, parts, match in zip(body, expected.parts, expected.matches, strict=True):
        assert actual == pytest.approx([sum(parts) + match, *parts, match], abs=6e-4)
    total, *sums = map(number, table.locator("tfoot td").all_inner_texts())
    matched = sum(expected.matches)
    similarity = [matched, expected.similarity - matched]
    by_layer = [sum(column) for column in zip(*expected.parts, strict=True)]
    assert sums == pytest.approx([*by_layer, *similarity], abs=6e-4)
    assert total == pytest.approx(score, abs=1.1e-3)
    text = page.locator(".details p").inner_text()
    assert page.get_by_role("status").inner_text() == text
    by_token = [total for total, *_ in body]
    token = expected.tokens[by_token.index(max(by_token))]
    assert f"The token “{token}” raises the score most" in text
    assert "All parts add up to" in text


def test_parts_that_do_not_add_up_to_the_ranked_score_and_many_layers_are_shown_as_they_are(visit):
    page = ranked(visit(Deep()), QUERY, PASSAGES)
    page.get_by_role("button", name=PASSAGES[0]).press("Enter")
    region = page.get_by_role("region", name="Parts of the score")
    region.wait_for()
    assert "when it is read alone" in page.locator(".details p").inner_text()
    assert page.locator("thead th[scope=col]").count() == 2 + 35
    assert fits(page)
    before = region.locator("td").last.bounding_box()["x"]
    region.press("ArrowRight")
    page.wait_for_function(
        "before => [...document.querySelectorAll('td')].at(-1).getBoundingClientRect().x < before",
        arg=before,
    )


def test_markup_in_texts_is_shown_and_not_obeyed_and_nothing_is_asked_of_others(browser, address):
    context = browser.new_context()
    requests, alarms = [], []
    context.on("request", lambda request: requests.append(request.url))
    page = context.new_page()
    page.on("dialog", lambda dialog: alarms.append(dialog.message))
    page.on("pageerror", lambda error: alarms.append(str(error)))
    page.on("console", lambda message: alarms.append(message.text))
    page.goto(address)
    markup = ["<img src=x onerror=alert(1)>", "<script>alert(2)</script>"]
    markup.append("</textarea><b id=bold>&amp;</b>")
    ranked(page, "<i>Why</i> &lt; \"'", markup)
    for text in markup:
        page.get_by_role("button", name=text).press("Enter")
    page.get_by_role("table").nth(2).wait_for()
    assert page.locator("main img, main script, main b, main td i, main th i").count() == 0
    assert requests
    assert all(url.startswith((address, "data:,")) for url in requests)
    assert not alarms
    context.close()


def test_the_browser_is_told_to_refuse_what_the_page_never_does(page):
    refused = page.evaluate(
        """async () => {
        const refused = [];
        const note = (event) => refused.push(event.effectiveDirective);
        document.addEventListener("securitypolicyviolation", note);
        await fetch("http://127.0.0.1:9/").catch(() => 0);
        try { document.body.innerHTML = "<b>markup</b>"; } catch { refused.push("markup"); }
        new Image().src = "/picture.png";
        document.body.setAttribute("style", "color: red");
        document.body.append(document.createElement("iframe"));
        document.querySelector("iframe").src = "/docs";
        const all = ["connect-src", "img-src", "style-src-attr", "frame-src"];
        while (!all.every((name) => refused.includes(name)))
            await new Promise((done) => setTimeout(done, 20));
        return refused;
    }"""
    )
    assert {"connect-src", "markup", "img-src", "style-src-attr", "frame-src"} <= set(refused)


def test_passages_are_lines_or_what_stands_between_blank_lines(visit):
    page = visit(Measured())
    ranked(page, QUERY, ["  one passage of a line ", "another one", ""])
    assert page.get_by_text("2 passages", exact=True).is_visible()
    assert sorted(rows(page, "kept")) == [(0, 11.0), (1, 1.0)]
    passages = ["first line\nsecond line", "another passage\r\nof two lines", ""]
    ranked(page, QUERY, passages, "\n \n\n")
    assert page.get_by_text("2 passages, split at blank lines").is_visible()
    assert sorted(rows(page, "kept")) == [(0, 12.0), (1, 18.0)]


def test_without_a_question_or_passages_the_page_says_what_is_missing(page):
    page.get_by_label("Question").press("Control+Enter")
    assert page.get_by_role("alert").inner_text() == "There is no question yet."
    page.keyboard.type(QUERY)
    page.keyboard.press("Enter")
    assert "no passage" in page.get_by_role("alert").inner_text()
    assert focus(page) == "Passages"
    assert not page.locator("#results").is_visible()


def test_the_example_can_be_ranked(page, mini):
    page.get_by_role("button", name="Fill in an example").click()
    query = page.get_by_label("Question").input_value()
    passages = page.get_by_label("Passages").input_value().split("\n")
    with page.expect_response("**/v1/rerank"):
        page.get_by_role("button", name="Rank", exact=True).click()
    page.locator("#results").wait_for()
    result = mini.rank(query, passages)
    indices = [index for index, _ in rows(page, "kept")]
    assert indices == [document.index for document in result.kept]
    assert len(result.kept) < len(passages) / 2


@pytest.mark.parametrize("answer", ["dismiss", "accept"])
def test_the_example_replaces_typed_text_only_after_a_question_and_hides_its_results(page, answer):
    questions = []

    def decide(dialog):
        questions.append(dialog.message)
        getattr(dialog, answer)()

    page.on("dialog", decide)
    query, passages = page.get_by_label("Question"), page.get_by_label("Passages")
    query.fill(QUERY)
    passages.fill("\n".join(PASSAGES))
    page.get_by_role("button", name="Rank", exact=True).click()
    page.locator("#results").wait_for()
    page.get_by_role("button", name="Fill in an example").click()
    assert len(questions) == 1
    assert (query.input_value() == QUERY) == (answer == "dismiss")
    assert (passages.input_value() == "\n".join(PASSAGES)) == (answer == "dismiss")
    assert page.locator("#results").is_visible() == (answer == "dismiss")


def test_two_hundred_passages_and_endless_ones_fit(visit):
    page = visit(Measured(), size="phone")
    passages = [f"Passage number {i} " + "x" * 30 for i in range(199)] + ["endless" * 10_000]
    ranked(page, "Q" * 3000, passages)
    assert page.locator("#outcome").inner_text() == "200 kept, 0 dropped"
    assert rows(page, "kept")[0] == (199, 69_990.0)
    for part in (".text", ".score"):
        shown = page.locator(f".kept {part}").first
        assert shown.evaluate("(node) => node.scrollWidth <= node.clientWidth"), "it is cut off"
    assert fits(page)
    page.locator("li > button").first.press("Enter")
    whole = page.get_by_role("region", name="Passage 199, whole")
    assert whole.inner_text() == passages[-1]
    assert fits(page)


def test_a_passage_that_cannot_be_scored_is_named(visit):
    page = visit(Measured())
    with page.expect_response("**/v1/rerank"):
        type_in(page, QUERY, ["a passage of some length", "no score", "short"])
    page.get_by_role("alert").get_by_text("Document 1 has no score.").wait_for()
    assert page.locator("#results").is_hidden()


def test_passages_that_were_cut_are_marked(visit):
    page = ranked(visit(ShortSighted()), QUERY, ["Dough rests. " * 9, *PASSAGES])
    assert page.get_by_text("cut: its end was not read").count() == 1
    row = page.get_by_role("button", name="cut: its end was not read")
    assert row.inner_text().count("[0]") == 1


def test_a_score_at_the_threshold_is_dropped_wherever_the_threshold_lies(visit):
    page = ranked(visit(Measured(5.0)), QUERY, ["x" * 15, "x" * 16, "x" * 40])
    assert rows(page, "kept") == [(2, 30.0), (1, 6.0)]
    assert rows(page, "dropped") == [(0, 5.0)]
    assert page.get_by_text("Threshold 5: kept above, dropped below").is_visible()


def test_a_model_without_threshold_gets_no_line_and_drops_nothing(visit):
    page = ranked(visit(Measured(None)), QUERY, ["x" * 15, "x" * 5])
    assert rows(page, "ranked") == [(0, 5.0), (1, -5.0)]
    assert page.locator(".line").count() == 0
    assert "none is dropped" in page.locator("#outcome").inner_text()
    for verdict in ("kept", "dropped"):
        assert not page.get_by_text(verdict, exact=True).count()


def test_parts_that_did_not_come_are_asked_for_again(page):
    page.route("**/explain", lambda route: route.abort())
    row = ranked(page).locator("li > button").first
    row.press("Enter")
    page.locator(".details").get_by_text("cannot be reached").wait_for()
    page.unroute("**/explain")
    row.press("Enter")
    row.press("Enter")
    page.get_by_role("table").wait_for()
    assert page.locator(".details p").count() == 1


def test_the_focus_is_not_lost_when_an_answer_replaces_the_rows(visit):
    reranker = Measured()
    page = ranked(visit(reranker))
    reranker.seconds = 0.5
    type_in(page, QUERY, PASSAGES[:2])
    page.locator("li > button").nth(3).focus()
    page.get_by_role("heading", name="2 kept").wait_for()
    assert focus(page).startswith("kept")
    assert PASSAGES[1] in focus(page)


def test_a_model_that_cannot_explain_says_so(visit):
    words_of = {Measured: "cannot take its scores apart", Mute: "I do not explain this."}
    for kind, words in words_of.items():
        reranker = kind()
        page = ranked(visit(reranker), QUERY, PASSAGES)
        page.locator("li > button").first.press("Enter")
        page.locator(".details").get_by_text(words).wait_for()
        assert page.get_by_role("table").count() == 0


def test_a_key_is_asked_for_when_the_service_wants_one_and_stays_in_the_tab(visit, browser):
    page = visit(Measured(), key="sesame")
    page.get_by_label("Key").wait_for()
    assert focus(page) == "Question"
    ranked_in_vain(page, "The service wants a key")
    assert focus(page) == "Key"
    page.keyboard.type("barley")
    ranked_in_vain(page, "does not know this key")
    page.get_by_label("Key").fill("ключ")
    type_in(page, QUERY, PASSAGES)
    page.get_by_role("alert").get_by_text("characters that no key can hold").wait_for()
    page.get_by_label("Key").fill("sesame")
    ranked(page)
    assert not page.get_by_role("alert").is_visible()
    page.get_by_text("mini · threshold 0").wait_for()
    stores = "[Object.values(sessionStorage), localStorage.length, document.cookie]"
    assert page.evaluate(stores) == [["sesame"], 0, ""]
    page.reload()
    page.get_by_text("mini · threshold 0").wait_for()


def test_what_the_service_refuses_is_said_in_its_words(page):
    ranked(page)
    full = {"json": {"message": "The queue is full."}, "headers": {"Retry-After": "3"}}
    page.route("**/v1/rerank", lambda route: route.fulfill(status=429, **full))
    ranked_in_vain(page, "The queue is full. Try again in 3 seconds.")
    assert not page.locator("#results").is_visible(), "they are another question's"
    page.unroute("**/v1/rerank")
    page.route("**/v1/rerank", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
    ranked_in_vain(page, "The service answered 502 and did not say why.")
    page.unroute("**/v1/rerank")
    ranked(page)
    assert page.locator("#results").is_visible()
    assert not page.get_by_role("alert").is_visible()


def test_a_service_that_has_gone_is_missed(browser):
    with served(Measured()) as address:
        page = opened(browser, address)
    type_in(page, QUERY, PASSAGES)
    page.get_by_role("alert").get_by_text("cannot be reached").wait_for()
    assert not page.locator("#results").is_visible()
    page.close()


def test_latency_is_what_the_calls_took(visit):
    reranker = Measured()
    page = visit(reranker)
    trips = []
    for reranker.seconds in (0.3, 0.1, 0.2):
        started = time.monotonic()
        ranked(page)
        longest = (time.monotonic() - started) * 1000
        texts = (page.locator(f"#latency {tag}").all_inner_texts() for tag in ("dt", "dd"))
        figures = dict(zip(*texts, strict=True))
        trips.append(float(figures["round trip"].removesuffix(" ms")))
        assert 1000 * reranker.seconds <= trips[-1] <= longest + 1
    trip = trips[-1]
    assert float(figures["median of 3 calls"].removesuffix(" ms")) == sorted(trips)[1]
    assert float(figures["passages a second"]) == pytest.approx(len(PASSAGES) / trip * 1000, abs=1)
    assert figures["tokens"] == "not counted"
    assert page.locator(".spark i").count() == 3


def test_ranking_as_one_types_waits_for_a_pause_and_gives_up_what_is_outdated(visit):
    reranker = Measured()
    page = visit(reranker)
    queries, given_up = [], []
    page.on(
        "request",
        lambda request: "rerank" in request.url and queries.append(request.post_data_json["query"]),
    )
    page.on("requestfailed", lambda request: given_up.append(request.post_data_json["query"]))
    page.get_by_label("Passages").fill("\n".join(PASSAGES))
    page.get_by_label("Rank as I type").check()
    page.get_by_label("Question").press_sequentially("Why so fast?", delay=20)
    page.locator("#results[aria-busy=false]").wait_for()
    assert queries[-1] == "Why so fast?"
    assert len(queries) < len("Why so fast?")  # one, unless this machine is too busy to type
    given_up.clear()
    reranker.may_go_on.clear()
    page.get_by_label("Question").fill("slow")
    page.locator("#results[aria-busy=true]").wait_for()
    page.get_by_label("Passages").fill(PASSAGES[0])
    with page.expect_request(
        lambda request: "rerank" in request.url and request.post_data_json["query"] == "fast"
    ):
        page.get_by_label("Question").fill("fast")
    reranker.may_go_on.set()
    page.get_by_role("heading", name="1 kept").wait_for()
    assert queries[-1] == "fast"
    assert set(given_up) == {"slow"}
    assert focus(page) == "Question"


def test_the_page_fits_and_every_text_stands_out_from_its_ground(page):
    ranked(page)
    for name in ("kept", "dropped"):
        page.get_by_role("list", name=name).get_by_role("button").first.press("Enter")
    page.get_by_role("table").nth(1).wait_for()
    for scheme, (width, height) in itertools.product(("light", "dark"), SIZES.values()):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": height})
        assert fits(page)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.search(r"\d+", ground)[0]) < 128) == (scheme == "dark")
        pale = page.evaluate(CONTRASTS)
        assert len(pale) > 100
        assert min(pale.values()) >= 4.5, sorted(pale.items(), key=lambda item: item[1])[:5]


def test_whatever_can_be_operated_has_a_name(visit):
    page = ranked(visit(Deep(), key=None))
    page.locator("li > button").first.press("Enter")
    page.get_by_role("table").wait_for()
    page.evaluate("document.querySelector('#key-field').hidden = false")
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "textbox", "checkbox", "region", "list", "table", "heading"}
    roles = set()
    for node in nodes:
        if not node["ignored"] and node["role"]["value"] in named:
            roles.add(node["role"]["value"])
            assert node["name"]["value"].strip()
    assert roles == named


def test_nothing_moves_for_those_who_want_it_still(browser, address):
    page = ranked(opened(browser, address, reduced_motion="reduce"))
    moving = (
        "[...document.querySelectorAll('*')].filter((e) => "
        "parseFloat(getComputedStyle(e).transitionDuration))"
    )
    assert page.evaluate(f"{moving}.length") == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(f"{moving}.length") > 0
    page.close()


def take_picture():
    """The example, ranked some times, its best passage open."""
    from PIL import Image

    with served(RSRank.from_pretrained(device="cpu")) as address, browsing() as browser:
        page = opened(browser, address)
        page.get_by_role("button", name="Fill in an example").click()
        for _ in range(12):
            with page.expect_response("**/v1/rerank"):
                page.get_by_role("button", name="Rank", exact=True).click()
            page.locator("#results[aria-busy=false]").wait_for()
        page.locator("li > button").first.press("Enter")
        page.get_by_role("table").wait_for()
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        picture.quantize(128, dither=Image.Dither.NONE).save(PICTURE, optimize=True)


if __name__ == "__main__":
    PAGE.write_text(sealed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    take_picture()

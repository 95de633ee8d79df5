"""Chromium for the tests of pages: how it is started, and what every page has to fulfil."""

import contextlib
import shutil

import pytest

sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


ALONE = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


CONTRASTS = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, under) =>
        under.map((value, i) => (i < 3 ? top[i] * top[3] + value * (1 - top[3]) : 1));
    const own = (element) => rgba(getComputedStyle(element).backgroundColor);
    const ground = (element) =>
        element ? over(own(element), ground(element.parentElement)) : [255, 255, 255, 1];
    const light = (colour) => {
        const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = colour.map((x) => linear(x / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = {};
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        const text = texts.currentNode.data;
        if (!text.trim() || !element.checkVisibility() || element.matches("script")) continue;
        const under = ground(element);
        const colour = over(rgba(getComputedStyle(element).color), under);
        const [a, b] = [light(colour), light(under)].sort((x, y) => y - x);
        const key = Object.keys(found).length + " " + text.slice(0, 40);
        found[key] = (a + 0.05) / (b + 0.05);
    }
    return found;
}"""
"""The contrast of every visible text with what is behind it, as WCAG 2 measures it."""


@contextlib.contextmanager
def browsing():
    """A headless browser with a profile of its own that talks to nobody but the page's service."""
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=ALONE)
        try:
            yield browser
        finally:
            browser.close()


def fits(page):
    """Whether nothing sticks out at the side."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")

"""The page in a real browser: nothing fails, nothing is asked of a network, all is visible."""

import json

import pytest

from stages.report import inputs, page
from tests.report import browser, example
from tests.report.test_page import SECTIONS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        browser.PROGRAM is None, reason="no Chromium on this machine (chromium, google-chrome)"
    ),
]
REQUEST = "Network.requestWillBeSent"
BOXES = """[...document.querySelectorAll('section')].map(s => {
  const box = s.getBoundingClientRect(), style = getComputedStyle(s);
  return [s.id, box.width, box.height, style.visibility, style.display, s.innerText.length]})"""
WIDER_THAN_PAGE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre')
  && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + ' ' + e.className)"""
LUMINANCES = """['body', 'h1', '.lead', '.figures b'].map(s => {
  const e = document.querySelector(s), c = getComputedStyle(e);
  const read = t => t.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
  const paper = getComputedStyle(document.body).backgroundColor;
  return [light(read(c.color)), light(read(paper))]})"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    program = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield program
    program.close()


@pytest.fixture(params=["whole", "hostile", "interrupted"])
def address(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if request.param != "interrupted":
        example.write(tmp_path, hostile=request.param == "hostile")
    file = tmp_path / "report.html"
    file.write_text(page.build(inputs.read(example.SETTINGS)), encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390], ids=["desktop", "phone"])
def test_page(opened, address, width, dark):
    opened.open(address, width, dark)
    boxes = opened.value(BOXES)
    assert [box[0] for box in boxes] == SECTIONS
    for name, wide, high, visibility, display, characters in boxes:
        assert wide > 300, name
        assert high > 60, name
        assert (visibility, display) == ("visible", "block"), name
        assert characters > 20, name
    assert opened.value(WIDER_THAN_PAGE) == []
    assert opened.value("document.documentElement.scrollWidth") <= width
    require_quiet(opened)


def require_quiet(opened):
    """No console message, no exception, no request but for the page itself and data inside it."""
    bad = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert [event for event in opened.events if event["method"] in bad] == []
    asked = [e["params"]["request"]["url"] for e in opened.events if e["method"] == REQUEST]
    assert asked
    assert all(url.startswith(("file:///", "data:image/png")) for url in asked)
    assert sum(url.startswith("file:") for url in asked) == 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read(opened, tmp_path, monkeypatch, dark):
    """Contrast of at least 4.5 to 1 (WCAG 2.2, 1.4.3) for ink, soft text and accent."""
    monkeypatch.chdir(tmp_path)
    example.write(tmp_path)
    file = tmp_path / "report.html"
    file.write_text(page.build(inputs.read(example.SETTINGS)), encoding="utf-8")
    opened.open(file.as_uri(), dark=dark)
    for ink, paper in opened.value(LUMINANCES):
        brighter, darker = max(ink, paper), min(ink, paper)
        assert (brighter + 0.05) / (darker + 0.05) >= 4.5
        assert (ink > paper) == dark


def test_the_browser_would_have_complained(opened, tmp_path):
    """What the other tests look for is seen when it is there."""
    file = tmp_path / "bad.html"
    file.write_text("<script>console.error('x'); fetch('https://example.invalid/')</script>")
    opened.open(file.as_uri())
    methods = [event["method"] for event in opened.events]
    assert "Runtime.consoleAPICalled" in methods
    urls = [e["params"]["request"]["url"] for e in opened.events if e["method"] == REQUEST]
    assert "https://example.invalid/" in urls, json.dumps(urls)

"""No text, wherever in a run's files it stands, becomes an element, an attribute or a script.

Every string of every report is lengthened by drawn text; the page must have the elements that it
has without, and the card the same front matter keys.
"""

import dataclasses
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.report import card, inputs, page
from tests.report import example
from tests.report.parsing import Page

ENUMS = {"level", "part", "fine_tune_type", "kind", "sha256", "target"}
"""Keys whose words choose how a page is laid out."""
PIECES = ["<script>", "</script>", "</style>", "<img src=x onerror=alert(1)>", "<!--", "-->", "]]>"]
PIECES += ['"', "'", "&lt;", "&#60;", "<", ">", "\x00", "\u2028", "\u202e", "javascript:", "`", "|"]
PIECES += ["\ud800", "---", "#", "[a](b)", "</textarea>", "<svg onload=x>", "{{x}}", "=", "\r"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), min_size=1, max_size=8)


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    example.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("DVC_ROOT", raising=False)
        return inputs.read(example.SETTINGS)


def lengthened(value, text, key=""):
    """The value with the text behind every string but the `ENUMS`."""
    if isinstance(value, dict):
        return {name: lengthened(one, text, name) for name, one in value.items()}
    if isinstance(value, list):
        return [lengthened(one, text, key) for one in value]
    return value + text if isinstance(value, str) and key not in ENUMS else value


def hostile(found, text):
    """The whole run with the text everywhere."""
    named = ("manifest", "collect", "tokenize", "split", "validate", "metrics", "samples", "prove")
    parts = {name: lengthened(getattr(found, name), text) for name in named}
    parts["training"] = dataclasses.replace(
        found.training, run=lengthened(found.training.run, text)
    )
    return dataclasses.replace(found, **parts, commit="abc" + text, changed=["a" + text])


def elements(source):
    """Names and the attributes of each element, titles and labels aside: those hold text."""
    spoken = {"title", "aria-label", "alt"}
    return [
        (name, {key: value for key, value in attributes.items() if key not in spoken})
        for name, attributes in Page(source).elements
    ]


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_text_of_a_run_is_text_of_its_page(found, pieces):
    text = "w" + "".join(pieces)
    plain = elements(page.build(hostile(found, "words")))
    source = page.build(hostile(found, text))
    source.encode("utf-8")
    assert elements(source) == plain


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_text_of_a_run_stays_where_it_is_in_its_card(found, pieces):
    text = "w" + "".join(pieces)
    whole = card.build(hostile(found, text))
    whole.encode("utf-8")
    _, front, body = re.split(r"^---\n", whole, maxsplit=2, flags=re.MULTILINE)
    assert list(yaml.safe_load(front)) == list(card.metadata(found))
    headings = [line for line in without_fences(body) if line.startswith("## ")]
    assert headings == ["## Result", "## Use", "## Training", "## Repeat", "## Samples"]


def without_fences(text):
    """Lines outside blocks of code, by the rule of CommonMark."""
    fence, outside = "", []
    for line in text.split("\n"):
        marks = re.match("`{3,}", line)
        if not fence and marks:
            fence = marks.group()
        elif fence and re.fullmatch(f"`{{{len(fence)},}} *", line):
            fence = ""
        elif not fence:
            outside.append(line)
    return outside

import pytest

from stages.report.html import Markup, escape, facts, join, table, tag
from tests.report.parsing import Page


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("a < b & c", "a &lt; b &amp; c"),
        ("<script>", "&lt;script&gt;"),
        ("\"double\" 'single'", "&quot;double&quot; &#x27;single&#x27;"),
        ("&lt;", "&amp;lt;"),
        ("\x00\x07\x1b[0m", "\\x00\\x07\\x1b[0m"),
        ("half \ud83d of a pair", "half \\ud83d of a pair"),
        ("tab\tline\nend", "tab\tline\nend"),
        ("👩‍👩‍👧 שלום", "👩‍👩‍👧 שלום"),
        (12, "12"),
    ],
)
def test_text_is_escaped(text, markup):
    assert escape(text) == markup


def test_text_comes_back_out_of_a_parser():
    text = "</p><b onclick='x()'>&copy;</b>"
    page = Page(tag("p", text, title=text))
    assert page.text == text
    assert page.elements == [("p", {"title": text})]


def test_only_markup_is_not_escaped_again():
    assert tag("p", tag("b", "x<y")) == "<p><b>x&lt;y</b></p>"
    assert tag("p", Markup("<br>") + "x") == "<p>&lt;br&gt;x</p>"  # a sum is plain text again


def test_children_none_and_lists():
    assert tag("p", None, ["a", ["b", None]], 0) == "<p>ab0</p>"
    assert join(["a<", "b"], " & ") == "a&lt; &amp; b"


def test_attributes():
    assert tag("td", class_="n", data_x=None, hidden=True, tabindex="0") == (
        '<td class="n" hidden tabindex="0"></td>'
    )
    assert tag("meta", name="viewport") == '<meta name="viewport">'


def test_table_and_facts_escape_their_cells():
    page = Page(
        table(["<h>"], [["<c>", "<d>"]], caption="<k>") + facts([("<t>", "<v>"), ("x", None)])
    )
    assert page.text == "<k><h><c><d><t><v>"
    assert {name for name, _ in page.elements} == {
        *("div", "table", "caption", "thead", "tbody", "tr", "th", "td", "dl", "dt", "dd")
    }

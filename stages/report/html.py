"""Elements of a page as text: whatever is not markup already is escaped, so data can't become any.

tag("p", "a < b", class_="note")   ->   <p class="note">a &lt; b</p>
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

VOID = {"br", "hr", "img", "meta"}

UNSEEN = {code: f"\\x{code:02x}" for code in range(32) if chr(code) not in "\t\n\r"}
UNSEEN |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
"""HTML has no way to hold these control characters, UTF-8 none to hold half of a surrogate pair;
they are shown as escapes."""


class Markup(str):
    """Text that is HTML already: made by `tag` and `join`, never out of data."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Text as HTML that shows exactly it, inside elements and quoted attributes alike."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(str(text).translate(UNSEEN), quote=True))


def join(parts: Iterable[Any], between: str = "") -> Markup:
    """Parts one after another: None is left out, lists are joined, text is escaped."""
    found = [part for part in parts if part is not None]
    return Markup(
        escape(between).join(
            join(part) if isinstance(part, list | tuple) else escape(part) for part in found
        )
    )


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """One element.

    Args:
        name: Its name.
        children: As in `join`.
        attributes: `class_` is class, other underscores are hyphens; None and False are left out,
            True stands alone.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        parts.append(label if value is True else f'{label}="{escape(value)}"')
    opening = f"<{' '.join(parts)}>"
    return Markup(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def table(
    columns: Iterable[Any],
    rows: Iterable[Iterable[Any]],
    *,
    text_columns: Iterable[int] = (0,),
    caption: str | None = None,
    class_: str | None = None,
) -> Markup:
    """A table with a header, numbers aligned to the right, that scrolls sideways where narrow.

    Args:
        text_columns: Which columns are text and stand on the left; the first is a row header.
    """
    left = set(text_columns)

    def side(i: int) -> str | None:
        return None if i in left else "n"

    head = [tag("th", name, scope="col", class_=side(i)) for i, name in enumerate(columns)]
    body = [
        tag(
            "tr",
            *(
                tag("th", cell, scope="row", class_=side(i))
                if i == 0
                else tag("td", cell, class_=side(i))
                for i, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    inner = tag(
        "table",
        tag("caption", caption) if caption else None,
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        class_=class_,
    )
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts(pairs: Iterable[tuple[str, Any]]) -> Markup:
    """A list of terms and their values; a value of None is left out."""
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value))
            for name, value in pairs
            if value is not None
        ),
        class_="facts",
    )

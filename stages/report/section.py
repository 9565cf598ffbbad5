"""A part of the page, and the notices that stand in for what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from stages.report.html import Markup, tag


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        id: For links to it.
        title: Its heading.
        body: What stands below.
        lead: One sentence below the heading.
    """

    id: str
    title: str
    body: Markup
    lead: str = ""

    def markup(self) -> Markup:
        """The part as HTML."""
        lead = tag("p", self.lead, class_="lead") if self.lead else None
        return tag("section", tag("h2", self.title), lead, self.body, id=self.id)


def absent(what: str, stage: str) -> Markup:
    """Says that a part is not there, and which stage makes it."""
    hint = tag("code", f"dvc repro {stage}")
    return tag("p", f"{what}: not there yet. ", hint, " makes it.", class_="absent")


def notice(level: str, *text: object) -> Markup:
    """A remark that stands out; `level` is ok, info, warning or error."""
    return tag("p", *text, class_=f"notice {level}", role="note")


def badge(text: str, level: str = "info") -> Markup:
    """A short word in a frame."""
    return tag("span", text, class_=f"badge {level}")


def heading(text: str) -> Markup:
    """A heading inside a section."""
    return tag("h3", text)

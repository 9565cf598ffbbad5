"""The commands of a page of docs/: every line of its fenced blocks, in order."""

from __future__ import annotations

import re

from tests.project import ROOT


def commands(page: str) -> list[str]:
    """The lines of all fenced blocks of docs/`page`, comments left out."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, page
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]

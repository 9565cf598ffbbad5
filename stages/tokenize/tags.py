"""Template tags that stand in a row's own words, where they would be read as a turn's border."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stages.tokenize.template import Template


class Tags:
    """The special tokens of a tokenizer and the tags its chat template writes as plain text."""

    def __init__(self, control_words: Sequence[str], template: Template | None) -> None:
        plain = [] if template is None else plain_tags(template, control_words)
        self.words = sorted({*control_words, *plain}, key=lambda word: (-len(word), word))
        self._firsts = sorted({word[0] for word in self.words})
        self._pattern = re.compile("|".join(map(re.escape, self.words)) or "(?!)")

    def find(self, strings: Sequence[str]) -> str:
        """The first tag in any of the strings, "" where there is none."""
        for string in strings:
            if any(first in string for first in self._firsts):
                match = self._pattern.search(string)
                if match:
                    return match[0]
        return ""


def plain_tags(template: Template, control_words: Sequence[str]) -> list[str]:
    """What the template writes around turns that is no special token: `[INST]`, `### Response:`.

    Bare words (a role's name) are left out: every text has them.
    """
    around = (template.generation_prompt, template.answer_footer, template.user_header)
    special = re.compile("|".join(map(re.escape, control_words)) or "(?!)")
    parts = [part.strip() for text in around for part in special.sub("\n", text).splitlines()]
    return sorted({part for part in parts if len(part) >= 3 and not part.isalnum()})

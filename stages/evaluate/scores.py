"""Scores of generated answers against the answers in the data."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ENDS = " .,;:!?\"'«»“”‘’。，！？"
"""Stripped at either end: what ends or quotes a sentence, no brackets, no signs."""


class _NotJson:
    """Stands for a text that holds no JSON; equal to nothing, itself included."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return False


NOT_JSON = _NotJson()


@dataclass(frozen=True)
class Score:
    """How one generated answer compares with its reference."""

    exact: bool
    """The same characters, surrounding white space aside."""
    normalised: bool
    """The same after `normalise`."""
    json_expected: bool
    """The reference is a JSON object or array: only then the next two say anything."""
    json_valid: bool
    """The generation parses as JSON."""
    json_equal: bool
    """It parses to the reference's value (order of keys aside)."""


def score(generated: str, reference: str) -> Score:
    """Compare a generated answer with the one in the data."""
    wanted = parsed(reference)
    got = parsed(generated)
    return Score(
        exact=generated.strip() == reference.strip(),
        normalised=normalise(generated) == normalise(reference),
        json_expected=isinstance(wanted, dict | list),
        json_valid=got is not NOT_JSON,
        json_equal=_same(got, wanted),
    )


def normalise(text: str) -> str:
    """Unicode NFKC, case folded, white space runs as one space, no `ENDS` at either end."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).strip(ENDS)


def parsed(text: str) -> Any:
    """The JSON value that a text is, or NOT_JSON. NaN and Infinity are no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NOT_JSON


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: unlike in Python, true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def shares(scores: Sequence[Score]) -> dict[str, float]:
    """Shares of all answers that match; the JSON shares are of the rows where JSON is expected.

    Raises:
        ZeroDivisionError: There are no scores.
    """
    found = {
        "exact_match": sum(s.exact for s in scores) / len(scores),
        "normalised_match": sum(s.normalised for s in scores) / len(scores),
    }
    expected = [s for s in scores if s.json_expected]
    if expected:
        found["json_valid"] = sum(s.json_valid for s in expected) / len(expected)
        found["json_equal"] = sum(s.json_equal for s in expected) / len(expected)
    return found

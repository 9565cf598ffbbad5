"""Text to one JSON object and back, exactly: what JSON cannot say, or says twice, is refused.

orjson reads (about 1 GB/s); the standard library explains what orjson refuses and keeps whole
numbers of any size where a row can hold numbers at all (tool definitions and calls).
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from stages.collect.badrow import BadRow

BOM = b"\xef\xbb\xbf"
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def kind_of(value: Any) -> str:
    """A JSON value's type in words, for messages."""
    if value is None:
        return "null"
    return _KINDS.get(type(value), "a number")


def read_object(text: bytes) -> dict[str, Any]:
    """Read one JSON object from UTF-8 bytes.

    Raises:
        BadRow: No JSON, no object, not UTF-8, a lone surrogate, a key that stands twice.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = _explained(text)
    if not isinstance(value, dict):
        raise BadRow(f"{kind_of(value)} where an object was expected", column=1)
    if _needs_care(text, value):
        value = _careful(_decoded(text))
    return value


def _needs_care(text: bytes, value: dict[str, Any]) -> bool:
    """Whether the row may hold numbers that matter, or the same key twice."""
    if b'"tools"' in text or b'"arguments"' in text:
        return True
    return any(text.count(b'"%s"' % key.encode()) > 1 for key in value)


def _explained(text: bytes) -> Any:
    """Read what orjson refused, or say with line and column why nobody can."""
    if text.startswith(BOM):
        return read_object(text.removeprefix(BOM))
    string = _decoded(text)
    value = _careful(string)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = _LONE_SURROGATE.search(string)
        column = found.start() - string.rfind("\n", 0, found.start()) if found else None
        raise BadRow("a lone surrogate, which is no character of any text", column) from error
    except RecursionError as error:
        raise BadRow("nested too deeply") from error
    return value


def _decoded(text: bytes) -> str:
    try:
        return text.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        before = text[: error.start].decode()
        where = len(before) - before.rfind("\n")
        raise BadRow(f"not UTF-8: byte 0x{text[error.start]:02x}", where) from error


def _careful(string: str) -> Any:
    """Read JSON with every whole number exact, refusing NaN and keys that stand twice."""
    try:
        return json.loads(string, object_pairs_hook=_once, parse_constant=_refused)
    except json.JSONDecodeError as error:
        unfinished = error.pos >= len(string.rstrip())
        raise BadRow(f"not JSON: {error.msg}", error.colno, error.lineno, unfinished) from error
    except RecursionError as error:
        raise BadRow("not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise BadRow(f"not JSON that can be read: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRow(f"the key {twice!r} stands twice in one object")
    return found


def _refused(word: str) -> None:
    raise BadRow(f"not JSON: {word} is no JSON number")


def read_value(text: str, where: str) -> Any:
    """Read JSON that stands inside a string (tools, a tool call).

    Raises:
        BadRow: It is no JSON; `where` names the key or turn.
    """
    try:
        return _careful(text)
    except BadRow as error:
        raise BadRow(f"{where} holds a string that is {error.reason}") from error


def write_record(record: dict[str, Any], numbers: bool) -> bytes:
    """A normalized row as compact JSON in UTF-8, keys in their order.

    Args:
        record: The row.
        numbers: Whether it may hold numbers (tool definitions, calls), which must stay exact.

    Raises:
        BadRow: It holds a lone surrogate or a number JSON has no word for.
    """
    try:
        if not numbers:
            return orjson.dumps(record)
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode()
    except (UnicodeEncodeError, orjson.JSONEncodeError) as error:
        raise BadRow("a lone surrogate, which is no character of any text") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(f"cannot be written as JSON: {error}") from error


def order_free(record: dict[str, Any]) -> bytes:
    """The same JSON for records that differ in the order of keys only.

    Only tool definitions and calls have keys in an order of their author's.
    """
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return text.encode()

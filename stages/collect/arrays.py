"""JSON values that span lines: where each one ends, found in a stream of text.

A JSON array, or objects one after another, is cut into the texts of its elements. Only a few
blocks of text are held at a time; the elements are parsed later, like lines of JSONL.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator

from stages.collect.blocks import BLOCK_BYTES, ROWS_PER_BLOCK, Elements
from stages.core.errors import UserError

LARGEST_ELEMENT = 256_000_000
NEAR_THE_END = 64


def elements(parts: Iterable[bytes], name: str) -> Iterator[Elements]:
    """Cut a JSON array, or values one after another, into the texts of its elements.

    Args:
        parts: The file's bytes, without a byte-order mark.
        name: What to call the file in messages.

    Raises:
        UserError: From some place on nobody can tell where a row ends.
    """
    cutter = Cutter(parts, name)
    first, texts, at, size = 1, [], [], 0
    for text, line in cutter.values():
        texts.append(text)
        at.append(line)
        size += len(text)
        if size >= BLOCK_BYTES or len(texts) >= ROWS_PER_BLOCK * 4:
            yield Elements(first, texts, at)
            first, texts, at, size = first + len(texts), [], [], 0
    if texts:
        yield Elements(first, texts, at)


class Cutter:
    """Finds where each JSON value of a stream ends, holding a few blocks of text at a time."""

    def __init__(self, parts: Iterable[bytes], name: str) -> None:
        self.parts = iter(parts)
        self.name = name
        self.decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self.scan = json.JSONDecoder(strict=False).raw_decode
        self.text = ""
        self.at = 0
        self.ended = False
        self.line = 1
        self.counted = 0

    def more(self, size: int = BLOCK_BYTES) -> bool:
        """Append about `size` more characters; False at the end of the file."""
        if self.ended:
            return False
        self.here()
        pieces, length = [self.text[self.at :]], 0
        while length < size and not self.ended:
            part = next(self.parts, None)
            self.ended = part is None
            pieces.append(self.decode(part or b"", final=self.ended))
            length += len(pieces[-1])
        self.text, self.at, self.counted = "".join(pieces), 0, 0
        return True

    def here(self) -> int:
        """The line of the file that the next character stands on."""
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.line

    def peek(self) -> str:
        """Step over white space; the next character, "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def values(self) -> Iterator[tuple[bytes, int]]:
        """Each element's text and the line it starts on."""
        if self.peek() != "[":
            while self.peek():
                yield self.value()
            return
        self.at += 1
        if self.peek() != "]":
            yield self.value()
        while self.peek() == ",":
            self.at += 1
            self.peek()
            yield self.value()
        if self.peek() != "]":
            found = "a comma is missing between two rows" if self.peek() else "the file is cut off"
            raise self.broken(f"{found}: the array does not end here")
        self.at += 1
        if self.peek():
            raise self.broken("something stands behind the array's end")

    def value(self) -> tuple[bytes, int]:
        """Read one value and step over it: its text and the line it starts on."""
        line, wanted = self.here(), BLOCK_BYTES
        while True:
            try:
                _, end = self.scan(self.text, self.at)
                problem = ""
            except json.JSONDecodeError as error:
                problem = f"not JSON: {error.msg}, line {self.line_of(error.pos)}"
                if error.pos < len(self.text) - NEAR_THE_END and "Untermin" not in error.msg:
                    raise self.broken(problem) from error
            except (RecursionError, ValueError) as error:
                raise self.broken(f"not JSON that can be read: {error}") from error
            if not problem and (end < len(self.text) or self.ended):
                text, self.at = self.text[self.at : end], end
                return text.encode("utf-8", "surrogateescape"), line
            if len(self.text) - self.at > LARGEST_ELEMENT or not self.more(wanted):
                raise self.broken(problem)
            wanted *= 2

    def line_of(self, at: int) -> int:
        """The line of a place behind the next character."""
        return self.here() + self.text.count("\n", self.at, at)

    def broken(self, why: str) -> UserError:
        """The rest of the file cannot be told apart into rows."""
        return UserError(
            "A JSON file cannot be read to its end",
            where=f"{self.name}, line {self.here()}",
            found=why,
            expected="an array of objects, or one object a line in a .jsonl file",
            fix="mend the file at that line",
        )

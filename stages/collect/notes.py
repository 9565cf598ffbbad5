"""What was seen in rows, in sentences: nothing is left out or decided without a line here."""

from __future__ import annotations

from stages.collect.rows import Note

SENTENCES = {
    "empty assistant turn": "an assistant turn without words: it trains nothing but its end",
    "last turn is not the assistant's": "a last turn of another role: it trains nothing",
    "no user turn": "no user turn: kept",
    "placeholder": "placeholders like {{name}}: they stay literal text",
    "thoughts": "reasoning beside an answer: kept as reasoning_content, which not every chat"
    " template prints",
    "two forms": "text beside a form that knows where its answer begins: the text is not trained",
    "assistant turn of weight 0": "an assistant turn of weight 0: weights are not supported, it is"
    " trained like the others",
}
WARNED = ("assistant turn of weight 0", "placeholder", "thoughts")
SILENT = ("turns that call tools", "ShareGPT turns")


def sentences(notes: dict[str, dict[str, Note]]) -> list[tuple[str, bool]]:
    """Each note with the files and first lines it is about, and whether a person should read it.

    Args:
        notes: Name of the note → file → what was seen there.
    """
    found = []
    for name in sorted(notes):
        if name in SILENT:
            continue
        rows = sum(note.rows for note in notes[name].values())
        where = "; ".join(f"{file} {_lines(note)}" for file, note in notes[name].items())
        plural = "row has" if rows == 1 else "rows have"
        found.append((f"{rows} {plural} {_what(name)} ({where})", name in WARNED))
    return found


def _what(name: str) -> str:
    if name.startswith("key "):
        return f"a {name[4:]!r} that no form needs: it is not trained"
    if name.startswith("turn key "):
        return f"turns with a {name[9:]!r}, which is not trained"
    return SENTENCES[name]


def _lines(note: Note) -> str:
    shown = ", ".join(map(str, note.lines))
    more = ", …" if note.rows > len(note.lines) else ""
    return f"line{'s' if note.rows > 1 else ''} {shown}{more}"


def blank(lines: dict[str, Note]) -> list[str]:
    """Blank lines, by file."""
    return [
        f"{note.rows} blank line{'s' if note.rows > 1 else ''} skipped: {file} {_lines(note)}"
        for file, note in lines.items()
    ]

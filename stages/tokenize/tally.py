"""What the report says: counts, lengths, rows kept out, a decoded sample of each form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from stages.tokenize.encode import Encoded

if TYPE_CHECKING:
    from stages.tokenize.stream import Chunk, Origin

OPEN, CLOSE = "⟦", "⟧"
"""Around the targets of a decoded sample."""
MOST_SAMPLE_TOKENS = 400
MOST_TAG_ROWS = 20
QUANTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}


class Tally:
    """Counts one split.

    Attributes:
        rows_in: Rows read so far.
        samples: For each form, a row with its targets marked.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], train_on: str) -> None:
        self.rows_in = 0
        self.samples: dict[str, dict[str, Any]] = {}
        self._decode = decode
        self._train_on = train_on
        self._rejected: list[dict[str, Any]] = []
        self._lengths: list[np.ndarray] = []
        self._forms: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4, np.int64))
        self._tags: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._tag_rows = 0

    def add_tag(self, tag: str, origin: Origin) -> None:
        """Note a row whose own words hold a template tag."""
        self._tag_rows += 1
        rows = self._tags[tag]
        if len(rows) < MOST_TAG_ROWS:
            rows.append({"source": origin.source, "line": origin.line})

    def add(self, chunk: Chunk, encoded: Encoded) -> pa.Array:
        """Count a chunk; gives bool (N,): which rows have a target and go on."""
        kept = encoded.targets > 0
        lengths = np.diff(encoded.offsets)
        self._lengths.append(lengths[kept].astype(np.int32))
        for i in np.flatnonzero(~kept):
            self._reject(chunk.origins[i])
        kinds = np.array([origin.kind for origin in chunk.origins])
        for kind in np.unique(kinds[kept]):
            rows = kept & (kinds == kind)
            closed = (encoded.end >= 0) & rows
            counts = (rows.sum(), lengths[rows].sum(), encoded.targets[rows].sum(), closed.sum())
            self._forms[str(kind)] += counts
            self._sample(str(kind), chunk, encoded, np.flatnonzero(rows))
        return pa.array(kept)

    def _reject(self, origin: Origin) -> None:
        reason = f"no token of it is a target under tokenize.train_on={self._train_on}"
        self._rejected.append({"source": origin.source, "line": origin.line, "reason": reason})

    def _sample(self, kind: str, chunk: Chunk, encoded: Encoded, rows: np.ndarray) -> None:
        """Keep the first row of a form, or a later one that is shorter where that is cut."""
        if kind in self.samples and not self.samples[kind]["cut"]:
            return
        lengths = np.diff(encoded.offsets)[rows]
        short = np.flatnonzero(lengths <= MOST_SAMPLE_TOKENS)
        if kind in self.samples and not len(short):
            return
        i = rows[short[0]] if len(short) else rows[0]
        span = slice(encoded.offsets[i], encoded.offsets[i + 1])
        tokens, mask = encoded.tokens[span], encoded.mask[span]
        origin = chunk.origins[i]
        self.samples[kind] = {
            "source": origin.source,
            "line": origin.line,
            "text": marked(tokens[:MOST_SAMPLE_TOKENS], mask[:MOST_SAMPLE_TOKENS], self._decode),
            "cut": len(tokens) > MOST_SAMPLE_TOKENS,
        }

    def record(self) -> dict[str, Any]:
        """The split's part of `reports/tokenize.json`."""
        lengths = np.concatenate([*self._lengths, np.zeros(0, np.int32)])
        totals = sum(self._forms.values(), np.zeros(4, np.int64))
        return {
            "rows_in": self.rows_in,
            "rows_out": int(totals[0]),
            "rejected": self._rejected,
            "tokens": int(totals[1]),
            "targets": int(totals[2]),
            "length": length_summary(lengths),
            "forms": {kind: form_record(counts) for kind, counts in sorted(self._forms.items())},
            "template_tags": {"rows": self._tag_rows, "examples": dict(sorted(self._tags.items()))},
        }


def form_record(counts: np.ndarray) -> dict[str, Any]:
    """One form's counts, with the share of its rows that end in an end-of-turn target."""
    rows, tokens, targets, closed = (int(count) for count in counts)
    return {
        "rows": rows,
        "tokens": tokens,
        "targets": targets,
        "ends_in_target": round(closed / rows, 6) if rows else 0.0,
    }


def length_summary(lengths: np.ndarray) -> dict[str, float]:
    """Mean, quantiles (NumPy's, between values) and largest of the rows' tokens; 0 for no rows."""
    if not len(lengths):
        return {"mean": 0.0, **dict.fromkeys(QUANTILES, 0.0), "max": 0}
    points = np.percentile(lengths, list(QUANTILES.values()))
    return {
        "mean": round(float(lengths.mean()), 3),
        **{name: round(float(at), 3) for name, at in zip(QUANTILES, points, strict=True)},
        "max": int(lengths.max()),
    }


def marked(tokens: np.ndarray, mask: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str:
    """Decode tokens with every run of targets between `OPEN` and `CLOSE`."""
    borders = np.flatnonzero(np.diff(mask)) + 1
    parts = []
    for run, flags in zip(np.split(tokens, borders), np.split(mask, borders), strict=True):
        text = decode(run.tolist())
        parts.append(f"{OPEN}{text}{CLOSE}" if len(flags) and flags[0] else text)
    return "".join(parts)

"""What survived the cap: counts, and every row that did not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from stages.core.config.schema import Split

if TYPE_CHECKING:
    from stages.split.stream import Batch, Pieces


class Tally:
    """Counts one split.

    Attributes:
        too_long: Under the policy `error`, source, line and length of each row over the cap.
    """

    def __init__(self, settings: Split) -> None:
        self.too_long: list[tuple[str, int, int]] = []
        self._settings = settings
        self._counts: dict[str, int] = dict.fromkeys(
            (
                "rows_in",
                "rows_out",
                "examples",
                "tokens_in",
                "tokens",
                "targets_in",
                "targets",
                "targets_lost",
                "rows_over",
                "rows_dropped",
                "rows_truncated",
                "rows_split",
                "end_tokens",
                "end_tokens_lost",
            ),
            0,
        )
        self._longest = 0
        self._rejected: list[dict[str, Any]] = []
        self._lengths: list[np.ndarray] = []

    @property
    def lengths(self) -> np.ndarray:
        """int32: tokens of every row, before the cut."""
        return np.concatenate([*self._lengths, np.zeros(0, np.int32)])

    def add(self, batch: Batch, pieces: Pieces, written: pa.RecordBatch) -> None:
        """Count a batch, its pieces and what was written of them."""
        lengths = batch.lengths
        self._lengths.append(lengths.astype(np.int32))
        over = lengths > self._settings.max_seq_length
        for i in np.flatnonzero(over) if self._settings.policy == "error" else ():
            self.too_long.append((batch.source[i], int(batch.line[i]), int(lengths[i])))
        count = np.bincount(pieces.at, minlength=len(lengths))
        for i in np.flatnonzero(count == 0):
            self._reject(batch, i, bool(over[i]))
        sizes = np.asarray(written["tokens"].value_lengths(), dtype=np.int64)
        self._longest = max(self._longest, int(sizes.max(initial=0)))
        targets_in, targets = int(batch.mask.sum()), written["target_mask"].flatten().true_count
        whole = self._settings.policy == "split"
        ends, lost = self._end_tokens(batch, pieces)
        self._add(
            rows_in=len(lengths),
            rows_out=(count > 0).sum(),
            examples=len(pieces.at),
            tokens_in=len(batch.tokens),
            tokens=sizes.sum(),
            targets_in=targets_in,
            targets=targets,
            targets_lost=targets_in - targets,
            rows_over=over.sum(),
            rows_dropped=(count == 0).sum(),
            rows_truncated=0 if whole else (over & (count > 0)).sum(),
            rows_split=(count > 1).sum(),
            end_tokens=ends,
            end_tokens_lost=lost,
        )

    def _add(self, **counts: int | np.integer) -> None:
        for name, count in counts.items():
            self._counts[name] += int(count)

    def _end_tokens(self, batch: Batch, pieces: Pieces) -> tuple[int, int]:
        """How many rows end in an end token, and how many of these are in no piece."""
        has = batch.end >= 0
        end = batch.end[pieces.at]
        kept = np.zeros(len(has), bool)
        kept[pieces.at[(pieces.first <= end) & (end < pieces.stop)]] = True
        return int(has.sum()), int((has & ~kept).sum())

    def _reject(self, batch: Batch, i: int, over: bool) -> None:
        cap = self._settings.max_seq_length
        reason = "it has no target"
        if over:
            length = int(batch.lengths[i])
            reason = f"{length} tokens, over split.max_seq_length={cap}"
            if self._settings.policy != "drop":
                reason += f"; split.policy={self._settings.policy} leaves it no target"
        line, source = int(batch.line[i]), batch.source[i]
        self._rejected.append({"source": source, "line": line, "reason": reason})

    def record(self) -> dict[str, Any]:
        """The split's part of `reports/split.json`."""
        return {**self._counts, "longest": self._longest, "rejected": self._rejected}

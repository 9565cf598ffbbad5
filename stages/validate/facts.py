"""What validate looks at: the examples in numbers, the manifest, the reports so far."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.core import files, tables
from stages.core.model.manifest import Manifest, read_manifest


@dataclass(frozen=True)
class Counts:
    """One split's examples.

    Attributes:
        examples, tokens, targets: How many.
        longest: Tokens of the longest.
        without_target: Examples that would train nothing.
        least_id, largest_id: Smallest and largest token id, 0 and -1 where there are none.
    """

    examples: int = 0
    tokens: int = 0
    targets: int = 0
    longest: int = 0
    without_target: int = 0
    least_id: int = 0
    largest_id: int = -1


@dataclass(frozen=True)
class Facts:
    """All inputs of the checks.

    Attributes:
        counts: By split.
        manifest: The model.
        collect, tokenize, split: The reports of these stages.
    """

    counts: dict[str, Counts]
    manifest: Manifest
    collect: dict[str, Any]
    tokenize: dict[str, Any]
    split: dict[str, Any]


def read_facts(examples: Path, model: Path, reports: Path) -> Facts:
    """Read everything; the tables as a stream.

    Args:
        examples: Folder of the split stage.
        model: The manifest.
        reports: Folder of `collect.json`, `tokenize.json` and `split.json`.

    Raises:
        UserError: Something of an earlier stage is missing.
    """
    return Facts(
        counts={name: count(examples / f"{name}.parquet") for name in tables.SPLITS},
        manifest=read_manifest(model),
        collect=files.read_json(reports / "collect.json"),
        tokenize=files.read_json(reports / "tokenize.json"),
        split=files.read_json(reports / "split.json"),
    )


def count(path: Path) -> Counts:
    """Count one split's examples.

    Raises:
        UserError: The table is missing.
    """
    examples = tokens = targets = longest = without = 0
    least, largest = np.iinfo(np.int32).max, -1
    for batch in tables.batches(path, ["tokens", "target_mask"], rows_per_batch=1024):
        lengths = np.asarray(batch["tokens"].value_lengths(), dtype=np.int64)
        ids = batch["tokens"].flatten().to_numpy()
        mask = batch["target_mask"].flatten().to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        totals = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        examples += len(lengths)
        tokens += len(ids)
        targets += int(totals[-1])
        longest = max(longest, int(lengths.max(initial=0)))
        without += int((np.diff(totals[offsets]) == 0).sum())
        least = min(least, int(ids.min(initial=least)))
        largest = max(largest, int(ids.max(initial=largest)))
    return Counts(examples, tokens, targets, longest, without, least if tokens else 0, largest)

"""The stage as a whole: read what the earlier stages made, score, ask, write, say.

Reads adapters/, data/examples/S.parquet, data/raw/S.parquet, data/model.json and
reports/collect.json; writes rows.parquet, samples.json and metrics.json in reports/evaluate/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow.parquet as pq

from stages.core import console, files, tables
from stages.core.activations.prepare import Source, prepare
from stages.core.config.settings import Settings
from stages.core.errors import UserError
from stages.core.machine.device import Device
from stages.core.memory.budget import budget
from stages.core.memory.plan import Plan
from stages.core.memory.rule import by_rule
from stages.core.model import models
from stages.core.model.manifest import Manifest, read_manifest
from stages.core.model.tokenizers import load_tokenizer
from stages.core.tables import Examples
from stages.core.update import adapters, batching
from stages.evaluate import records, samples, scores, summary
from stages.evaluate.fitting import fitted
from stages.evaluate.losses import Pair, open_pair
from stages.evaluate.metrics import metrics
from stages.evaluate.tally import RowTable, Tally, row_table

OUT = Path("reports/evaluate")
ADAPTERS = Path("adapters")
EXTREMES = 5
"""Rows that gained most and least, shown in the report."""


def evaluate(settings: Settings, machine: Device) -> None:
    """Run the stage in the current directory.

    Raises:
        UserError: The split is empty, or a file of an earlier stage is missing.
        RunFailed: A loss is not finite.
    """
    console.say(machine.line())
    split = settings.evaluate.split
    raw, examples = Path(f"data/raw/{split}.parquet"), _examples(split)
    leaked = leaks(split)
    adapters.check(ADAPTERS)
    manifest = read_manifest()
    plan = by_rule(settings, manifest, examples.lengths, machine.kind)
    folder = models.folder(manifest, settings.model)
    model, _ = models.load_model(folder, settings.model.dtype)
    pair = open_pair(model, ADAPTERS, plan)
    info = mx.device_info() if machine.kind != "cpu" else None
    limit = budget(settings.memory.budget_gb, machine.kind, info)
    plan = fitted(pair, examples, plan, limit, settings.memory.budget_gb != "auto")
    if plan.activation_cache and pair.shared:
        source = Source(pair.step.staged, pair.cut, manifest, plan, settings.memory, machine.kind)
        pair.stored = (prepare(source, {split: examples}) or {}).get(split)
    rows, numbers = _scored(pair, examples, plan, raw, leaked)
    chosen = samples.choose(examples, settings.evaluate.samples, leaked)
    extremes = _extremes(rows)
    shown = {int(examples.row[i]) for i in chosen} | {row for rows_ in extremes for row in rows_}
    texts = records.read(raw, shown)
    tokenizer = load_tokenizer(folder, settings.tokenize.chat_template)
    asked = samples.questions(examples, chosen, texts, tokenizer)
    entries = _asked(pair, asked, tokenizer, manifest, settings)
    pair.close()
    numbers |= {"split": split, "answers": answer_scores(entries)}
    best, worst = ([_extreme(rows, texts[row]) for row in part] for part in extremes)
    _write(rows, {"samples": entries, "best": best, "worst": worst}, numbers)
    summary.show(split, numbers, entries)


def leaks(split: str) -> set[int]:
    """Rows of a split that also stand in train.

    reports/collect.json says how many there are; which ones, the tables say.
    """
    report = files.read_json(Path("reports/collect.json"))
    if not report.get("leaked_rows", {}).get(split):
        return set()
    return records.standing_in(Path(f"data/raw/{split}.parquet"), Path("data/raw/train.parquet"))


def answer_scores(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of generated answers that match, for rows that have an answer."""
    found: dict[str, Any] = {}
    for name in ("base", "tuned"):
        given = [entry[name]["score"] for entry in entries if "score" in entry[name]]
        if not given:
            return {"rows": 0}
        found |= {"rows": len(given), name: scores.shares([scores.Score(**one) for one in given])}
    return found


def _examples(split: str) -> Examples:
    path = Path(f"data/examples/{split}.parquet")
    examples = tables.read_examples(path)
    if not examples.targets.sum():
        raise UserError(
            f"There is nothing to evaluate on: the {split} split has no targets",
            where=str(path),
            found=f"{len(examples)} examples, 0 targets",
            expected="at least one row with an answer",
            fix=f"add rows to the {split} split (data.shares), or set evaluate.split to the other",
        )
    return examples


def _scored(
    pair: Pair, examples: Examples, plan: Plan, raw: Path, leaked: set[int]
) -> tuple[RowTable, dict[str, Any]]:
    """Every target of the split under both models."""
    if plan.cache_limit_gb is not None:
        mx.set_cache_limit(int(plan.cache_limit_gb * 1e9))
    ids = np.flatnonzero(examples.targets > 0)
    parts = batching.groups(examples.lengths, ids, plan)
    note = pair.check(batching.micro_batch(examples, parts[0], plan))
    if note:
        console.warn(note)
    micros = [batching.micro_batch(examples, part, plan) for part in parts]
    pair.expect(micros)
    tally = Tally(examples)
    with console.progress("evaluate", len(ids), "examples") as advance:
        for micro in micros:
            tally.add(pair.score(micro))
            advance(len(micro.ids))
    rows = row_table(tally, raw, leaked)
    return rows, metrics(rows, tally.positions)


def _asked(
    pair: Pair,
    asked: Sequence[samples.Question],
    tokenizer: Any,
    manifest: Manifest,
    settings: Settings,
) -> list[dict[str, Any]]:
    ends = frozenset({*manifest.eos_token_ids, tokenizer.eos_token_id} - {None})
    limits = samples.Limits(ends, settings.evaluate.max_new_tokens)
    with console.progress("samples", 2 * len(asked), "answers") as advance:
        return samples.ask(pair, asked, tokenizer, limits, advance)


def _extremes(rows: RowTable) -> tuple[list[int], list[int]]:
    """Rows that gained most (best first) and that gained least or lost (worst first)."""
    order = np.argsort(rows.tuned_loss - rows.base_loss, kind="stable")
    half = len(order) // 2
    best = order[: min(EXTREMES, len(order) - half)]
    worst = order[::-1][: min(EXTREMES, half)]
    return rows.row[best].tolist(), rows.row[worst].tolist()


def _extreme(rows: RowTable, record: records.Record) -> dict[str, Any]:
    at = int(np.flatnonzero(rows.row == record.row)[0])
    prompt = record.turns[-1]["content"] if record.turns else ""
    return {
        **record.origin(),
        "targets": int(rows.sums.targets[at]),
        "base_loss": float(rows.base_loss[at]),
        "tuned_loss": float(rows.tuned_loss[at]),
        "prompt": records.shortened(prompt, 240),
        "answer": records.shortened(record.answer, 240),
    }


def _write(rows: RowTable, shown: dict[str, Any], numbers: dict[str, Any]) -> None:
    with files.replacing(OUT / "rows.parquet") as temporary:
        pq.write_table(rows.table(), temporary, compression="zstd")
    files.write_json(OUT / "samples.json", {"seed": samples.SEED, **shown})
    files.write_json(OUT / "metrics.json", numbers)

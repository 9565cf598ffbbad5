"""README.md of an export: reports/card.md, with how to use it in the form it was exported in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from stages.core import files
from stages.core.errors import UserError

CARD = Path("reports/card.md")
README = "README.md"
USE = re.compile(r"^## Use\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


def read() -> str:
    """The card that the report stage wrote.

    Raises:
        UserError: There is none.
    """
    try:
        return CARD.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            "An export takes the adapter's card along, and there is none yet",
            where=str(CARD),
            fix="run `dvc repro`",
        ) from error


def write(folder: Path, text: str) -> None:
    """Put a card into an exported folder."""
    files.write_text(folder / README, text)


def for_fused(text: str) -> str:
    """The card of a model that needs no adapter."""
    command = 'mlx_lm.generate --model . --prompt "…"'
    use = f"In this folder, with `pip install mlx-lm`:\n\n```sh\n{command}\n```"
    return _adapted(text, {"base_model_relation": "finetune"}, use)


def for_peft(text: str, base: str) -> str:
    """The card of a PEFT adapter.

    Args:
        base: The base model's Hub id, or what to put in its place.
    """
    code = (
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
        'model = PeftModel.from_pretrained(base, ".")'
    )
    use = f"In this folder, with `pip install peft transformers`:\n\n```python\n{code}\n```"
    return _adapted(text, {"library_name": "peft", "base_model_relation": "adapter"}, use)


def _adapted(text: str, front: dict[str, Any], use: str) -> str:
    _, matter, body = text.split("---\n", 2)
    fields = {**yaml.safe_load(matter), **front}
    if front.get("library_name") == "peft":
        fields["tags"] = ["peft", *(tag for tag in fields.get("tags", []) if tag != "mlx")]
    matter = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    body = USE.sub(lambda _: f"## Use\n\n{use}\n\n", body)
    return f"---\n{matter}---\n{body}"

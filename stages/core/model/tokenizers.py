"""The model's own tokenizer and chat template, without MLX.

`mlx_lm` loads the same tokenizer through the same transformers class, so token ids agree.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import UserError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would ask for PyTorch on import

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
SYSTEM_MARK = "the words of the system"


def load_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load a folder's tokenizer; no code of the folder is ever run.

    Args:
        folder: MLX or Hugging Face folder.
        chat_template: `tokenize.chat_template`: a file with a Jinja template in place of the
            tokenizer's own, or None.

    Raises:
        UserError: There is no tokenizer, it cannot be read without remote code, or the template
            file cannot be used.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
        raise UserError(
            "The model folder has no tokenizer",
            where=str(folder),
            found=", ".join(sorted(path.name for path in folder.glob("*"))) or "an empty folder",
            expected="tokenizer.json (with tokenizer_config.json)",
            fix="copy the tokenizer's files from where the model came from",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever its readers raise
        raise UserError(
            "The tokenizer cannot be loaded",
            where=str(folder),
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            expected="a tokenizer that transformers reads without code of the folder",
            fix="use a version of the model with a tokenizer.json",
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def read_template(file: str) -> str:
    """The text of a Jinja chat template file, relative to the current directory or absolute.

    Raises:
        UserError: It is missing, empty, a folder, not UTF-8 or cannot be opened.
    """
    fix = "set tokenize.chat_template to such a file, or null for the model's own"
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        found = "" if text.strip() else "empty"
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} is not UTF-8"
        fix = "save it as UTF-8"
    except FileNotFoundError:
        found = "no such file"
    except OSError as error:
        found = "a folder" if Path(file).is_dir() else error.strerror or str(error)
    if found:
        raise UserError(
            "The chat template cannot be used",
            where="tokenize.chat_template",
            found=f"{file}: {found}",
            expected="a file with a Jinja chat template, in UTF-8",
            fix=fix,
        )
    return text


def takes_system_turn(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template renders a system turn: its words come out, nothing is raised."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_MARK},
        {"role": "user", "content": "question"},
    ]
    if not tokenizer.chat_template:
        return False
    try:
        return SYSTEM_MARK in tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template refuses with an exception of its own
        return False

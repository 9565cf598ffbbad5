"""Talk to the tuned model: base and adapters, turn by turn, or one `--prompt`.

python -m stages chat                          adapters/ of this run, or the base without them
python -m stages chat --prompt "What is DVC?"  one answer on stdout
python -m stages chat --base                   the base model alone, to compare
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.core import console, entry
from stages.core.config.settings import Settings, load_settings
from stages.core.machine import device
from stages.core.model import models
from stages.core.model.tokenizers import read_template

ADAPTERS = Path("adapters")
HELP = "q ends, r starts over"


def main(argv: Sequence[str]) -> int:
    """Parse the line, load the model, answer; the exit status."""
    options = _parser().parse_args(argv)
    return entry.guarded("chat", lambda: run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages chat", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompt", metavar="TEXT", help="give one answer and end")
    parser.add_argument("--system", metavar="TEXT", help="begin with this system turn")
    parser.add_argument("--base", action="store_true", help="leave the adapters out")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="default: adapters")
    parser.add_argument("--max-tokens", type=_at_least(1, int), default=256, help="longest answer")
    parser.add_argument(
        "--temp", type=_at_least(0.0, float), default=0.0, help="0: always the likeliest token"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="memory.* and run.*")
    return parser


def _at_least(least: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise ValueError
        return value

    number.__name__ = f"number of at least {least}"
    return number


def run(options: argparse.Namespace) -> None:
    """Load base and adapters and hold the conversation."""
    settings = load_settings(overrides=options.overrides)
    device.prepare(settings.run.device)
    talk = Conversation(*_load(settings, options), options)
    if options.prompt is not None:
        _print(talk.answer(options.prompt))
        return
    console.say(HELP)
    for line in iter(_ask, None):
        if line == "r":
            talk.start_over()
        elif line:
            _print(talk.answer(line))


def _load(settings: Settings, options: argparse.Namespace) -> tuple[Any, Any]:
    """The model in evaluation mode, and mlx-lm's tokenizer for generating."""
    from mlx_lm.utils import load_tokenizer

    from stages.core.update import adapters

    manifest = models.read_manifest()
    with_adapters = not options.base and (options.adapters != ADAPTERS or ADAPTERS.exists())
    if with_adapters:
        adapters.check(options.adapters)
    folder = models.folder(manifest, settings.model)
    model, _ = models.load_model(folder, settings.model.dtype)
    if with_adapters:
        adapters.load(options.adapters, model)
    model.eval()
    console.say(f"{manifest.name} {f'with {options.adapters}' if with_adapters else 'alone'}")
    template = settings.tokenize.chat_template
    words = {"trust_remote_code": False}
    if template is not None:
        words["chat_template"] = read_template(template)
    return model, load_tokenizer(folder, words, eos_token_ids=manifest.eos_token_ids or None)


def _ask() -> str | None:
    """The next line of the person, or None at `q` and the end of input."""
    try:
        line = input("> ").strip()
    except EOFError:
        return None
    return None if line == "q" else line


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


class Conversation:
    """Turns so far, and the model's cache of their tokens, so that each is read only once."""

    def __init__(self, model: Any, tokenizer: Any, options: argparse.Namespace) -> None:
        from mlx_lm.sample_utils import make_sampler

        self.model, self.tokenizer = model, tokenizer
        self.system, self.max_tokens = options.system, options.max_tokens
        self.sampler = make_sampler(options.temp)
        self.start_over()

    def start_over(self) -> None:
        """Forget everything but the system turn."""
        self.turns = [{"role": "system", "content": self.system}] if self.system else []
        self.read: list[int] = []
        self.cache: Any = None

    def answer(self, text: str) -> Iterator[str]:
        """The model's answer to the next user turn, piece by piece."""
        from mlx_lm import stream_generate

        self.turns.append({"role": "user", "content": text})
        tokens = self._tokens(text)
        fresh = self._after_cached(tokens)
        said, given = "", []
        for piece in stream_generate(
            self.model,
            self.tokenizer,
            fresh,
            max_tokens=self.max_tokens,
            sampler=self.sampler,
            prompt_cache=self.cache,
        ):
            said += piece.text
            given.append(piece.token)
            yield piece.text
        self.turns.append({"role": "assistant", "content": said})
        self.read = [*tokens, *given]

    def _tokens(self, text: str) -> list[int]:
        """The whole conversation by the chat template; the text alone where there is none."""
        if not self.tokenizer.has_chat_template:
            return list(self.tokenizer.encode(text))
        return list(self.tokenizer.apply_chat_template(self.turns, add_generation_prompt=True))

    def _after_cached(self, tokens: list[int]) -> list[int]:
        """The tokens the cache does not hold yet (at least one); the cache is cut to the others."""
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

        held = getattr(self.cache[0], "offset", None) if self.cache else None
        if held is None or not can_trim_prompt_cache(self.cache):
            self.cache = make_prompt_cache(self.model)
            return tokens
        pairs = list(zip(self.read[:held], tokens[:-1], strict=False))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        trim_prompt_cache(self.cache, held - shared)
        return tokens[shared:]

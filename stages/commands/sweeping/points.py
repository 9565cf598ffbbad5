"""Points of a sweep: what each one overrides, its name, and what makes two of them the same."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from stages.compose import composition
from stages.compose.applied import is_mathematics
from stages.core.fingerprint import fingerprint

LONGEST_WORD, LONGEST_NUMBER = 24, 10
NAME = re.compile(r"[A-Za-z0-9][\w-]*")


@dataclass(frozen=True)
class Sweep:
    """What every job of a sweep knows, wherever it runs.

    Attributes:
        name: Of the sweep; reports/sweeps/NAME holds its results.
        root: The project's folder, absolute.
        folder: Where the states of its points lie, absolute.
        swept: Keys with more than one value; they make the names of the experiments.
        prefix: Stands before the name of each experiment, "" for none.
        code: Path → hash of what the stages read besides settings.
        pid, host: The process that asked for the sweep, and where it runs.
        threads: Threads for each point's matrix products, None: all.
    """

    name: str
    root: Path
    folder: Path
    swept: tuple[str, ...]
    prefix: str = ""
    code: dict[str, str] = field(default_factory=dict)
    pid: int = 0
    host: str = ""
    threads: int | None = None

    @property
    def stop_file(self) -> Path:
        """Exists once somebody asked to end."""
        return self.folder / "stop"

    @property
    def turn_file(self) -> Path:
        """Locked by the point that starts, of whatever sweep of this project."""
        return self.folder.parent.parent / "turn.lock"

    def lock_file(self, point: Point) -> Path:
        """Locked by the process that runs a point."""
        return self.folder / "points" / f"{point.key}.lock"


@dataclass(frozen=True)
class Point:
    """One set of overrides.

    Attributes:
        overrides: As `dvc exp run -S` takes them.
        key: Stable name of these overrides.
        label: The overrides of swept keys, for people.
        name: Wished name of its experiment.
        values: Dotted key → value of what the overrides change; a group's choice as text.
        mathematics: Dotted key → value, all that makes its identity.
    """

    overrides: tuple[str, ...]
    key: str
    label: str
    name: str
    values: dict[str, Any]
    mathematics: dict[str, Any]


def point(composed: DictConfig, overrides: Sequence[str], sweep: Sweep) -> Point:
    """The point that these overrides make.

    Args:
        composed: conf/ with the overrides.
        overrides: In Hydra's grammar, each with one value.
        sweep: Which sweep it belongs to.
    """
    leaves = composition.leaves(composed)
    pairs = [split(word) for word in overrides]
    chosen = [pair for pair in pairs if pair[0] in sweep.swept] or pairs
    names = short([key for key, _ in chosen])
    named = [(name, value) for name, (_, value) in zip(names, chosen, strict=True)]
    label = " ".join(f"{name}={value}" for name, value in named)
    parts = [f"{name}-{_word(value)}" for name, value in named]
    return Point(
        overrides=tuple(overrides),
        key=fingerprint(list(overrides)),
        label=label,
        name="-".join([*([sweep.prefix] if sweep.prefix else []), *parts]),
        values={key: leaves.get(key, value) for key, value in pairs},
        mathematics={key: value for key, value in leaves.items() if is_mathematics(key)},
    )


def split(override: str) -> tuple[str, str]:
    """Key and value of an override, without `+` and `~`."""
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value


def short(keys: Sequence[str]) -> list[str]:
    """The last part of each key, the last two where another key ends alike."""
    parts = [re.split(r"[./]", key) for key in keys]
    ends = [one[-1] for one in parts]
    return [one[-1] if ends.count(one[-1]) == 1 else "_".join(one[-2:]) for one in parts]


def _word(value: str) -> str:
    """A value as part of a git ref: `3e-4`, `0_5`, `m1` for -1.

    Two values never give the same word: where characters go, a fingerprint of the value comes.
    """
    number = _number(value)
    text = value if number is None else _short(number, value)
    word = re.sub(r"(?<=\d)\.(?=\d)", "_", re.sub(r"^-", "m", text))
    longest = LONGEST_WORD if number is None else LONGEST_NUMBER
    if re.fullmatch(r"[A-Za-z0-9_-]+", word) and len(word) <= longest:
        return word
    if number is not None:
        rounded = f"{number:.3g}"
        word = _short(float(rounded), rounded)
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", word).strip("_-")[:LONGEST_WORD].rstrip("_-")
    return "-".join(part for part in (plain, fingerprint(value)[:4]) if part)


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _short(number: float, text: str) -> str:
    """Small numbers with an exponent, as people write rates: `0.0003` → `3e-4`."""
    if not 0 < abs(number) <= 0.01:
        return text
    digits, exponent = f"{number:.15e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"

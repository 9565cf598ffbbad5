"""Hydra's multirun over conf/: its sweeper makes the points, its launcher runs them."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from stages.commands.sharing import git, tracked
from stages.commands.sweeping import experiments, job, points
from stages.commands.sweeping.points import Point, Sweep
from stages.compose import composition
from stages.core import paths
from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.fingerprint import fingerprint

QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null")
CHOICE = "sweep="
EXTRAS = ("joblib", "submitit", "ray", "optuna")


@dataclass(frozen=True)
class Plan:
    """A sweep before it runs.

    Attributes:
        sweep: What its jobs know.
        points: All of them; None where the sweeper chooses one after another.
        at_once: How many run side by side on this machine; 1 where the launcher decides elsewhere.
    """

    sweep: Sweep
    points: list[Point] | None
    at_once: int


def plan(root: Path, words: Sequence[str], name: str | None) -> Plan:
    """Find out what a command line asks for, and check every point before one runs.

    Args:
        root: The project's folder.
        words: Overrides in Hydra's grammar, `sweep=PRESET`, and settings of `hydra.…`.
        name: Of the sweep; default: the preset's or the swept keys'.

    Raises:
        UserError: Nothing is swept, a key or value is wrong, or a setting that can't change a
            result is swept.
    """
    conf = root / "conf"
    composition.compose(conf)
    with hydra(conf) as composer:
        config = composer(_words(words))
    asked = _parsed(config)
    swept = tuple(one.get_key_element() for one in asked if one.is_sweep_override())
    swept = tuple(key.lstrip("+~") for key in swept)
    _require_swept(swept)
    preset = next((word.removeprefix(CHOICE) for word in words if word.startswith(CHOICE)), None)
    sweep = _sweep(root, name or preset or "-".join(points.short(swept)), name, swept, asked)
    threads, at_once = _side_by_side(config)
    sweep = Sweep(**{**sweep.__dict__, "threads": threads})
    return Plan(sweep, _all_points(config, asked, sweep), at_once)


def run(plan: Plan, words: Sequence[str]) -> None:
    """Run all points; a failed one ends the sweep only once the others have run.

    Raises:
        RuntimeError: A point failed.
        UserError: Hydra refuses the launcher's or the sweeper's settings.
    """
    sweep = plan.sweep
    with hydra(sweep.root / "conf") as composer:
        all_words = [f"hydra.sweep.dir={sweep.folder}/jobs", *QUIET, *_words(words)]
        composer.multirun(partial(job.run_point, sweep=sweep), all_words)


class Composer:
    """Hydra with this project's conf/."""

    def __init__(self, inner: Hydra) -> None:
        self.inner = inner

    def __call__(self, words: Sequence[str]) -> DictConfig:
        """The configuration of the whole sweep, hydra's own settings included."""
        with _plain_errors(words):
            return self.inner.compose_config(
                composition.CONFIG, list(words), RunMode.MULTIRUN, with_log_configuration=False
            )

    def multirun(self, task: Any, words: Sequence[str]) -> None:
        """Launch all jobs."""
        with _plain_errors(words):
            self.inner.multirun(composition.CONFIG, task, list(words), with_log_configuration=False)


@contextlib.contextmanager
def hydra(conf: Path) -> Iterator[Composer]:
    """Hydra on a folder, as `hydra.main` sets it up."""
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    try:
        search_path = create_config_search_path(str(conf.absolute()))
        yield Composer(Hydra.create_main_hydra2("sweep", search_path))
    finally:
        GlobalHydra.instance().clear()


def _words(words: Sequence[str]) -> list[str]:
    """`sweep=NAME` as Hydra has it for a group outside the defaults of config.yaml."""
    return [f"+{word}" if word.startswith(CHOICE) else word for word in words]


def _parsed(config: DictConfig) -> list[Override]:
    """The sweeper's own parameters and the command line's, the later one of a key only."""
    own = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    given = [
        word for word in config.hydra.overrides.task if not word.startswith(job.CHOICE_OF_SWEEP)
    ]
    parsed = OverridesParser.create().parse_overrides([*own, *given])
    return list({one.get_key_element(): one for one in parsed}.values())


def _require_swept(swept: Sequence[str]) -> None:
    if not swept:
        raise UserError(
            "Nothing is swept",
            where="the command line",
            expected="a key with several values, or a preset of conf/sweep",
            fix="python -m stages sweep -m train.learning_rate=1e-4,3e-4, or sweep=learning_rate",
        )
    machine = [key for key in swept if key.split(".")[0] in schema.MACHINE]
    if machine:
        raise UserError(
            "memory.* and run.* never change a result, so their points would all be one",
            where=", ".join(machine),
            expected="keys of the mathematics",
            fix="`python -m stages plan` compares memory settings",
        )


def _sweep(
    root: Path, name: str, given: str | None, swept: tuple[str, ...], asked: Sequence[Override]
) -> Sweep:
    """What the jobs know; the folder's name tells sweeps from each other that differ elsewhere."""
    if not points.NAME.fullmatch(name):
        raise UserError(
            "A sweep cannot have this name",
            where="--name",
            found=name,
            expected="letters, digits, - and _",
        )
    fixed = [
        f"{one.get_key_element()}={one.get_value_element_as_str()}"
        for one in asked
        if not one.is_sweep_override()
    ]
    code = git.hashes(root, tracked.dependencies(root))
    base = composition.leaves(composition.compose(root / "conf", fixed))
    swept_apart = {
        key: value for key, value in base.items() if points.is_mathematics(key) and key not in swept
    }
    mark = fingerprint([swept_apart, experiments.engine(root), code])
    return Sweep(
        name=name,
        root=root,
        folder=paths.cache("sweeps") / name / mark,
        swept=swept,
        prefix=given or "",
        code=code,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def _all_points(config: DictConfig, asked: Sequence[Override], sweep: Sweep) -> list[Point] | None:
    """Every point, composed and checked; None where another sweeper than the basic one chooses."""
    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return None
    with _plain_errors([]):
        sets = BasicSweeper.split_arguments(list(asked), None)[0]
    conf = sweep.root / "conf"
    return [points.point(composition.compose(conf, words), words, sweep) for words in sets]


def _side_by_side(config: DictConfig) -> tuple[int | None, int]:
    """Threads for each point, and how many points run at once, where joblib runs them here."""
    if not str(config.hydra.launcher._target_).endswith("JoblibLauncher"):
        return None, 1
    cores = os.cpu_count() or 1
    jobs = int(config.hydra.launcher.get("n_jobs") or 1)
    jobs = max(1, jobs if jobs > 0 else cores + 1 + jobs)
    return max(1, cores // jobs), jobs


@contextlib.contextmanager
def _plain_errors(words: Sequence[str]) -> Iterator[None]:
    """Hydra's errors as messages for people."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(str(error).split("Config search path:")[0].split())
        absent = next((name for name in EXTRAS if any(f"={name}" in word for word in words)), None)
        raise UserError(
            "Hydra cannot make this sweep",
            where="the command line or conf/sweep",
            found=text,
            fix=f"the extra `{absent}`: {_install(absent)}"
            if absent
            else "see `python -m stages sweep --help`",
        ) from error


def _install(extra: str) -> str:
    """The line that installs an extra of pyproject.toml beside what the lock brought."""
    project = tomllib.loads((paths.here() / "pyproject.toml").read_text(encoding="utf-8"))
    needed = project["project"]["optional-dependencies"][extra]
    return f"python -m pip install {' '.join(shlex.quote(need) for need in needed)}"

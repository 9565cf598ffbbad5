"""dvc.yaml lists exactly the code that can change a stage's result: a walk over the imports."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from stages.core.config.settings import known_keys

ROOT = Path(__file__).resolve().parent.parent
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
NO_RESULT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["samestep"]["no-result"]
# The defaults of the schema end up in params.yaml, so compose alone depends on it.
ALSO = {"compose": {"stages/core/config/schema.py"}}


@cache
def imported(file: Path) -> frozenset[str]:
    """The project's own files that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide what is imported"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(path for name in names if (path := _file(name)))


def _file(name: str) -> str | None:
    if name.split(".", maxsplit=1)[0] != "stages":
        return None
    module = Path(*name.split("."))
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if (ROOT / path).is_file():
            return path.as_posix()
    return None


def counts(path: str) -> bool:
    """Whether a file can change a result: it has code and is not on the list of pyproject.toml."""
    if any(path == entry or path.startswith(entry + "/") for entry in NO_RESULT):
        return False
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return not all(isinstance(node, ast.Expr) for node in body)


def needed(stage: str) -> set[str]:
    """The core files that a stage reaches, not walking on through code that changes no result."""
    waiting = sorted((ROOT / "stages" / stage).rglob("*.py"))
    seen, found = set(), set()
    while waiting:
        for path in imported(waiting.pop()):
            if path in seen or path.startswith(f"stages/{stage}/"):
                continue
            seen.add(path)
            if counts(path):
                found.add(path)
                waiting.append(ROOT / path)
    return found | ALSO.get(stage, set())


def code(path: str, stage: str) -> set[str]:
    """The code that one dep stands for: a package of core/ is one dep where all of it counts."""
    if not path.startswith("stages/core/") or path.endswith(".py"):
        return {path} if path.startswith("stages/") else set()
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / path).rglob("*.py")}
    idle = {file for file in files if file in NO_RESULT}
    assert not idle, f"{stage}: {path} holds code that changes no result: {sorted(idle)}"
    return {file for file in files if counts(file)}


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_yaml_lists_the_code_of_a_stage(stage):
    expected = needed(stage) | {f"stages/{stage}"}
    listed = {file for path in STAGES[stage]["deps"] for file in code(path, stage)}
    missing, needless = expected - listed, listed - expected
    assert not missing, f"{stage}: add to its deps in dvc.yaml: {sorted(missing)}"
    assert not needless, f"{stage}: take out of its deps in dvc.yaml: {sorted(needless)}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_core_and_itself_only(stage):
    foreign = {
        path
        for file in (ROOT / "stages" / stage).rglob("*.py")
        for path in imported(file)
        if not path.startswith((f"stages/{stage}/", "stages/core/", "stages/__init__"))
    }
    assert not foreign, f"{stage} imports another stage or a command: {sorted(foreign)}"


def test_core_imports_core_only():
    foreign = {
        f"{file.name}: {path}"
        for file in (ROOT / "stages/core").rglob("*.py")
        for path in imported(file)
        if not path.startswith(("stages/core/", "stages/__init__"))
    }
    assert not foreign


def test_the_list_names_files_that_exist_each_with_a_reason():
    for path, reason in NO_RESULT.items():
        assert (ROOT / path).exists(), path
        assert len(reason.split()) >= 4, f"{path}: say why it cannot change a result"


@pytest.mark.parametrize("stage", STAGES)
def test_memory_and_run_settings_are_no_dependency(stage):
    for key in STAGES[stage].get("params", []):
        assert not (isinstance(key, str) and key.startswith(("memory", "run"))), key


def test_validate_does_not_depend_on_the_learning_rate():
    keys = [key for key in STAGES["validate"]["params"] if isinstance(key, str)]
    assert not {"train", "train.learning_rate"} & set(keys)


# The stages that read a key themselves; what follows from their outputs comes on top.
READERS = {
    "train.learning_rate": {"train", "report"},
    "train.seed": {"train", "report"},
    "train.num_layers": {"validate", "train", "report"},
    "train.updates": {"validate", "train", "report"},
    "split.max_seq_length": {"split", "report"},
    "tokenize.train_on": {"tokenize", "evaluate", "report"},
    "data.seed": {"collect", "report"},
    "data.max_leak": {"collect", "validate", "report"},
    "model.revision": {"model", "report"},
    "model.dtype": {"model", "train", "evaluate", "report"},
    "evaluate.samples": {"evaluate", "report"},
    "memory.batch_size": set(),
    "run.device": set(),
}


def tracks(stage, key):
    names = [name for name in STAGES[stage].get("params", []) if isinstance(name, str)]
    return any(key == name or key.startswith(name + ".") for name in names)


@pytest.mark.parametrize("key", READERS)
def test_a_key_concerns_exactly_the_stages_that_read_it(key):
    assert {stage for stage in STAGES if tracks(stage, key)} == READERS[key]


@pytest.mark.parametrize("stage", STAGES)
def test_the_keys_of_dvc_yaml_exist(stage):
    known = known_keys()
    for name in STAGES[stage].get("params", []):
        assert not isinstance(name, str) or name in known, name

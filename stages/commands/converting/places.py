"""Where a configuration's model and data lie: on the Hub, in this project, or elsewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from stages.commands.converting.conversion import Conversion
from stages.commands.converting.given import Given, refuse_unknown, wrong
from stages.commands.converting.keys import FEATURES
from stages.core import paths
from stages.core.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
SPLITS = ("train", "valid", "test")
SOURCE = Path("data/source")


def model(given: Given, found: Conversion, revision: str | None) -> None:
    """Translate `model`: a folder that is here, a Hub id, or the name of a folder.

    Args:
        revision: The commit, where the person named it.
    """
    name = given.text("model")
    here = locate(name, given.file)
    old = given.told("model")
    if here is None and HUB_ID.fullmatch(name):
        commit, note = _commit(name, "models", revision, "model.revision")
        if commit is None:
            found.todo.append(
                f"model.revision: a commit of {name} (huggingface.co/{name}/commits), into the"
                " experiment; or convert again with --revision COMMIT"
            )
        found.groups["model"] = "hub"
        new = {"model.repo": name, "model.revision": commit, "model.path": None}
        found.add(old, {**new, "model.dtype": "stored"}, note)
        return
    path = name if here is None else from_root(here, name)
    found.groups["model"] = "folder"
    new = {"model.repo": None, "model.revision": None, "model.path": path}
    notes = []
    if here is None:
        notes = ["it is not here: taken for a local folder, for it is no Hub id"]
        found.todo.append(f"model.path: put the model's folder at {path}, or set it to another one")
    found.add(old, {**new, "model.dtype": "stored"}, *notes)


def data(given: Given, found: Conversion, revision: str | None) -> None:
    """Translate `data`, `hf_dataset`, the feature names, and which split is evaluated.

    Args:
        revision: The commit of a Hub data set, where the person named it.
    """
    columns = {slot: given[key] for key, slot in FEATURES.items() if given.said(key)}
    if given.said("hf_dataset"):
        name, own = _hub_dataset(given["hf_dataset"])
        columns |= own
        old, here = f"hf_dataset: {name}", None
    else:
        name, old = given.text("data"), given.told("data")
        here = locate(name, given.file)
    found.groups["data"] = "files"
    if here is None and HUB_ID.fullmatch(name):
        commit, note = _commit(name, "datasets", revision, "data.path")
        if commit is None:
            found.todo.append(
                f"data.path: hub:{name}@ and the commit (huggingface.co/datasets/{name}/commits),"
                " into the experiment; or convert again with --data-revision COMMIT"
            )
        found.add(old, {"data.path": f"hub:{name}@{commit or 'COMMIT'}"}, note)
    else:
        _folder(name, here, old, found)
    features = [key for key in FEATURES if given.said(key)]
    new = {"data.format": "auto", "data.columns": columns}
    found.add(given.told(*features) if features else "(features by their usual names)", new)
    _splits(given, found, here)


def locate(name: str, file: Path | None) -> Path | None:
    """A path of the configuration, from the current directory or from its file's folder."""
    bases = [Path(), *([file.parent] if file is not None else [])]
    return next((base / name for base in bases if (base / name).expanduser().exists()), None)


def from_root(here: Path, name: str) -> str:
    """Relative to the project's root; an absolute path stays as it was written."""
    if Path(name).expanduser().is_absolute():
        return name
    return Path(os.path.relpath(here.resolve(), paths.here().resolve())).as_posix()


def _folder(name: str, here: Path | None, old: str, found: Conversion) -> None:
    """Data inside the project stay where they are; others belong into data/source."""
    if here is not None and here.resolve().is_relative_to(paths.here().resolve()):
        found.add(old, {"data.path": from_root(here.resolve(), "")})
        return
    target = (SOURCE / (Path(name).name or "mine")).as_posix()
    found.add(old, {"data.path": target}, "DVC watches over data that lie in data/source")
    found.todo.append(f"data: cp -r {here or name} {target} && dvc add {target}")


def _splits(given: Given, found: Conversion, here: Path | None) -> None:
    """mlx-lm never cuts a split from another; without a test set it evaluates on none."""
    files = None
    if here is not None and here.is_dir():
        files = {split for split in SPLITS if (here / f"{split}.jsonl").exists()}
    valid = 0.1 if files is not None and "valid" not in files else 0.0
    shares = {"train": 1 - valid, "valid": valid, "test": 0.0}
    new = {f"data.shares.{split}": share for split, share in shares.items()}
    found.add(
        "(a split without a file)",
        new,
        "there is no valid.jsonl, mlx-lm trains without: a tenth of train serves"
        if valid
        else "mlx-lm never cuts one from train",
    )
    test = given.switch("test") or "test" in (files or ())
    note = "" if test else "no test set is used: base and tuned model are compared on valid"
    found.add(given.told("test"), {"evaluate.split": "test" if test else "valid"}, note)


def _hub_dataset(value: Any) -> tuple[str, dict[str, str]]:
    """Name and columns of `hf_dataset`.

    Raises:
        UserError: It is several, or takes slices: those are not rows of a file.
    """
    if not isinstance(value, dict):
        raise wrong("hf_dataset", value, "one data set: path, and the names of its features")
    splits = tuple(f"{split}_split" for split in SPLITS)
    known = ("path", "name", *splits, *FEATURES, "config")
    refuse_unknown("hf_dataset.", value, known, "hf_dataset")
    sliced = {key: value[key] for key in (*splits, "config") if value.get(key)}
    if sliced:
        raise UserError(
            "hf_dataset takes parts of a data set, which samestep reads from files",
            where="hf_dataset",
            found=", ".join(f"{key}: {part}" for key, part in sliced.items()),
            expected="data: FOLDER with train.jsonl and valid.jsonl",
            fix="write these parts into files once (`datasets.load_dataset(…).to_json(…)`)",
        )
    name = value.get("path") or value.get("name")
    if not isinstance(name, str):
        raise wrong("hf_dataset.path", name, "the name of a data set")
    return name, {slot: value[key] for key, slot in FEATURES.items() if key in value}


def _commit(repo: str, kind: str, asked: str | None, key: str) -> tuple[str | None, str]:
    """The commit the person named, else the one in this machine's Hub cache, and a note."""
    if asked is not None:
        if not COMMIT.fullmatch(asked):
            raise wrong(key, asked, "a commit: 40 hexadecimal digits")
        return asked, "the commit you named"
    from huggingface_hub.constants import HF_HUB_CACHE

    file = Path(HF_HUB_CACHE) / f"{kind}--{repo.replace('/', '--')}" / "refs/main"
    commit = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if COMMIT.fullmatch(commit):
        return commit, "the commit that this machine's Hub cache has as main"
    return None, "mlx-lm takes whatever is newest; a run that can be repeated names the commit"

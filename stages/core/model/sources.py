"""Where a model's files come from: the Hub, a wheel, a local folder, a GGUF file, or built in.

Nothing of a folder is ever executed and no pickle is ever opened: weights are `model*.safetensors`
(or GGUF), architectures are mlx-lm's own.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

from stages.core import console, files, paths
from stages.core.config import schema
from stages.core.errors import UserError, listed
from stages.core.model.manifest import Source

BUILTIN, WHEEL = "builtin:", "wheel:"
TINY = "builtin:tiny"
WEIGHTS = "model*.safetensors"
USED = (
    WEIGHTS,
    "*.json",
    "*.jinja",
    "*.tiktoken",
    "tokenizer.model",
    "merges.txt",
    "vocab.txt",
)
"""What of a folder can change a result, and so is downloaded and hashed (all of it at the top)."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.npz")
COMMIT = r"[0-9a-f]{40}"
HASHES = "hashes.json"
GIGABYTE = 1_000_000_000


def source_of(model: schema.Model) -> Source:
    """Say what the settings name, without looking at the disk or the network.

    Raises:
        UserError: There is no such built-in model, or a Hub revision is not a commit.
    """
    if model.path is not None:
        name = Path(model.path).name
        kind = "gguf" if name.lower().endswith(".gguf") else "folder"
        return Source(kind, file=name)
    repo = model.repo or ""
    if repo.startswith(BUILTIN):
        if repo != TINY:
            raise UserError("Unknown model", where="model.repo", found=repo, expected=TINY)
        return Source("builtin", repo=repo)
    if repo.startswith(WHEEL):
        file = _wheel_file(repo)
        version = importlib.metadata.version(repo.removeprefix(WHEEL))
        return Source("wheel", repo=repo, revision=version, file=file.name)
    if not re.fullmatch(COMMIT, model.revision or ""):
        raise UserError(
            "model.revision is not a commit, so the weights could change under it",
            where="model.revision",
            found=model.revision,
            expected="40 hexadecimal digits",
            fix=f"copy the commit from the repository's history: huggingface.co/{repo}/commits",
        )
    return Source("hub", repo=repo, revision=model.revision)


def locate(source: Source, model: schema.Model) -> Path | None:
    """The folder or GGUF file of a source on this machine, checked; None for a built-in one.

    A Hub model is fetched into the Hub's own cache unless it is there.

    Raises:
        UserError: It is not here, cannot be fetched, or cannot be used (no config.json, only
            pickled weights, remote code, an unknown architecture).
    """
    if source.kind == "builtin":
        return None
    if source.kind == "wheel":
        return _wheel_file(source.repo or "")
    if source.kind == "hub":
        folder = _snapshot(source.repo or "", source.revision or "")
        check_folder(folder, source.repo or "")
        return folder
    path = paths.root() / Path(model.path or "").expanduser()
    if not path.exists():
        raise UserError(
            "The model is not where model.path says",
            where="model.path",
            found=f"{model.path}: no such file or folder (looked from {paths.root()})",
            expected="an MLX or Hugging Face folder, or a .gguf file",
            fix="put it there, or set model.path",
        )
    if source.kind == "folder":
        check_folder(path, model.path or "")
    return path


def used_files(place: Path) -> list[Path]:
    """The files of a source that can change a result, sorted by name."""
    if place.is_file():
        return [place]
    found = {path for pattern in USED for path in place.glob(pattern) if path.is_file()}
    return sorted(found, key=lambda path: path.name)


def hashes(place: Path) -> dict[str, dict[str, object]]:
    """Name → SHA-256 and bytes of a source's files; a file seen before is not read again.

    Known hashes are kept in `.cache/models/hashes.json` by path, size and time of change.
    """
    store = paths.cache("models") / HASHES
    known = _known(store)
    found: dict[str, dict[str, object]] = {}
    fresh: dict[str, str] = {}
    for path in used_files(place):
        stat = path.stat()
        key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in known:
            if stat.st_size > GIGABYTE:
                console.say(f"hashing {path.name}, {stat.st_size / GIGABYTE:.1f} GB (once)")
            fresh[key] = known[key] = files.sha256_file(path)
        found[path.name] = {"sha256": known[key], "bytes": stat.st_size}
    if fresh:
        files.write_json(store, {**_known(store), **fresh})
    return found


def _known(store: Path) -> dict[str, str]:
    try:
        return dict(json.loads(store.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def check_folder(folder: Path, name: str) -> None:
    """Refuse a model folder that cannot be used, before anything of it is loaded.

    Args:
        folder: The folder on this machine.
        name: What the settings call it, for the message.

    Raises:
        UserError: See `locate`.
    """
    here = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    config = _read_config(folder, name, here)
    if not list(folder.glob(WEIGHTS)):
        pickled = sorted({path.name for pattern in PICKLES for path in folder.glob(pattern)})
        raise UserError(
            "The model folder has only pickled weights, and those are never loaded (they run code)"
            if pickled
            else "The model folder has no weights that can be read",
            where=name,
            found=listed(pickled or here),
            expected="model.safetensors, or model-00001-of-….safetensors and the other parts",
            fix="use a version of the model with safetensors",
        )
    _refuse_missing_parts(folder, name)
    if "model_file" in config:
        raise UserError(
            "The model's architecture is code that comes with it, and such code is never run",
            where=f"{name}/config.json",
            found=f"model_file: {config['model_file']}",
            expected="an architecture that mlx-lm has",
            fix="choose another version of the model",
        )


def _read_config(folder: Path, name: str, here: list[str]) -> dict[str, object]:
    what = "The model folder cannot be used"
    path = folder / "config.json"
    if not path.is_file():
        adapter = "adapter_config.json" in here
        raise UserError(
            what,
            where=name,
            found=f"no config.json; there are: {listed(here)}",
            expected="config.json, model*.safetensors and tokenizer.json in the folder itself",
            fix="these are adapters: set train.initial_adapters to them, and model.* to their base"
            if adapter
            else "set model.path to the folder that holds config.json",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError("it has no model_type")
    except ValueError as error:
        where, expected = f"{name}/config.json", "a JSON object with model_type"
        raise UserError(what, where=where, found=error, expected=expected) from error
    return config


def _refuse_missing_parts(folder: Path, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return  # mlx-lm does not read it either
    missing = sorted(part for part in parts if not (folder / part).is_file())
    if missing:
        raise UserError(
            "Parts of the model's weights are missing",
            where=name,
            found=f"not there: {listed(missing)}",
            expected=f"{len(parts)} files, as {index.name} says",
            fix="fetch the missing files into the folder",
        )


def _wheel_file(repo: str) -> Path:
    """The one GGUF file inside an installed wheel, found without importing it."""
    wheel = repo.removeprefix(WHEEL)
    try:
        listed = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "The wheel with the model is not installed",
            where="model.repo",
            found=repo,
            expected=f"the package {wheel} in this environment",
            fix="run `make setup`",
        ) from error
    found = [Path(str(path.locate())) for path in listed if path.suffix == ".gguf"]
    found = [path for path in found if path.is_file()]
    if len(found) != 1:
        raise UserError(
            "The wheel does not hold one GGUF file",
            where="model.repo",
            found=f"{len(found)} in {repo}",
            expected="one .gguf file",
            fix="run `make setup` again, or name another model",
        )
    return found[0]


def _snapshot(repo: str, revision: str) -> Path:
    """The Hub's own cache folder of a commit, fetched unless it is whole already."""
    from huggingface_hub import errors, snapshot_download

    def fetch(local: bool) -> Path:
        patterns = list(USED)
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=patterns, local_files_only=local
            )
        )

    try:
        return fetch(local=True)
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError):
        console.say(f"fetching {repo} at {revision[:12]} from the Hub")
    try:
        return fetch(local=False)
    except Exception as error:  # the Hub's client raises its own, httpx's and OSError
        if files.is_disk_full(error):
            raise
        raise _unreachable(repo, revision, error) from error


def _unreachable(repo: str, revision: str, error: Exception) -> UserError:
    from huggingface_hub import errors

    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            "The Hub has no such commit of the model",
            where="model.revision",
            found=f"{revision} of {repo}",
            expected="a commit of the repository",
            fix=f"copy one from huggingface.co/{repo}/commits",
        )
    if isinstance(error, errors.RepositoryNotFoundError):  # a gated repository among them
        return UserError(
            "The Hub does not give this model out",
            where="model.repo",
            found=f"{repo}: {reason}",
            expected="a repository that exists and that you may read",
            fix="check the name; for a private or gated model accept its terms on the Hub and run"
            " `hf auth login`",
        )
    return UserError(
        "The model is not on this machine, and the Hub cannot be reached",
        where="model.repo",
        found=f"{repo} at {revision}: {reason}",
        expected="a network, or the model's files here",
        fix="on a machine with a network fetch config.json, tokenizer.json, tokenizer_config.json,"
        f" *.jinja and all model*.safetensors of huggingface.co/{repo}/tree/{revision} into one"
        " folder, say models/mine; here set model.path=models/mine, model.repo=null,"
        " model.revision=null",
    )

"""Where models come from: what is refused, what is hashed, what the Hub's client is asked."""

import json

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from stages.core import files
from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.model import sources, tiny
from stages.core.model.manifest import Source

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mine(root):
    folder = root / "models" / "mine"
    folder.mkdir(parents=True)
    tiny.write(folder)
    return folder


def locate(**model):
    settings = schema.Model(**model)
    return sources.locate(sources.source_of(settings), settings)


def refused(**model):
    with pytest.raises(UserError) as caught:
        locate(**model)
    return caught.value


def test_a_source_names_no_path_of_the_machine(mine):
    here = sources.source_of(schema.Model(path=str(mine)))
    there = sources.source_of(schema.Model(path="models/mine"))
    assert here == there == Source("folder", file="mine")
    assert locate(path=str(mine)) == locate(path="models/mine") == mine


def test_a_file_is_hashed_once_until_it_changes(mine, monkeypatch):
    first = sources.hashes(mine)
    assert first["config.json"] == {
        "sha256": files.sha256_file(mine / "config.json"),
        "bytes": (mine / "config.json").stat().st_size,
    }
    asked = []
    plain = files.sha256_file
    monkeypatch.setattr(files, "sha256_file", lambda path: asked.append(path.name) or plain(path))
    assert sources.hashes(mine) == first
    assert asked == []
    (mine / "config.json").write_text('{"model_type": "llama"}')
    assert sources.hashes(mine)["config.json"] != first["config.json"]
    assert asked == ["config.json"]


def test_a_torn_store_of_hashes_is_made_again(mine, root):
    first = sources.hashes(mine)
    (root / ".cache" / "models" / "hashes.json").write_text('{"torn')
    assert sources.hashes(mine) == first


def test_what_cannot_change_a_result_is_not_hashed(mine):
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "code.py"):
        (mine / name).write_text("x")
    assert set(sources.hashes(mine)) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_folder_that_is_not_there_is_said(root):
    error = refused(path="models/none")
    assert error.where == "model.path"
    assert error.found.startswith("models/none: no such file or folder")


def test_a_folder_without_config_is_said(mine):
    (mine / "config.json").unlink()
    error = refused(path="models/mine")
    assert error.where == "models/mine"
    assert error.found.startswith("no config.json; there are: model.safetensors")
    (mine / "adapter_config.json").write_text("{}")
    assert "train.initial_adapters" in refused(path="models/mine").fix


@pytest.mark.parametrize("text", ["{", "[1]", '{"hidden_size": 64}'])
def test_a_config_without_sense_is_said(mine, text):
    (mine / "config.json").write_text(text)
    assert refused(path="models/mine").where == "models/mine/config.json"


def test_pickles_are_never_loaded(mine):
    (mine / "model.safetensors").unlink()
    assert "no weights" in refused(path="models/mine").what
    (mine / "pytorch_model.bin").write_bytes(b"\x80\x04")
    error = refused(path="models/mine")
    assert "pickled" in error.what
    assert error.found == "pytorch_model.bin"


def test_a_model_that_is_its_own_code_is_refused(mine):
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps({**config, "model_file": "mine.py"}))
    error = refused(path="models/mine")
    assert error.found == "model_file: mine.py"


def test_missing_parts_are_named(mine):
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (mine / "model.safetensors").rename(mine / parts["a"])
    (mine / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert refused(path="models/mine").found == "not there: model-00002-of-00002.safetensors"


def test_a_wheel_that_is_not_installed_is_said():
    error = refused(repo="wheel:no-such-model")
    assert error.expected == "the package no-such-model in this environment"
    assert "no GGUF" in error.what or "not installed" in error.what


def test_an_unknown_built_in_model_is_said():
    assert refused(repo="builtin:huge").expected == "builtin:tiny"


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:12]])
def test_a_hub_revision_must_be_a_commit(revision):
    error = refused(repo="org/name", revision=revision)
    assert error.where == "model.revision"


def test_without_a_network_the_message_says_which_files_go_where(root, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root / "hub"))
    error = refused(repo="org/name", revision=COMMIT)
    assert "cannot be reached" in error.what
    assert f"huggingface.co/org/name/tree/{COMMIT}" in error.fix
    for word in (
        "config.json",
        "tokenizer.json",
        "model*.safetensors",
        "model.path=",
        "models/mine",
    ):
        assert word in error.fix


def test_a_model_in_the_hubs_cache_needs_no_network(root, mine, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root / "hub"))
    snapshot = root / "hub" / "models--org--name" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    mine.rename(snapshot)
    assert locate(repo="org/name", revision=COMMIT) == snapshot


def test_the_hub_is_asked_for_no_pickle_and_no_code(mine, monkeypatch):
    calls = []

    def download(repo, **words):
        calls.append(words)
        if words["local_files_only"]:
            raise errors.LocalEntryNotFoundError("not here")
        return str(mine)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate(repo="org/name", revision=COMMIT) == mine
    assert [call["local_files_only"] for call in calls] == [True, False]
    assert calls[1]["revision"] == COMMIT
    patterns = calls[1]["allow_patterns"]
    unwanted = ("model.py", "pytorch_model.bin", "model.pt", "rust_model.ot", "consolidated.pth")
    from fnmatch import fnmatch

    assert not [name for name in unwanted if any(fnmatch(name, p) for p in patterns)]
    assert any(fnmatch("model-00001-of-00002.safetensors", p) for p in patterns)

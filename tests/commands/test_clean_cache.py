"""clean-cache removes what can be rebuilt, and nothing that a process works in."""

import subprocess
import sys

import pytest

from stages.commands import clean_cache
from stages.core.activations import evict
from stages.core.errors import UserError

HOLD = """
import fcntl, sys
handle = open(sys.argv[1], "w")
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("models/a/model.safetensors", "plans/b.json", "checkpoints/c/40/state.json"):
        file = tmp_path / ".cache" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 100_000)
    return tmp_path / ".cache"


def test_by_default_goes_what_can_be_rebuilt_and_checkpoints_stay(cache, capsys):
    assert clean_cache.main([]) == 0
    assert sorted(entry.name for entry in cache.iterdir()) == ["checkpoints"]
    assert "models: 0.00 GB removed" in capsys.readouterr().err


def test_a_kind_that_is_named_goes_alone(cache):
    assert clean_cache.main(["checkpoints"]) == 0
    assert sorted(entry.name for entry in cache.iterdir()) == ["models", "plans"]


def test_an_unknown_kind_removes_nothing(cache, capsys):
    assert clean_cache.main(["modles", "plans"]) == 2
    assert (cache / "plans").exists()
    assert "modles" in capsys.readouterr().err


def test_what_a_killed_process_left_goes_too(cache):
    (cache / ".tmp-models-1234").mkdir()
    clean_cache.clean(["plans"])
    assert not (cache / ".tmp-models-1234").exists()


def test_a_folder_that_a_process_works_in_is_refused_whole(cache):
    lock = cache / "models" / "a.lock"
    words = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(UserError, match="A process works in this folder"):
            clean_cache.clean(["plans", "models"])
        assert (cache / "plans").exists()
        holder.stdin.close()
    clean_cache.clean(["plans", "models"])
    assert not (cache / "models").exists()


def test_activations_that_a_run_reads_are_refused(cache):
    folder = cache / "activations" / "0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "hidden.bin").write_bytes(b"x")
    readers = [evict.Use(folder), evict.Use(folder)]
    for reader in readers:
        with pytest.raises(UserError, match="works in this folder"):
            clean_cache.clean(["activations"])
        assert (folder / "hidden.bin").exists()
        reader.close()
    clean_cache.clean(["activations"])
    assert not folder.exists()


def test_sizes_count_the_bytes_on_the_disk(cache):
    found = clean_cache.sizes()
    assert set(found) == {"models", "plans", "checkpoints"}
    assert 100_000 / 1e9 <= found["models"] < 120_000 / 1e9


def test_no_cache_at_all_is_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert clean_cache.main([]) == 0

"""A build is whole or not there: killed, done twice at once, damaged, out of disk."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stages.core.activations import build, shards
from stages.core.activations.prepare import prepare
from tests.core.activations import building
from tests.core.activations.building import LENGTHS, SHARD_BYTES
from tests.core.activations.made import examples, folders, lora_model, source

REPOSITORY = Path(__file__).parents[3]
TOKENS = sum(LENGTHS)
BYTES = TOKENS * 64 * 4


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setattr(shards, "LEAST_BYTES", SHARD_BYTES)


def start(folder, pause):
    """The build as a process that is about to begin."""
    kept = {name: value for name, value in os.environ.items() if name != "DVC_ROOT"}
    process = subprocess.Popen(
        [sys.executable, building.__file__, str(folder), str(pause)],
        env={**kept, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def begin(process):
    process.stdin.write("now\n")
    process.stdin.flush()


def content(folder):
    """Name -> bytes of every shard of the only folder in a workspace."""
    (name,) = folders(folder)
    found = sorted((folder / ".cache/activations" / name).glob("*.bin"))
    return {file.name: file.read_bytes() for file in found}


def test_killed_with_9_it_goes_on_where_it_stopped(tmp_path):
    (tmp_path / "whole").mkdir()
    os.chdir(tmp_path / "whole")
    store, all_micros = building.prepared()
    store.close()
    whole = content(tmp_path / "whole")
    assert len(whole) > 8 and sum(map(len, whole.values())) == BYTES

    (tmp_path / "killed").mkdir()
    process = start(tmp_path / "killed", pause=0.02)
    begin(process)
    for _ in range(all_micros * 2 // 3):
        assert process.stdout.readline() == "micro\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (left,) = folders(tmp_path / "killed")
    assert left.endswith(".part"), "nothing half-made under the final name"

    os.chdir(tmp_path / "killed")
    store, more = building.prepared()
    store.close()
    assert content(tmp_path / "killed") == whole
    assert 0 < more < all_micros / 2
    leftovers = list((tmp_path / "killed/.cache/activations").rglob(".tmp-*"))
    assert not leftovers


def test_two_at_once_compute_once(tmp_path):
    processes = [start(tmp_path, pause=0.02) for _ in range(2)]
    for process in processes:
        begin(process)
    printed = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    micros = sorted(out.count("micro") for out, _ in printed)
    assert micros[0] == 0 < micros[1]
    assert any("waiting for process" in " ".join(err.split()) for _, err in printed)
    assert len({out.split()[-1] for out, _ in printed}) == 1
    assert sum(map(len, content(tmp_path).values())) == BYTES


def damage(way, folder):
    """Spoil one shard, or the manifest."""
    file = folder / "00003.bin"
    if way == "a bit":
        data = bytearray(file.read_bytes())
        data[1000] ^= 1
        file.write_bytes(data)
    elif way == "shortened":
        os.truncate(file, 100)
    elif way == "missing":
        file.unlink()
    elif way == "manifest torn":
        manifest = folder / shards.MANIFEST
        manifest.write_text(manifest.read_text()[:200])


@pytest.mark.parametrize("way", ["a bit", "shortened", "missing", "manifest torn"])
def test_damage_is_found_and_mended(tmp_path, way, capsys):
    store, all_micros = building.prepared()
    store.close()
    before = content(tmp_path)
    damage(way, store.folder)
    store, more = building.prepared()
    store.close()
    assert content(tmp_path) == before
    if way == "manifest torn":
        assert more == all_micros
    else:
        assert 0 < more <= 3
        assert "1 damaged files are made again" in " ".join(capsys.readouterr().err.split())
    store, more = building.prepared()
    store.close()
    assert more == 0


def test_a_full_disk_turns_it_off_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    written = []

    class FullAfterHalf:
        def __init__(self, path, mode):
            self.file = open(path, mode)  # noqa: SIM115

        def __enter__(self):
            return self

        def __exit__(self, *_exc):
            self.file.close()

        def write(self, block):
            written.append(len(block))
            if sum(written) > BYTES / 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(block)

    monkeypatch.setattr(build, "open", FullAfterHalf, raising=False)
    origin = source(lora_model(cut=2), 2)
    assert prepare(origin, {"train": examples(LENGTHS)}) is None
    printed = " ".join(capsys.readouterr().err.split())
    assert "activation cache is off: no space is left on the disk" in printed
    assert folders(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    prepare(origin, {"train": examples(LENGTHS)})["train"].close()
    origin.staged.close()


SMALL_DISK = """
mount -t tmpfs -o size=200k none "$1" || exit 77
head -c 100000 /dev/zero > "$1/other"
"$2" "$3" "$1" 0 unchecked && ls "$1/.cache/activations"
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 200 kB with 100 kB on it has no room for 142 kB of shards."""
    words = ["sh", "-c", SMALL_DISK, "sh", str(tmp_path), sys.executable, building.__file__]
    try:
        done = subprocess.run(
            ["unshare", "-rm", *words],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            input="now\n",
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this system")
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this user may not mount a file system")
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stderr.split())
    assert "activation cache is off: no space is left on the disk" in printed
    assert "done without" in done.stdout
    assert not [x for x in done.stdout.split() if x.endswith((".part", ".bin"))]


def test_another_error_during_the_build_is_not_swallowed(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    origin = source(lora_model(cut=2), 2)
    with pytest.raises(KeyboardInterrupt):
        prepare(origin, {"train": examples(LENGTHS)}, interrupted)
    origin.staged.close()


def test_two_splits_with_the_same_tokens_share_a_folder(tmp_path):
    ran, origin = [], source(lora_model(cut=2), 2)
    splits = {"train": examples((4, 6)), "valid": examples((4, 6))}
    stores = prepare(origin, splits, lambda: ran.append(1))
    assert stores["train"].folder == stores["valid"].folder
    assert len(ran) == 1 and len(folders(tmp_path)) == 1
    for store in stores.values():
        store.close()
    origin.staged.close()

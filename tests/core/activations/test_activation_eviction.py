"""The least recently used activations go first; what somebody uses stays."""

import os
from pathlib import Path

import pytest

from stages.core import files
from stages.core.activations.evict import Use, make_room
from stages.core.activations.prepare import prepare
from tests.core.activations.made import examples, folders, lora_model, source

MB = 1_000_000


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)


@pytest.fixture
def root(tmp_path):
    return tmp_path / ".cache/activations"


def made(root, name, megabytes, used):
    """A folder of this size, last used at this time."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "00000.bin").write_bytes(bytes(megabytes * MB))
    os.utime(folder, (used, used))
    return folder


def test_oldest_first_and_no_more_than_needed(root, capsys):
    for name, used in (("b", 200), ("a", 300), ("c", 100), ("d", 400)):
        made(root, name, 2, used)
    assert make_room(root, 3 * MB, limit_gb=0.008) == ""
    assert sorted(x.name for x in root.iterdir() if x.is_dir()) == ["a", "d"]
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.index("c, 0.002 GB") < printed.index("b, 0.002 GB")
    assert make_room(root, 4 * MB, limit_gb=0.008) == ""
    assert len([x for x in root.iterdir() if x.is_dir()]) == 2


def test_nothing_goes_where_it_would_not_suffice(root):
    for name, used in (("a", 100), ("b", 200)):
        made(root, name, 2, used)
    reason = make_room(root, 9 * MB, limit_gb=0.008)
    assert "needs 0.009 GB" in reason and "activation_cache_limit_gb (0.008)" in reason
    assert {x.name for x in root.iterdir() if x.is_dir()} == {"a", "b"}


def test_used_ones_stay_and_use_makes_them_the_youngest(root):
    old, young = made(root, "old", 2, 100), made(root, "young", 2, 200)
    use = Use(old)
    assert "needs" in make_room(root, 8 * MB, limit_gb=0.008)
    assert make_room(root, 6 * MB, limit_gb=0.008) == ""
    assert old.exists() and not young.exists()
    use.close()
    made(root, "later", 2, 300)
    assert make_room(root, 6 * MB, limit_gb=0.008) == ""
    assert old.exists() and not (root / "later").exists(), "old was used just now"


def test_what_a_killed_build_left_counts_and_goes(root):
    part = made(root, "abc.part", 3, 100)
    use = Use(root / "abc")
    assert "needs" in make_room(root, 2 * MB, limit_gb=0.004)
    use.close()
    assert make_room(root, 2 * MB, limit_gb=0.004) == ""
    assert not part.exists()


def test_the_disk_keeps_its_reserve(root, monkeypatch):
    folder = made(root, "a", 5, 100)
    monkeypatch.setattr(files, "free_gb", lambda _path: 1.002)
    assert make_room(root, 2 * MB, limit_gb=1.0) == ""
    assert folder.exists()
    assert make_room(root, 6 * MB, limit_gb=1.0) == ""
    assert not folder.exists(), "4 MB too much, 5 MB given back"
    assert "0.002 GB of the disk may be used" in make_room(root, 6 * MB, limit_gb=1.0)


def test_a_new_data_set_evicts_the_oldest_one_on_its_way(tmp_path, capsys):
    """Each split of 400 tokens takes 102 kB; 250 kB hold two of them."""
    names, origin = [], source(lora_model(cut=2), 2, activation_cache_limit_gb=0.00025)
    for seed in range(3):
        store = prepare(origin, {"train": examples((100, 100, 200), seed)})["train"]
        names.append(store.folder.name)
        store.close()
        for age, name in enumerate(reversed(names)):
            folder = tmp_path / ".cache/activations" / name
            if folder.exists():
                os.utime(folder, (1000 - age, 1000 - age))
    assert folders(tmp_path) == sorted(names[1:])
    assert prepare(origin, {"train": examples((2000,), 9)}) is None
    printed = " ".join(capsys.readouterr().err.split())
    assert "activation cache is off: it needs under 0.001 GB" in printed
    assert folders(tmp_path) == sorted(names[1:])
    origin.staged.close()


def test_a_limit_too_small_turns_it_off_before_anything_is_computed(tmp_path, monkeypatch):
    ran = []
    origin = source(lora_model(cut=2), 2, activation_cache_limit_gb=0.0001)
    splits = {"train": examples((300,)), "valid": examples((200,))}
    assert prepare(origin, splits, lambda: ran.append(1)) is None
    assert not ran and folders(Path.cwd()) == []
    origin.staged.close()


def test_what_is_on_the_disk_is_used_whatever_the_limit(tmp_path):
    split = {"train": examples((100, 100, 200))}
    origin = source(lora_model(cut=2), 2, activation_cache_limit_gb=0.001)
    prepare(origin, split)["train"].close()
    origin.staged.close()
    tight = source(lora_model(cut=2), 2, activation_cache_limit_gb=0.00001)
    prepare(tight, split)["train"].close()
    tight.staged.close()
    assert len(folders(tmp_path)) == 1

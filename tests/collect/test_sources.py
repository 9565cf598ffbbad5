"""Which files are read, and for which split."""

import os

import pytest

from stages.collect import location, sources
from stages.core.errors import UserError


@pytest.fixture
def folder(workspace):
    def make(*names):
        base = workspace / "data/source/mine"
        base.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = base / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"text": "x"}\n')
        return base

    return make


def found(base):
    splits = sources.discover(base, "mine").splits
    return {
        name: [source.name.removeprefix("mine/") for source in files]
        for name, files in splits.items()
    }


@pytest.mark.parametrize(
    ("valid", "test"),
    [
        ("valid.jsonl", "test.jsonl"),
        ("validation.json", "test.csv"),
        ("val.parquet", "testing.tsv"),
        ("dev.jsonl.gz", "test.jsonl.zst"),
        ("eval.ndjson", "my_test.jsonl"),
        ("Wiki-VAL.jsonl", "Test_v.jsonl"),
    ],
)
def test_splits_are_found_under_the_names_people_use(folder, valid, test):
    base = folder("train.jsonl", valid, test)
    assert found(base) == {"train": ["train.jsonl"], "valid": [valid], "test": [test]}


def test_shards_are_read_in_the_order_of_their_numbers(folder):
    hub = [f"train-0000{i}-of-00003.parquet" for i in range(3)]
    own = ["valid_1.jsonl", "valid_2.jsonl", "valid_10.jsonl"]
    splits = found(folder(*reversed(hub), *reversed(own), "test.part1.csv"))
    assert splits == {"train": hub, "valid": own, "test": ["test.part1.csv"]}


def test_folders_may_be_named_after_splits(folder):
    base = folder("train/0.jsonl", "train/1.jsonl", "dev/0.jsonl", "readme.md")
    assert found(base) == {"train": ["train/0.jsonl", "train/1.jsonl"], "valid": ["dev/0.jsonl"]}


def test_the_only_folder_with_data_is_entered(folder):
    base = folder("config.yaml", "mlx_data/train.jsonl", "mlx_data/valid.jsonl", "pictures/x.png")
    assert found(base) == {"train": ["mlx_data/train.jsonl"], "valid": ["mlx_data/valid.jsonl"]}


def test_files_that_name_no_split_are_one_set(folder):
    result = sources.discover(folder("a.jsonl", "b.csv"), "mine")
    assert [source.name for source in result.splits["train"]] == ["mine/a.jsonl", "mine/b.csv"]
    assert result.warnings == ["no file is named after a split: one set of a.jsonl, b.csv"]


def test_what_is_not_read_is_said(folder):
    result = sources.discover(folder("train.jsonl", "extra.jsonl", "notes.txt", ".hidden"), "mine")
    assert sorted(result.unread) == ["mine/extra.jsonl", "mine/notes.txt"]
    assert result.warnings == ["extra.jsonl is not read: its name says no split"]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["valid.jsonl", "test.jsonl"], "There is no train file"),
        (["train.jsonl", "valid.jsonl", "dev.jsonl"], "Two names stand for the valid split"),
        (["train.jsonl", "train.parquet"], "The same name stands there in two formats"),
        (["train_test.jsonl"], "A file's name says two splits"),
        (["readme.md"], "There is no file with rows"),
        ([], "There is no file with rows"),
        (["en/train.jsonl", "de/train.jsonl"], "Several folders hold data"),
        (["train/a/b.jsonl", "test/x.jsonl"], "There is no file with rows"),
    ],
)
def test_what_cannot_be_told_apart_is_an_error(folder, names, what):
    with pytest.raises(UserError) as caught:
        sources.discover(folder(*names), "mine")
    assert caught.value.what == what


def test_the_only_folder_beside_toy_is_yours(workspace, folder):
    base = folder("train.jsonl")
    (workspace / "data/source/toy").mkdir()
    (workspace / "data/source/README.md").write_text("x")
    (workspace / "data/source/mine.dvc").write_text("x")
    assert location.locate(None) == (base, [])


@pytest.mark.parametrize(
    ("entries", "fix"),
    [
        ([], "put your files into data/source/NAME"),
        (["a/", "b/"], "data.path=data/source/a"),
        (["mine.dvc"], "dvc pull data/source/mine.dvc"),
    ],
)
def test_without_exactly_one_the_remedy_is_said(workspace, entries, fix):
    (workspace / "data/source/toy").mkdir(parents=True)
    for entry in entries:
        path = workspace / "data/source" / entry
        path.mkdir() if entry.endswith("/") else path.write_text("x")
    with pytest.raises(UserError) as caught:
        location.locate(None)
    assert fix in caught.value.fix


def test_a_missing_data_source_is_said(workspace):
    with pytest.raises(UserError) as caught:
        location.locate(None)
    assert caught.value.what == "There is no folder data/source"


def test_a_path_that_does_not_exist_or_was_not_pulled(workspace):
    (workspace / "data/source").mkdir(parents=True)
    (workspace / "data/source/big.dvc").write_text("x")
    with pytest.raises(UserError) as caught:
        location.locate("data/source/none")
    assert caught.value.where == "data/source/none"
    with pytest.raises(UserError) as caught:
        location.locate("data/source/big")
    assert caught.value.fix == "dvc pull data/source/big.dvc"


def test_a_path_outside_data_source_is_warned_of(workspace):
    (workspace / "elsewhere").mkdir()
    _, warnings = location.locate("elsewhere")
    assert warnings == ["data.path lies outside data/source: DVC cannot see when it changes"]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"], "train-00001-of-00003"),
        (["a-2-of-2.jsonl"], "a-1-of-2"),
        (["train/x-00000-of-00002.jsonl", "test/y.jsonl"], "x-00001-of-00002"),
        (["train-00000-of-00002-0123456789abcdef.jsonl"], "train-00001-of-00002"),
    ],
)
def test_a_missing_shard_is_named(folder, names, missing):
    with pytest.raises(UserError, match="Shards are missing: 1 of") as caught:
        found(folder(*names))
    assert caught.value.found == f"not there: {missing}"


def test_shards_may_count_from_one(folder):
    names = ["train-1-of-2.jsonl", "train-2-of-2.jsonl.gz"]
    assert found(folder(*names)) == {"train": names}


def test_a_name_without_a_file_behind_it_is_refused(folder):
    """A link that leads nowhere, or a pipe, would be rows left out in silence."""
    base = folder("train.jsonl")
    (base / "train2.jsonl").symlink_to("elsewhere.jsonl")
    with pytest.raises(UserError, match="no file behind it") as caught:
        sources.discover(base, "mine")
    assert "elsewhere.jsonl" in caught.value.found
    (base / "train2.jsonl").unlink()
    os.mkfifo(base / "train2.jsonl")
    with pytest.raises(UserError, match="no file behind it"):
        sources.discover(base, "mine")
    (base / "train2.jsonl").unlink()
    (base / "notes.txt").symlink_to("elsewhere.txt")
    assert found(base) == {"train": ["train.jsonl"]}


def test_a_folder_with_rows_beside_the_files_is_named(folder):
    base = folder("train.jsonl", "more/deep/train2.jsonl", "pictures/x.png")
    assert found(base) == {"train": ["train.jsonl"]}
    warnings = sources.discover(base, "mine").warnings
    assert warnings == ["more/ is not read: files lie beside it in mine/"]
    nested = folder("sets/train/0.jsonl", "sets/valid/0.jsonl", "sets/valid/old/1.jsonl") / "sets"
    assert sources.discover(nested, "sets").warnings == [
        "old/ is not read: files lie beside it in valid/"
    ]


@pytest.mark.parametrize("path", [".", "..", "/", "data/.."], ids=["here", "above", "root", "back"])
def test_the_project_itself_is_no_data(folder, path):
    folder("train.jsonl")
    with pytest.raises(UserError, match="project itself"):
        location.locate(path)


def test_a_device_is_no_data():
    with pytest.raises(UserError, match="neither a file nor a folder"):
        location.locate("/dev/null")

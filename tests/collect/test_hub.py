"""Hub data sets: pinned names, one fetch, and no network."""

import json

import huggingface_hub
import pytest

from stages.collect import hub
from stages.core.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_names_are_taken_apart():
    assert hub.parse(f"hub:org/na.me@{COMMIT}") == hub.HubName("org/na.me", "", COMMIT)
    assert hub.parse(f"hub:a/b/c/d@{COMMIT}") == hub.HubName("a/b", "c/d", COMMIT)


@pytest.mark.parametrize("path", ["hub:org/name", "hub:org/name@main", "hub:name@" + COMMIT])
def test_a_name_without_a_commit_is_refused(path):
    with pytest.raises(UserError) as caught:
        hub.parse(path)
    assert caught.value.found == path
    assert "40 hexadecimal digits" in caught.value.expected


def test_rows_of_a_data_set_are_read_and_later_need_no_network(run, workspace, monkeypatch):
    asked = []

    def snapshot(repo, *, repo_type, revision, cache_dir, allow_patterns, local_files_only):
        asked.append((repo, repo_type, revision, local_files_only))
        assert "*.parquet" in allow_patterns
        assert "*.py" not in allow_patterns
        folder = cache_dir / "snapshot"
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "data/train-00000-of-00001.jsonl").write_text(json.dumps({"text": "x"}))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    path = f"hub:org/name@{COMMIT}"
    for _ in range(2):
        found = run(path)
        assert found.records() == [{"text": "x"}]
        source = f"{path}/data/train-00000-of-00001.jsonl"
        assert found.tables["train"][0]["source"] == source
    assert asked == [("org/name", "dataset", COMMIT, local) for local in (False, True)]


def test_without_a_network_it_says_what_to_place_where(run, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        run(f"hub:org/name@{COMMIT}")
    assert caught.value.what == "The data set org/name cannot be fetched"
    assert "data/source" in caught.value.fix

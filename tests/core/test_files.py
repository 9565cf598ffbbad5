"""Files appear whole or not at all."""

import errno
import os

import pytest

from stages.core import files
from stages.core.errors import UserError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "a.json"
    files.write_json(target, {"b": 1})
    with pytest.raises(RuntimeError), files.replacing(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError("stop")
    assert target.read_text() == '{\n  "b": 1\n}\n'
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_folder_is_replaced_whole(tmp_path):
    target = tmp_path / "adapters"
    with files.replacing_folder(target) as temporary:
        (temporary / "old").write_text("1")
    with files.replacing_folder(target) as temporary:
        (temporary / "new").write_text("2")
    assert os.listdir(target) == ["new"]
    assert os.listdir(tmp_path) == ["adapters"]


def test_a_failed_folder_leaves_the_old_one(tmp_path):
    target = tmp_path / "adapters"
    with files.replacing_folder(target) as temporary:
        (temporary / "old").write_text("1")
    with pytest.raises(RuntimeError), files.replacing_folder(target) as temporary:
        (temporary / "new").write_text("2")
        raise RuntimeError("stop")
    assert os.listdir(target) == ["old"]
    assert os.listdir(tmp_path) == ["adapters"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("opened", [files.replacing, files.replacing_folder])
def test_a_full_disk_is_the_users_to_mend(tmp_path, opened, number):
    with pytest.raises(UserError, match="No space left"), opened(tmp_path / "x"):
        raise OSError(number, os.strerror(number))
    assert os.listdir(tmp_path) == []


def test_numbers_json_has_no_word_for_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


def test_a_torn_json_file_is_named(tmp_path):
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(UserError) as caught:
        files.read_json(tmp_path / "x.json")
    assert str(tmp_path / "x.json") in caught.value.where


def test_sha256_of_the_standards_example(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.sha256_file(tmp_path / "abc") == expected


def test_leftovers_of_a_killed_process_are_swept(tmp_path):
    (tmp_path / ".tmp-a-1").mkdir()
    (tmp_path / ".tmp-b-2").write_text("x")
    (tmp_path / "kept").write_text("x")
    assert files.remove_leftovers(tmp_path) == 2
    assert os.listdir(tmp_path) == ["kept"]

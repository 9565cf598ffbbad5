"""The store's address and the secrets of DVC's settings; files written here, no DVC."""

import pytest

from stages.commands.sharing import store
from stages.core.errors import UserError
from tests.project import ROOT


@pytest.fixture
def root(tmp_path):
    (tmp_path / "project/.dvc").mkdir(parents=True)
    return tmp_path / "project"


def config(root, text, file="config"):
    (root / ".dvc" / file).write_text(text)


def remote(url, *lines):
    return "\n".join(
        ["[core]", "    remote = store", "['remote \"store\"']", f"    url = {url}", *lines, ""]
    )


def refused(call, *words):
    with pytest.raises(UserError) as caught:
        call(*words)
    return caught.value


def test_this_project_shares_no_secret():
    assert store.secrets(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "secret_access_key = x",
        "access_key_id = x",
        "session_token = x",
        "password = x",
        "connection_string = x",
        "account_key = x",
        "sas_token = x",
        "client_secret = x",
        "gdrive_service_account_json = x",
    ],
)
def test_a_secret_in_the_tracked_settings_is_refused_by_name_alone(root, line):
    config(root, remote("s3://bucket/x", f"    {line.replace('= x', '= hunter2')}"))
    error = refused(store.require_no_secrets, root)
    key = line.split(" = ")[0]
    assert error.found == f'remote "store": {key}'
    assert f"dvc remote modify --local store {key}" in error.fix
    assert "hunter2" not in str(error)


def test_a_password_in_an_address_is_a_secret_too(root):
    config(root, remote("ssh://me:hunter2@host/x"))
    assert store.secrets(root) == ['remote "store": url']
    assert "password" in refused(store.name_for_all, root, "ssh://me:hunter2@host/x").what


def test_names_of_files_with_keys_and_profiles_are_no_secret(root):
    config(root, remote("s3://bucket/x", "    profile = team", "    endpointurl = http://x:1"))
    assert store.secrets(root) == []


def test_secrets_in_the_local_settings_are_where_they_belong(root):
    config(root, remote("s3://bucket/x"))
    config(root, "['remote \"store\"']\n    secret_access_key = x\n", "config.local")
    store.require_no_secrets(root)
    assert store.require(root) == store.Store("store", "s3://bucket/x")


def test_no_store_says_how_to_name_one(root):
    config(root, "[core]\n    autostage = true\n")
    assert "make share STORE=" in refused(store.require, root).fix


def test_a_relative_store_is_refused_with_its_absolute_path(root):
    config(root, remote("../../shared"))
    error = refused(store.require, root)
    assert error.fix == f"make share STORE={root.parent / 'shared'}"


def test_a_store_that_is_not_there_says_how_to_name_its_place_here(root, tmp_path):
    config(root, remote(tmp_path / "nowhere"))
    assert "make join STORE=" in refused(store.require, root).fix
    config(root, f"['remote \"store\"']\n    url = {tmp_path}\n", "config.local")
    assert store.require(root).folder == tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [("../s", "{parent}/s"), ("s", "{root}/s"), ("/a/./b", "/a/b"), ("s3://b/../c", "s3://b/../c")],
)
def test_a_folder_gets_its_absolute_path(root, given, expected):
    assert store.address(root, given) == expected.format(parent=root.parent, root=root)

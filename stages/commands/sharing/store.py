"""The store: DVC's default remote, through which a team shares what git does not hold.

A store in a local folder is named by its absolute path: DVC reads a relative one from other places
for different commands, and `dvc exp push` would fill a wrong folder without a word.
"""

from __future__ import annotations

import configparser
import re
from dataclasses import dataclass
from pathlib import Path

from stages.commands.sharing import dvc, git
from stages.core import console
from stages.core.errors import UserError

NAME = "store"
CONFIG, LOCAL = ".dvc/config", ".dvc/config.local"
SECRET = re.compile(
    r"password|secret|token|access_key_id|account_key|connection_string|credential|private|"
    r"service_account_json|^key(file)?_passphrase$|^passphrase$"
)
LOGIN_IN_ADDRESS = re.compile(r"://[^/@\s]+:[^/@\s]+@")


@dataclass(frozen=True)
class Store:
    """Where a team shares.

    Attributes:
        name: The remote's name in DVC's settings.
        url: Its address as written there.
    """

    name: str
    url: str

    @property
    def folder(self) -> Path | None:
        """The folder of a local store, None for another kind."""
        return None if "://" in self.url else Path(self.url)


def read(root: Path) -> Store | None:
    """The default remote of .dvc/config, over it .dvc/config.local; None where there is none."""
    settings = _settings(root, CONFIG)
    local = _settings(root, LOCAL)
    name = local.get("core", {}).get("remote") or settings.get("core", {}).get("remote")
    if not name:
        return None
    section = f"'remote \"{name}\"'"
    url = {**settings.get(section, {}), **local.get(section, {})}.get("url")
    return Store(name, url) if url else None


def default(text: str) -> str | None:
    """The default remote that the text of a settings file names."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    return parser.get("core", "remote", fallback=None)


def require(root: Path) -> Store:
    """The store, reachable where it is a folder.

    Raises:
        UserError: There is none, its path is relative, or its folder is not there.
    """
    found = read(root)
    if found is None:
        raise UserError(
            "This project has no store yet",
            where=CONFIG,
            expected="a default remote of DVC that the whole team reaches",
            fix="make share STORE=/a/folder/that/all/reach, or STORE=s3://bucket/folder",
        )
    folder = found.folder
    if folder is not None and not folder.is_absolute():
        raise UserError(
            "The store has a relative path, which DVC's commands read differently",
            where=CONFIG,
            found=found.url,
            expected="an absolute path",
            fix=f"make share STORE={(root / '.dvc' / folder).resolve()}",
        )
    if folder is not None and not folder.is_dir():
        raise UserError(
            "The store is not there",
            where=CONFIG,
            found=found.url,
            expected="a folder that this machine reaches",
            fix="mount it; or, where it has another path here: make join STORE=PATH",
        )
    return found


def address(root: Path, given: str) -> str:
    """A store's address as DVC shall have it: a folder's absolute path, else the URL itself."""
    if "://" in given:
        return given
    return str((root / Path(given).expanduser()).resolve())


def name_for_all(root: Path, given: str) -> None:
    """Make a store the default remote in .dvc/config, and commit that file.

    Raises:
        UserError: The address holds a password.
    """
    url = address(root, given)
    if LOGIN_IN_ADDRESS.search(url):
        raise UserError(
            "An address with a password would end up in git",
            where="STORE",
            expected="an address without one",
            fix=f"the password goes to your machine: dvc remote modify --local {NAME} password …",
        )
    if "://" not in url:
        Path(url).mkdir(parents=True, exist_ok=True)
    known = read(root)
    name = known.name if known else NAME
    if known is None or known.url != url:
        dvc.run("remote", "add", "--force", "--default", name, url, cwd=root)
    if git.run("status", "--porcelain", "--", CONFIG, cwd=root):
        git.run("add", "--", CONFIG, cwd=root)
        git.run("commit", "-q", "-m", f"Share through {name}", "--", CONFIG, cwd=root)
        console.say(f"{CONFIG}: the store is {url}; committed")


def name_here(root: Path, given: str) -> None:
    """Set the store's address for this machine only, in .dvc/config.local.

    Raises:
        UserError: The project has no store.
    """
    known = read(root)
    if known is None:
        require(root)
    else:
        dvc.run("remote", "modify", "--local", known.name, "url", address(root, given), cwd=root)


def secrets(root: Path) -> list[str]:
    """`section: key` of each secret in the tracked settings of DVC."""
    found = []
    for section, values in _settings(root, CONFIG).items():
        for key, value in values.items():
            if SECRET.search(key) or LOGIN_IN_ADDRESS.search(value):
                found.append(f"{section.strip(chr(39))}: {key}")
    return found


def require_no_secrets(root: Path) -> None:
    """Refuse secrets in .dvc/config, which git shares.

    Raises:
        UserError: They are named (their values are not).
    """
    found = secrets(root)
    if found:
        key = found[0].split(": ")[1]
        raise UserError(
            "DVC's tracked settings hold a secret",
            where=CONFIG,
            found=", ".join(found),
            expected=f"secrets in {LOCAL}, which git ignores",
            fix=f"dvc remote modify --local {NAME} {key} VALUE, take it out of {CONFIG}, and change"
            " it where it came from if it was ever committed",
        )


def _settings(root: Path, file: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(root / file, encoding="utf-8")
    return {section: dict(parser[section]) for section in parser.sections()}

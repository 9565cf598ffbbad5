"""Data sets of the Hugging Face Hub at a pinned commit: `hub:org/name@commit`.

Only files with rows are fetched, into `.cache/hub/`, and read like a folder of your own; a data
set's own loading code is never run. `hub:org/name/folder@commit` takes one of its folders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from stages.collect.readers import CODECS, FORMATS
from stages.core import files, paths
from stages.core.errors import UserError

PREFIX = "hub:"
_NAME = re.compile(r"hub:([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)@(.+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A data set, the folder in it ("" for the whole) and the commit."""

    repo: str
    folder: str
    commit: str


def parse(path: str) -> HubName:
    """Take `hub:org/name[/folder]@commit` apart.

    Raises:
        UserError: It has no commit, or not the whole of one.
    """
    found = _NAME.fullmatch(path)
    if not found or not _COMMIT.fullmatch(found[3]):
        raise UserError(
            "A Hub data set needs its commit, so that everyone trains the same rows",
            where="data.path",
            found=path,
            expected="hub:org/name@ and the 40 hexadecimal digits of a commit",
            fix="copy the commit from the data set's page, Files and versions",
        )
    return HubName(found[1], found[2].strip("/"), found[3])


def fetch(path: str) -> Path:
    """Give the local folder of a Hub data set, fetched where it is not there yet.

    Raises:
        UserError: The name has no commit; or the data set cannot be reached and is not there.
    """
    name = parse(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    endings = [ending + packed for ending in FORMATS for packed in ("", *CODECS)]
    inside = f"{name.folder}/" if name.folder else ""
    cache = paths.cache("hub")
    whole = cache / f"{name.repo}/{inside}{name.commit}.whole".replace("/", "--")
    try:
        folder = snapshot_download(
            name.repo,
            repo_type="dataset",
            revision=name.commit,
            cache_dir=cache,
            allow_patterns=[f"{inside}*{ending}" for ending in endings],
            local_files_only=whole.exists(),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"The data set {name.repo} cannot be fetched",
            where="data.path",
            found=(str(error) or type(error).__name__).splitlines()[0],
            expected="a network, once; later runs read .cache/hub",
            fix=f"fetch it elsewhere (`hf download --repo-type dataset {name.repo} --revision"
            f" {name.commit} --local-dir {name.repo.split('/')[1]}`), put that folder into"
            " data/source and set data=files",
        ) from error
    files.write_text(whole, "fetched whole\n")
    return Path(folder) / name.folder

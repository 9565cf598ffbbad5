"""The name of a folder of activations: all that decides its numbers, and no memory setting."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import numpy as np

from stages.core import paths
from stages.core.fingerprint import fingerprint
from stages.core.machine.device import ENGINE
from stages.core.model.manifest import Manifest
from stages.core.tables import Examples

VERSION = 1
"""Raise it when the files' form changes."""


def folder(manifest: Manifest, cut: int, examples: Examples, device_kind: str) -> Path:
    """`.cache/activations/<fingerprint>` of one split, made or not.

    Model files and type, first trained layer, tokens, engine versions and device decide. Which
    tokens are targets does not, nor do adapters, learning rate or the cut into micro-batches: those
    runs share the folder.
    """
    name = fingerprint(
        {
            "version": VERSION,
            "model": {"files": manifest.files, "dtype": manifest.dtype, "bytes": manifest.bytes},
            "cut": cut,
            "tokens": tokens_sha256(examples),
            "engine": {name: importlib.metadata.version(name) for name in ENGINE},
            "device": device_kind,
        }
    )
    return paths.cache("activations") / name


def tokens_sha256(examples: Examples) -> str:
    """The SHA-256 of a split's tokens and of where each example begins."""
    digest = hashlib.sha256()
    for array, dtype in ((examples.offsets, "<i8"), (examples.tokens, "<i4")):
        digest.update(np.ascontiguousarray(array, dtype).tobytes())
    return digest.hexdigest()

"""What was run: model, settings, versions, hashes, the commands that repeat it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from stages.core.config import schema, settings
from stages.core.config.settings import PARAMS
from stages.core.fingerprint import fingerprint
from stages.report import words
from stages.report.html import Markup, facts, join, table, tag
from stages.report.inputs import Inputs
from stages.report.section import Section, absent, heading

BARE = re.compile(r"[A-Za-z][\w./:@+-]*")
MOST_NAMED = 5
"""Changed files that are named."""
RESERVED = {"null", "true", "false", "nan", "inf"}
"""Strings that need no quotes in an override, and those that would be read as something else."""


def section(inputs: Inputs) -> Section:
    """Settings and identity of the run, and how to repeat it."""
    mathematics = settings.as_dict(inputs.settings, schema.MATHEMATICS)
    defaults = dict(flat(settings.as_dict(schema.Settings(), schema.MATHEMATICS)))
    body = [
        tag("div", _model(inputs), _identity(inputs, mathematics), class_="grid2"),
        heading("Repeat it"),
        tag("pre", tag("code", "\n".join(commands(inputs)))),
        heading("Settings"),
        tag("p", "Bold: differs from the schema's default.", class_="note"),
        tag("div", *(_group(*one, defaults) for one in mathematics.items()), class_="settings"),
        _override_list(mathematics),
        _hashes(inputs),
    ]
    return Section("run", "What was run", join(body))


def commands(inputs: Inputs) -> list[str]:
    """The lines that repeat the run in a clone of the repository."""
    if not inputs.commit:
        return ["make repro"]
    notes = []
    if inputs.changed:
        notes.append(f"# made with changes to {_named(inputs.changed)}, which this commit lacks")
    if inputs.changed == [PARAMS]:  # `dvc exp run -S …`
        notes.append("# its values are below, under All settings as one command")
    return [f"git checkout {inputs.commit}", *notes, "make repro"]


def _named(changed: list[str]) -> str:
    rest = len(changed) - MOST_NAMED
    return ", ".join(changed[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def overrides(mathematics: Mapping[str, Any]) -> list[str]:
    """Every setting as `key=value`, as `python -m stages.compose` takes it."""
    return [shlex.quote(f"{key}={_hydra(value)}") for key, value in flat(mathematics)]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested settings; empty mappings are values."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _model(inputs: Inputs) -> Markup:
    m = inputs.manifest
    if m is None:
        return tag("div", heading("Base model"), absent("The model's facts", "model"))
    source = m["source"]
    packed = m.get("quantization")
    pairs = [
        ("name", m["name"]),
        ("source", source["repo"] or f"{source['kind']} {source['file']}"),
        ("revision", source.get("revision")),
        ("architecture", f"{m['model_type']}, {m['num_layers']} layers of {m['hidden_size']}"),
        ("parameters", words.count(m["parameters"])),
        ("type", f"{packed['bits']} bit, {m['dtype']}" if packed else m["dtype"]),
    ]
    return tag("div", heading("Base model"), facts(pairs))


def _identity(inputs: Inputs, mathematics: Mapping[str, Any]) -> Markup:
    versions = (inputs.training.run.get("versions") if inputs.training else None) or {}
    pairs = [
        ("commit", inputs.commit or None),
        ("changed since", _named(inputs.changed) if inputs.changed else None),
        ("settings", fingerprint(mathematics)),
        *versions.items(),
    ]
    return tag("div", heading("Identity"), facts(pairs))


def _group(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Markup:
    items = []
    for key, value in flat(values):
        changed = defaults.get(f"{name}.{key}") != value
        shown = tag("b", _shown(value)) if changed else _shown(value)
        items.append(tag("div", tag("dt", key), tag("dd", shown)))
    return tag("div", tag("h4", name), tag("dl", *items, class_="facts"))


def _override_list(mathematics: Mapping[str, Any]) -> Markup:
    lines = " \\\n  ".join(["python -m stages.compose", *overrides(mathematics)])
    summary = tag("summary", "All settings as one command")
    return tag("details", summary, tag("pre", tag("code", lines)))


def _hashes(inputs: Inputs) -> Markup | None:
    rows = [
        [name, words.count(one.get("bytes")), tag("code", one["sha256"])]
        for name, one in ((inputs.manifest or {}).get("files") or {}).items()
    ]
    if inputs.adapter_sha256:
        name = "adapters/adapters.safetensors"
        rows.append([name, words.NONE, tag("code", inputs.adapter_sha256)])
    if not rows:
        return None
    columns = ["file", "bytes", "SHA-256"]
    body = table(columns, rows, text_columns=(0, 2))
    return tag("details", tag("summary", "Hashes of the model's files and the adapter"), body)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hydra(value: Any) -> str:
    """A value in Hydra's override grammar: JSON with bare keys, plain words bare too."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_hydra(one) for one in value) + "]"
    if isinstance(value, str) and BARE.fullmatch(value) and value.lower() not in RESERVED:
        return value
    return json.dumps(value, ensure_ascii=False)

"""Take the result along: the adapter with its card, a fused model, or a PEFT adapter.

python -m stages export --adapter FOLDER            adapters/ and its card, as mlx-lm reads it
python -m stages export --fused FOLDER              base and adapter in one, not quantized
python -m stages export --fused FOLDER --bits 4     ... quantized
python -m stages export --peft FOLDER               for the PEFT library

Each is checked on a few test rows: logits and loss must be those of base + adapter. One that
drifts is refused, with the numbers. A folder that exists is never touched.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core import console, entry, files
from stages.core.config.settings import load_settings
from stages.core.errors import UserError
from stages.core.machine import device

if TYPE_CHECKING:
    from stages.commands.exporting.subject import Subject

KINDS = ("adapter", "fused", "peft")
ADAPTERS = Path("adapters")


def main(argv: Sequence[str]) -> int:
    """Parse the line and export; the exit status."""
    options = _parser().parse_args(argv)
    return entry.guarded("export", lambda: run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages export", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for kind, words in zip(KINDS, ("the adapter", "a fused model", "a PEFT adapter"), strict=True):
        parser.add_argument(f"--{kind}", type=Path, metavar="FOLDER", help=f"write {words}")
    parser.add_argument(
        "--bits", type=int, choices=(2, 3, 4, 5, 6, 8), help="quantize the fused model"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the fused model's weights; default: the base's",
    )
    parser.add_argument(
        "--max-drift",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="largest share of the adapter's effect that may be lost (default: 0.1)",
    )
    parser.add_argument(
        "--adapters", type=Path, default=ADAPTERS, metavar="FOLDER", help="default: adapters"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="memory.* and run.*")
    return parser


def run(options: argparse.Namespace) -> None:
    """Check what is asked for, then write each export whole or not at all.

    Raises:
        UserError: A folder exists, something is missing, or an export drifts.
    """
    targets = _targets(options)
    settings = load_settings(overrides=options.overrides)
    from stages.commands.exporting import card

    text = card.read()
    device.prepare(settings.run.device)
    from stages.commands.exporting.subject import open_subject

    subject = open_subject(settings, options.adapters)
    write = {"adapter": _adapter, "fused": _fused, "peft": _peft}
    for kind, target in targets.items():
        with files.replacing_folder(target) as temporary:
            write[kind](subject, temporary, text, options)
        size = sum(file.stat().st_size for file in target.iterdir()) / 1e9
        console.say(f"wrote {target} ({size:.3g} GB)")


def _targets(options: argparse.Namespace) -> dict[str, Path]:
    targets = {kind: getattr(options, kind) for kind in KINDS if getattr(options, kind)}
    if not targets:
        raise UserError(
            "Nothing to export was asked for",
            expected="--adapter FOLDER, --fused FOLDER or --peft FOLDER",
            fix="`python -m stages export --help` tells more",
        )
    if "fused" not in targets and (options.bits or options.dtype):
        raise UserError(
            "--bits and --dtype are for a fused model",
            found=", ".join(f"--{kind}" for kind in targets),
            fix="add --fused FOLDER, or leave them out",
        )
    for kind, target in targets.items():
        above = next(folder for folder in target.parents if folder.exists())
        if not above.is_dir():
            raise UserError(
                "An export cannot be written below a file",
                where=str(target),
                found=f"{above} is a file",
                expected=f"a new folder for --{kind}",
                fix="give another name",
            )
    places = [target.resolve() for target in targets.values()]
    for kind, target in targets.items():
        taken = target.exists() or target.is_symlink() or places.count(target.resolve()) > 1
        if taken:
            raise UserError(
                "An export never writes into what is there",
                where=str(target),
                found="it exists" if target.exists() else "the same folder twice",
                expected=f"a new folder for --{kind}",
                fix="give another name, or remove it first",
            )
    return targets


def _adapter(subject: Subject, folder: Path, text: str, options: argparse.Namespace) -> None:
    from mlx_lm.tuner.utils import load_adapters

    from stages.commands.exporting import card, drift
    from stages.core.update import adapters

    for name in (adapters.CONFIG, adapters.WEIGHTS):
        shutil.copyfile(subject.adapters / name, folder / name)
    card.write(folder, text)
    model, _ = subject.load()
    found = drift.measure(subject.base, subject.tuned, subject.see(load_adapters(model, folder)))
    fix = "report it: mlx-lm reads this adapter otherwise than samestep"
    drift.require(found, options.max_drift, "adapter as mlx-lm loads it", str(options.adapter), fix)


def _fused(subject: Subject, folder: Path, text: str, options: argparse.Namespace) -> None:
    from stages.commands.exporting import card, drift, fused
    from stages.core.model import models

    fused.write(subject, folder, options.bits, options.dtype)
    card.write(folder, card.for_fused(text))
    model, _ = models.load_model(folder, "stored", lazy=True)
    found = drift.measure(subject.base, subject.tuned, subject.see(model))
    kind = f"{options.bits}-bit fused model" if options.bits else "fused model"
    drift.require(found, options.max_drift, kind, str(options.fused), _advice(options))


def _advice(options: argparse.Namespace) -> str:
    if options.bits:
        return "leave --bits out (weights that are not quantized keep small changes), or --adapter"
    if options.dtype != "float32":
        return "add --dtype float32 (16 bits round small changes away), or --adapter"
    return "share the adapter itself: --adapter"


def _peft(subject: Subject, folder: Path, text: str, options: argparse.Namespace) -> None:
    from stages.commands.exporting import card, drift, peft_folder

    peft_folder.write(subject, folder)
    source = subject.manifest.source
    hub = source.kind == "hub" and subject.manifest.quantization is None
    card.write(folder, card.for_peft(text, source.repo if hub else "THE BASE MODEL"))
    if not hub:
        console.warn(
            f"PEFT needs the base as transformers reads it: {subject.manifest.name} is not named so"
            f" here; write its Hub id into {peft_folder.CONFIG} and README.md"
        )
    seen = peft_folder.see_by_formula(subject, folder)
    found = drift.measure(subject.base, subject.tuned, seen)
    fix = "share the adapter itself: --adapter"
    drift.require(found, options.max_drift, "PEFT adapter by its formula", str(options.peft), fix)
    if not peft_folder.installed():
        console.say("peft and torch are not installed: not loaded with PEFT itself")
        return
    try:
        base = peft_folder.torch_base(subject)
    except Exception as error:  # transformers raises whatever its readers raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        console.warn(f"not loaded with PEFT itself, since transformers refuses the base: {reason}")
        return
    alone, seen = peft_folder.see_by_peft(subject, folder, base)
    found = drift.measure(subject.base, subject.tuned, seen, alone)
    drift.require(found, options.max_drift, "adapter as PEFT loads it", str(options.peft), fix)

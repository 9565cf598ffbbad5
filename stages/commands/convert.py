"""Turn a configuration of mlx_lm.lora into an experiment: its YAML file, or its flags.

python -m stages convert lora_config.yaml
python -m stages convert -- --model mlx-community/NAME --data FOLDER --iters 600
python -m stages convert lora_config.yaml -- --iters 600        the flag wins, as in mlx-lm

Prints every old key with its new one, then the Hydra overrides (on stdout), and writes
conf/experiment/NAME.yaml. Memory settings are no part of an experiment: they are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from stages.commands.converting import given, preset
from stages.commands.converting.conversion import Conversion, word
from stages.commands.converting.translate import translate
from stages.core import console, entry, paths

WIDTH = 44


def main(argv: Sequence[str]) -> int:
    """Parse the line and convert; the exit status."""
    own = list(argv)
    flags: list[str] = []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    options = _parser().parse_args(own)
    return entry.guarded("convert", lambda: run(options, flags))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages convert", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "python -m stages convert [options] [FILE] [-- flags of mlx_lm.lora]"
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a YAML file")
    parser.add_argument("--name", help="of the experiment; default: the file's name")
    parser.add_argument("--revision", metavar="COMMIT", help="of a model on the Hub")
    parser.add_argument("--data-revision", metavar="COMMIT", help="of a data set on the Hub")
    return parser


def run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Convert, print the table, write the experiment.

    Raises:
        UserError: A key is unknown, a value cannot be used, or the experiment's name is taken.
    """
    said = given.read(options.file, flags)
    name = preset.name_of(options.name, said.file)
    found = translate(said, options.revision, options.data_revision)
    origin = said.file.name if said.file else "flags"
    file = preset.write(paths.here() / "conf", name, origin, found)
    _table(found)
    print("\n".join(found.overrides()))
    _next(found, name, file.relative_to(paths.here()).as_posix())


def _table(found: Conversion) -> None:
    console.say(f"{'mlx-lm':<{WIDTH}} samestep")
    for line in found.lines:
        first, *more = line.new
        if len(line.old) > WIDTH:
            console.say(line.old)
        console.say(f"{line.old if len(line.old) <= WIDTH else '':<{WIDTH}} {first}")
        for text in more:
            console.say(f"{'':<{WIDTH}} {text}")
        for note in line.notes:
            console.say(f"{'':<{WIDTH}}   {note}")


def _next(found: Conversion, name: str, file: str) -> None:
    console.say(f"\nwrote {file}")
    if found.todo:
        console.say("to do:")
        for line in found.todo:
            console.say(f"  {line}")
    console.say(f"run it:  dvc exp run -S experiment={name}")
    console.say(f"or make it the project's: experiment: {name} in conf/config.yaml, then dvc repro")
    words = " ".join(f"{key}={word(value)}" for key, value in found.machine.items())
    console.say(f"mlx-lm ran with {words}: for local.yaml, if auto does not suit you")

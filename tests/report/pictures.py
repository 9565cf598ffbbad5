"""Pictures of reports/report.html for docs/: `python -m tests.report.pictures` after `make repro`.

Needs a Chromium. Colours are cut to a palette, so that all of them together stay below 400 kB.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.report import browser

COLOURS = 64
MARGIN = 24
BOX = """(() => {{ const box = document.querySelector('{}').getBoundingClientRect();
  return [box.top + scrollY, box.bottom + scrollY]}})()"""
PICTURES = {
    "report.png": {
        "width": 1060,
        "dark": False,
        "scale": 1.25,
        "first": "body",
        "last": ".classes",
    },
    "training.png": {"width": 1060, "dark": False, "scale": 1.25, "first": "#training"},
    "phone.png": {"width": 390, "dark": True, "scale": 1.5, "first": "body", "most": 1100},
}
"""File → how wide the page is, and the elements that the picture begins and ends with."""


def take(page: Path, folder: Path) -> None:
    """Write every picture of a page."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        opened = browser.Browser(profile)
        for name, wanted in PICTURES.items():
            opened.open(page.resolve().as_uri(), wanted["width"], wanted["dark"])
            (folder / name).write_bytes(smaller(opened.picture(clip(opened, **wanted))))
            print(f"{folder / name}: {(folder / name).stat().st_size / 1e3:.0f} kB")
        opened.close()


def clip(opened, width, first, scale, last=None, most=None, **_):
    """The part of the page to show, for the browser."""
    top, bottom = opened.value(BOX.format(first))
    if last:
        bottom = opened.value(BOX.format(last))[1]
    top = max(0, top - MARGIN)
    high = min(bottom + MARGIN - top, most or bottom)
    return {"x": 0, "y": top, "width": width, "height": high, "scale": scale}


def smaller(picture: bytes) -> bytes:
    """The same PNG with few colours."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    few = image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    written = io.BytesIO()
    few.save(written, "PNG", optimize=True)
    return written.getvalue()


if __name__ == "__main__":
    words = [Path(word) for word in sys.argv[1:]]
    take(*words, *[Path("reports/report.html"), Path("docs/pictures")][len(words) :])

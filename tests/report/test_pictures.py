"""The pictures in docs/ are those of the command that CONTRIBUTING names, small and linked."""

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.report import browser, example, pictures

ROOT = Path(__file__).parents[2]


def test_every_picture_is_there_small_and_linked_from_the_readme():
    files = {file.name: file for file in (ROOT / "docs/pictures").glob("*")}
    assert set(files) == set(pictures.PICTURES)
    assert sum(file.stat().st_size for file in files.values()) < 400_000
    linked = re.findall(r"docs/pictures/(\w+\.png)", (ROOT / "README.md").read_text())
    assert set(linked) == set(files)
    for name, wanted in pictures.PICTURES.items():
        wide = Image.open(files[name]).width
        assert wide == round(wanted["width"] * wanted["scale"])


@pytest.mark.slow
@pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium on this machine")
def test_pictures_of_a_page(tmp_path, monkeypatch):
    from stages.report import inputs, page

    monkeypatch.chdir(tmp_path)
    example.write(tmp_path)
    Path("report.html").write_text(page.build(inputs.read(example.SETTINGS)), encoding="utf-8")
    pictures.take(Path("report.html"), tmp_path / "taken")
    light, dark = (Image.open(f"taken/{name}.png").convert("L") for name in ("report", "phone"))
    assert light.getpixel((3, 3)) > 240
    assert dark.getpixel((3, 3)) < 40
    assert light.height > 500

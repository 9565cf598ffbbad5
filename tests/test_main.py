"""`python -m stages` lists its commands and hands a line on to one of them."""

import sys
import types

import pytest

from stages import __main__ as stages_main


def test_help_lists_every_command_with_its_purpose(capsys):
    assert stages_main.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, file in stages_main.commands().items():
        purpose = stages_main._first_line(file)
        assert len(purpose.split()) >= 4, f"{file.name}: its docstring's first line is the help"
        assert len(purpose) <= 90, f"{file.name}: one line of help"
        assert f"  {name:<12} {purpose}" in printed


def test_help_imports_no_command(capsys, monkeypatch):
    monkeypatch.setattr(
        stages_main.importlib, "import_module", lambda name: pytest.fail(f"imported {name}")
    )
    stages_main.main(["--help"])


def test_no_command_shows_the_list_and_is_wrong(capsys):
    assert stages_main.main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_a_misspelt_command_names_the_nearest(capsys):
    assert stages_main.main(["docter"]) == 2
    assert "python -m stages doctor" in capsys.readouterr().err


def test_the_rest_of_the_line_and_the_status_go_through(monkeypatch):
    fake = types.ModuleType("stages.commands.clean_cache")
    fake.main = len
    monkeypatch.setitem(sys.modules, "stages.commands.clean_cache", fake)
    assert stages_main.main(["clean-cache", "a", "b", "c"]) == 3

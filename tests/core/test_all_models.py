"""Every architecture of mlx-lm that a small random model can be made of; prints docs/models.md."""

import sys

import pytest

from tests.core import model_census as census

QUICK = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "cohere2",
    "granite",
    "olmo3",
    "mistral3",
)


@pytest.mark.slow
def test_at_least_90_architectures_work_and_the_page_says_which():
    """About 80 s of computing on each of two cores."""
    found = census.census()
    tried = [name for name, verdict in found.items() if not verdict["model"]]
    good = [name for name in tried if census.works(found[name])]
    bad = {name: found[name] for name in QUICK if name not in good}
    assert not bad
    assert len(good) >= 90, {name: found[name] for name in tried if name not in good}
    page = census.document(found)
    print(page)
    written = census.DOCUMENT.read_text(encoding="utf-8") if census.DOCUMENT.exists() else ""
    # With Metal, architectures that have Metal kernels only are tried as well.
    assert sys.platform != "linux" or page == written, (
        "docs/models.md is old: run `python -m tests.core.model_census`"
    )


def test_a_process_that_dies_costs_one_architecture(monkeypatch):
    """The second of three kills its process; the third goes to a new one."""
    script = (
        "import json, os, sys\n"
        "for name in sys.argv[2:]:\n"
        "    print('begun ' + name, flush=True)\n"
        "    name == 'b' and os.kill(os.getpid(), 9)\n"
        "    print('result ' + json.dumps({'model': ''}), flush=True)\n"
    )
    real = census.subprocess.Popen

    def process(command, **rest):
        return real([command[0], "-c", script, *command[3:]], **rest)

    monkeypatch.setattr(census.subprocess, "Popen", process)
    monkeypatch.setattr(census, "PROCESSES", 1)
    found = census.census(["a", "b", "c"])
    assert found == {
        "a": {"model": ""},
        "b": {"model": "the process that tries it crashes"},
        "c": {"model": ""},
    }


def test_the_page_tells_what_is_off_and_why():
    fine = {"model": "", "note": "", **dict.fromkeys(census.SETTINGS, "")}
    found = {
        "fine": fine,
        "half": {**fine, "note": "give keys", "activation cache": "a | b"},
        "none": {"model": "no Metal"},
    }
    page = census.document(found)
    assert "each of the 3 architectures" in page and "**1 of 2**" in page
    assert "\nfine.\n" in page
    assert "| half | activation cache | a \\| b |" in page
    assert "- half: give keys" in page and "| none | no Metal |" in page

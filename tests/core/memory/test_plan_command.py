"""`python -m stages plan`: a table and JSON, exit 2 with numbers where nothing fits."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from machines import MANIFEST, PaperSurveyor

from stages.commands import plan
from stages.core import files, tables
from stages.core.memory import choose

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder after the validate stage, on the paper machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choose, "Surveyor", PaperSurveyor)
    draw = np.random.default_rng(0)
    for split, count in (("train", 40), ("valid", 4)):
        lengths = draw.integers(20, 500, size=count).tolist()
        rows = {
            "example": list(range(count)),
            "row": list(range(count)),
            "piece": [0] * count,
            "tokens": [[1] * n for n in lengths],
            "target_mask": [[place >= 5 for place in range(n)] for n in lengths],
        }
        with tables.writing(tmp_path / f"data/examples/{split}.parquet", tables.EXAMPLES) as writer:
            writer.write_table(pa.table(rows, schema=tables.EXAMPLES))
    files.write_json(tmp_path / "data/model.json", replace(MANIFEST, name="paper").record())
    (tmp_path / "params.yaml").write_text(
        "model: {repo: 'builtin:tiny'}\ntrain: {updates: 5, effective_batch_size: 8}\n"
    )
    return tmp_path


def test_a_table_for_a_person(workspace, capsys):
    assert plan.main(["memory.budget_gb=2"]) == 0
    text = capsys.readouterr().err
    for word in ("What each setting saves and costs", "→ chosen", "recompute all layers", "budget"):
        assert word in text
    assert "memory.budget_gb=2" in text
    assert "widths" in text
    assert (workspace / ".cache/plans/peak.svg").exists()


def test_json_alone_on_stdout(workspace, capsys):
    assert plan.main(["--json", "memory.budget_gb=2", "memory.grad_checkpoint=true"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["plan"]["recompute"] == 1
    assert record["budget"] == {"gb": 2.0, "reason": "memory.budget_gb=2"}
    assert sum(row["chosen"] for row in record["settings"]) == 1


def test_a_refusal_ends_with_2_and_the_numbers(workspace, capsys):
    assert plan.main(["memory.budget_gb=0.2"]) == 2
    text = capsys.readouterr().err
    assert "No plan fits the memory budget" in text
    assert "GB more" in text
    assert "split.max_seq_length=" in text
    assert "Traceback" not in text
    assert files.read_json(workspace / ".cache/last_error.json")["status"] == 2


def test_mathematics_is_no_argument(workspace, capsys):
    assert plan.main(["train.num_layers=2"]) == 2
    assert "memory.* and run.* only" in capsys.readouterr().err


def test_the_blas_can_still_be_loaded_when_the_command_starts():
    code = "import sys, stages.commands.plan; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=REPOSITORY).returncode == 0


def test_mlx_lms_own_way_is_a_preset():
    from omegaconf import OmegaConf

    from stages.core.config.settings import to_settings

    preset = OmegaConf.load(REPOSITORY / "conf/memory/mlx_lm.yaml")
    from stages.core.config.schema import Settings

    made = OmegaConf.merge(
        OmegaConf.structured(Settings),
        {"memory": preset, "model": {"repo": "builtin:tiny"}, "train": {"updates": 1}},
    )
    memory = to_settings(made).memory
    assert (memory.batch_size, memory.grad_checkpoint, memory.loss_chunk) == (4, False, "off")
    assert (memory.attention_block, memory.activation_cache) == ("off", "off")

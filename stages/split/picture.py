"""How long the rows are, with the cap: `reports/lengths.png`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stages.core import files

BINS = 60
WIDTH, HEIGHT, DPI = 7.2, 3.6, 110


def draw(path: Path, lengths: dict[str, np.ndarray], cap: int) -> None:
    """Draw a histogram of the rows' tokens per split, on a logarithmic axis where they vary much.

    Args:
        path: The PNG.
        lengths: For each split, tokens of its rows before the cut.
        cap: `split.max_seq_length`.
    """
    from matplotlib.figure import Figure

    drawn = {name: values for name, values in lengths.items() if len(values)}
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    longest = max([cap, *(int(values.max()) for values in drawn.values())])
    least = min([cap, *(int(values.min()) for values in drawn.values())])
    logarithmic = longest > 20 * max(least, 1)
    edges = np.linspace(0, longest, BINS + 1)
    if logarithmic:
        edges = np.geomspace(max(least, 1), longest + 1, BINS + 1)
        axes.set_xscale("log")
    for name, values in drawn.items():
        over = float((values > cap).mean())
        label = f"{name}: {len(values)} rows, {over:.1%} over the cap"
        axes.hist(values, bins=edges, histtype="stepfilled", alpha=0.5, label=label)
    axes.axvline(cap, color="black", linestyle="--", linewidth=1, label=f"cap {cap}")
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel("rows")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    with files.replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})

"""Peak memory over the length of an example, for several ways of computing, as an SVG file."""

from __future__ import annotations

from pathlib import Path

from stages.core import files
from stages.core.memory import table
from stages.core.memory.choose import Choice

POINTS = 24


def draw(choice: Choice, path: Path) -> None:
    """Draw peak over length with the budget as a line; appears whole."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    longest = choice.case.work.longest
    lengths = sorted({max(2, round(2 * longest * i / POINTS)) for i in range(1, POINTS + 1)})
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, values in table.curves(choice, lengths).items():
        axes.plot(lengths, values, label=name, linewidth=2.5 if name.startswith("chosen") else 1.2)
    axes.axhline(choice.budget.gb, color="black", linestyle="--", label="budget")
    axes.axvline(longest, color="grey", linestyle=":", label=f"longest example: {longest}")
    axes.set(xlabel="tokens of one example", ylabel="predicted peak, GB")
    axes.set_title("Peak memory over length, one example at a time")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.tight_layout()
    with files.replacing(path) as temporary:
        figure.savefig(temporary, format="svg")
    pyplot.close(figure)

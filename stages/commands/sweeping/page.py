"""The page of a sweep: leaderboard, parallel coordinates, loss against each key, failures.

One file with everything inside, in the style of the run's own report; no script, no request.
"""

from __future__ import annotations

import pandas as pd

from stages.commands.sweeping import pictures, results
from stages.commands.sweeping.points import Sweep, short
from stages.report import page as report
from stages.report import words
from stages.report.html import Markup, facts, join, table, tag
from stages.report.section import Section, notice

MOST_ROWS = 20
"""Points of the leaderboard that are shown at once."""


def build(sweep: Sweep, points: pd.DataFrame) -> str:
    """The whole page as HTML text."""
    best = results.ranked(points)
    keys = results.varied(points) or results.overridden(points)
    sections = [leaderboard(best, keys), coordinates(best, keys), each_key(best, keys)]
    if len(best) < len(points):
        sections.append(rest(points, keys))
    sections.append(how(sweep, points, keys))
    title = f"Sweep {sweep.name}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=report.POLICY),
        tag("title", f"{title} · samestep"),
        tag("style", Markup(report.STYLE.read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        masthead(title, points, best, keys),
        report.contents(sections),
        report.main(sections),
        report.footer(),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def masthead(title: str, points: pd.DataFrame, best: pd.DataFrame, keys: list[str]) -> Markup:
    """How many points, and which one is best."""
    count = words.plural(len(points), "point")
    return tag(
        "header",
        tag("p", "samestep", " · ", "sweep", class_="overline"),
        tag("h1", title),
        tag("p", f"{count} over {', '.join(short(keys))}. ", verdict(best, keys), class_="lede"),
    )


def verdict(best: pd.DataFrame, keys: list[str]) -> str:
    """The best point in a sentence, and how far apart the points are."""
    if best.empty:
        return "None is done yet."
    first = best.iloc[0]
    at = ", ".join(
        f"{name} = {cell(first[key])}" for name, key in zip(short(keys), keys, strict=True)
    )
    told = f"The lowest loss is {first['tuned_loss']:.4f} nats, at {at}"
    if len(best) == 1:
        return told + "."
    spread = best["tuned_loss"].iloc[-1] - first["tuned_loss"]
    return f"{told}; the highest is {spread:.4f} above it."


def leaderboard(best: pd.DataFrame, keys: list[str]) -> Section:
    """The finished points, the lowest loss first."""
    if best.empty:
        return Section("leaderboard", "Leaderboard", notice("info", "No point is done yet."))
    columns = ["experiment", *short(keys), "loss", "change", "95% interval", "peak", "training"]
    rows = [
        [
            row["experiment"],
            *(cell(row[key]) for key in keys),
            words.nats(row["tuned_loss"]),
            words.signed(row["loss_change"]),
            f"{words.signed(row['loss_change_low'], 3)} to "
            f"{words.signed(row['loss_change_high'], 3)}",
            words.gb(row["peak_gb"]),
            words.seconds(row["train_seconds"]),
        ]
        for _, row in best.iterrows()
    ]
    lead = (
        "Loss of the tuned model on the evaluated split, in nats per target, and its change from"
        " the base model. Intervals of two points may overlap: then the order says little."
    )
    body = [table(columns, rows[:MOST_ROWS])]
    if len(rows) > MOST_ROWS:
        summary = tag("summary", f"the other {len(rows) - MOST_ROWS}")
        body.append(tag("details", summary, table(columns, rows[MOST_ROWS:])))
    return Section("leaderboard", "Leaderboard", join(body), lead)


def coordinates(best: pd.DataFrame, keys: list[str]) -> Section:
    """All keys at once."""
    if len(best) < 2:
        return Section("coordinates", "All keys", notice("info", "It takes two finished points."))
    return Section("coordinates", "All keys", pictures.parallel(best, keys))


def each_key(best: pd.DataFrame, keys: list[str]) -> Section:
    """One key at a time."""
    if len(best) < 2:
        return Section("keys", "Each key", notice("info", "It takes two finished points."))
    figures = [pictures.against(best, key) for key in keys]
    lead = (
        "A dot is a point; the lowest of each value is strong, and joined where values are numbers."
    )
    return Section("keys", "Each key", tag("div", *figures, class_="grid2"), lead)


def rest(points: pd.DataFrame, keys: list[str]) -> Section:
    """What is not done, and why."""
    unfinished = points[points["state"] != "done"]
    rows = [
        [
            ", ".join(f"{key}={cell(row[key])}" for key in keys),
            row["state"],
            row["reason"] or words.NONE,
        ]
        for _, row in unfinished.iterrows()
    ]
    body = table(["point", "state", "why"], rows, text_columns=(0, 1, 2), class_="wrap")
    return Section("rest", "Not done", body)


def how(sweep: Sweep, points: pd.DataFrame, keys: list[str]) -> Section:
    """How to take a point, and what is the same for all."""
    same = [key for key in results.overridden(points) if key not in keys]
    listing = facts(
        [(key, cell(points[key].iloc[0])) for key in same]
        + [("code", f"{len(sweep.code)} files, the same for all points")]
    )
    first = results.ranked(points)["experiment"]
    name = first.iloc[0] if len(first) else "EXPERIMENT"
    commands = tag("pre", tag("code", f"python -m stages sweep --apply {name}\ndvc exp show"))
    lead = "Each point is a DVC experiment; this takes one into the workspace and into conf/."
    return Section("take", "Take a point", join([commands, listing]), lead)


def cell(value: object) -> str:
    """A value of a key."""
    if isinstance(value, float):
        return words.NONE if pd.isna(value) else f"{value:g}"
    return words.NONE if value is None else str(value)

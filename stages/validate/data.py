"""Checks of the data: enough examples, what was lost on the way, repeats and leaks.

What a stored check says must not change with a setting that training does not depend on, since
train depends on `reports/validate.json`: thresholds stand in errors only, which are never stored,
and a test set without anything to say about it shows no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from stages.core.config.schema import Settings
from stages.core.tables import SPLITS
from stages.validate.check import ERROR, WARNING, Check, places
from stages.validate.facts import Facts


def checks(facts: Facts, settings: Settings) -> Iterator[Check]:
    """All checks of the data."""
    yield train_examples(facts, settings)
    yield valid_examples(facts, settings)
    yield test_examples(facts, settings)
    yield without_target(facts)
    yield rejected(facts, "collect", "rows_refused", "data.on_bad_row=drop left rows out")
    yield rejected(facts, "tokenize", "rows_without_target", "rows have no target and are left out")
    yield targets_lost(facts, settings)
    yield end_tokens_lost(facts)
    yield ends_of_turns(facts)
    yield template_tags(facts)
    yield duplicates(facts)
    yield leaks(facts, settings)


def train_examples(facts: Facts, settings: Settings) -> Check:
    """D1: train must fill one effective batch."""
    name, count = "train_examples", facts.counts["train"].examples
    batch = settings.train.effective_batch_size
    if count == 0:
        fix = "look at reports/collect.json, tokenize.json and split.json: where did rows go?"
        return Check(name, ERROR, "train has no examples", 0, f"at least {batch}", fix)
    if count >= batch:
        return Check(name, found=count, expected=f"at least {batch}")
    return Check(
        name,
        ERROR,
        f"train examples below the effective batch: {count} of {batch}",
        found=count,
        expected=f"at least train.effective_batch_size={batch}",
        fix=f"set train.effective_batch_size to {count} or less, or add rows",
    )


def valid_examples(facts: Facts, settings: Settings) -> Check:
    """D1: a short valid set is used whole; an empty one means no best adapter, no patience."""
    name, count = "valid_examples", facts.counts["valid"].examples
    if count == 0 and settings.evaluate.split == "valid":
        return _nothing_to_evaluate(name, "valid")
    if count == 0:
        return Check(
            name,
            WARNING,
            "valid is empty: no validation loss, no best adapter, no patience",
            found=0,
            expected="at least 1 example",
            fix="give data.shares.valid a share, or add a file for valid",
        )
    return Check(name, message=_short("valid", count, settings), found=count)


def test_examples(facts: Facts, settings: Settings) -> Check:
    """D1: an empty test set is an error, for evaluate would have nothing to measure."""
    name, count = "test_examples", facts.counts["test"].examples
    if count == 0 and settings.evaluate.split == "test":
        return _nothing_to_evaluate(name, "test")
    if count == 0:
        return Check(name, WARNING, "test is empty", found=0, expected="at least 1 example")
    return Check(name, message=_short("test", count, settings))


def _nothing_to_evaluate(name: str, split: str) -> Check:
    other = "valid" if split == "test" else "test"
    return Check(
        name,
        ERROR,
        f"{split} is empty: nothing to evaluate on",
        found=0,
        expected="at least 1 example",
        fix=f"give data.shares.{split} a share, add a file for {split}, or set "
        f"evaluate.split={other}",
    )


def _short(split: str, count: int, settings: Settings) -> str:
    batch = settings.train.effective_batch_size
    if count >= batch:
        return ""
    which = "1 example, and it is" if count == 1 else f"{count} examples, and all are"
    return f"{split} has {which} used, though that is below the effective batch of {batch}"


def without_target(facts: Facts) -> Check:
    """G9: an example that trains nothing must not exist."""
    bad = {name: counts.without_target for name, counts in facts.counts.items()}
    found = ", ".join(f"{name} {number}" for name, number in bad.items() if number)
    if not found:
        return Check("examples_without_target")
    return Check(
        "examples_without_target",
        ERROR,
        "examples without any target would train nothing",
        found=found,
        expected=0,
        fix="run `dvc repro -f split`",
    )


def rejected(facts: Facts, stage: str, name: str, message: str) -> Check:
    """Rows that a stage left out, with their lines."""
    splits = getattr(facts, stage)["splits"]
    out = {split: splits[split].get("rejected", []) for split in SPLITS}
    found = [f"{split}: {len(rows)} ({places(rows)})" for split, rows in out.items() if rows]
    if not found:
        return Check(name)
    reasons = sorted({str(row["reason"]) for rows in out.values() for row in rows})[:3]
    return Check(name, WARNING, message, "; ".join(found), 0, "; ".join(reasons))


def targets_lost(facts: Facts, settings: Settings) -> Check:
    """D2: what the split policy cost, refused above `split.max_target_loss`."""
    shares = {}
    for name, counts in facts.split["splits"].items():
        lost, kept = counts["targets_lost"], counts["targets"]
        if lost:
            shares[name] = (lost / (lost + kept), counts)
    if not shares:
        return Check("targets_lost")
    found = "; ".join(
        f"{name}: {counts['targets_lost']} targets ({share:.2%}), {counts['rows_truncated']} rows "
        f"cut, {counts['rows_dropped']} dropped"
        for name, (share, counts) in shares.items()
    )
    policy, most = settings.split.policy, settings.split.max_target_loss
    over = any(share > most for share, _ in shares.values())
    return Check(
        "targets_lost",
        ERROR if over else WARNING,
        f"split.policy={policy} loses targets",
        found=found,
        expected=f"at most split.max_target_loss={most:.2%} of a split's targets" if over else "",
        fix="set split.policy=split, which loses none, or raise split.max_seq_length"
        + (" or split.max_target_loss" if over else ""),
    )


def end_tokens_lost(facts: Facts) -> Check:
    """D2: rows cut before their end token teach a model not to stop."""
    lost = [
        f"{name}: {counts['end_tokens_lost']} of {counts['rows_in']} rows"
        for name, counts in facts.split["splits"].items()
        if counts["end_tokens_lost"]
    ]
    if not lost:
        return Check("end_tokens_lost")
    fix = "set split.policy=split, keep_completion or truncate_start"
    message = "rows lose their end token: the model may not learn to stop"
    return Check("end_tokens_lost", WARNING, message, "; ".join(lost), 0, fix)


def ends_of_turns(facts: Facts) -> Check:
    """Whether train rows end in an end-of-turn target."""
    forms = facts.tokenize["splits"]["train"].get("forms", {})
    short = [
        f"{form}: {counts['ends_in_target']:.1%} of {counts['rows']} rows"
        for form, counts in forms.items()
        if counts["ends_in_target"] < 1
    ]
    if not short or facts.tokenize.get("end_token") == "never":
        return Check("ends_of_turns")
    return Check(
        "ends_of_turns",
        WARNING,
        "train rows do not all end in an end token that is a target: the model may not stop there",
        found="; ".join(short),
        expected="100%",
        fix="chats that end in a question train nothing of it; where the chat template writes no "
        "end token, set tokenize.end_token=always",
    )


def template_tags(facts: Facts) -> Check:
    """Text that the tokenizer reads as a turn's border."""
    found = []
    for split, counts in facts.tokenize["splits"].items():
        tags = counts.get("template_tags", {"rows": 0})
        if tags["rows"]:
            rows = [row for rows in tags["examples"].values() for row in rows]
            words = ", ".join(tags["examples"])
            found.append(f"{split}: {tags['rows']} rows, {words} ({places(rows)})")
    if not found:
        return Check("template_tags")
    message = "rows hold template tags as text, which are read as a turn's border"
    fix = "take them out of the source, or give the rows as chats"
    return Check("template_tags", WARNING, message, "; ".join(found), 0, fix)


def duplicates(facts: Facts) -> Check:
    """Rows that stand in one split more than once."""
    found = []
    for split, counts in facts.collect["splits"].items():
        number = counts.get("duplicate_rows", 0)
        if number:
            found.append(f"{split}: {number} ({places(counts.get('duplicates', []))})")
    if not found:
        return Check("duplicates")
    message = "rows repeat an earlier one exactly, and count more than once"
    return Check("duplicates", WARNING, message, "; ".join(found), 0, "take out repeats")


def leaks(facts: Facts, settings: Settings) -> Check:
    """D9: rows of valid or test that also stand in train."""
    found, over = [], False
    for split, number in facts.collect.get("leaked_rows", {}).items():
        if not number:
            continue
        share = number / max(1, facts.collect["splits"][split]["rows_out"])
        over |= settings.data.max_leak is not None and share > settings.data.max_leak
        rows = [leak for leak in facts.collect.get("leaks", []) if leak["split"] == split]
        found.append(f"{split}: {number} rows ({share:.2%}; {places(rows)})")
    if not found:
        return Check("leaks")
    return Check(
        "leaks",
        ERROR if over else WARNING,
        "rows of valid or test also stand in train: their losses are no measure of new data",
        found="; ".join(found),
        expected=f"at most data.max_leak={settings.data.max_leak:.2%}" if over else 0,
        fix="take them out of train or of the other split",
    )

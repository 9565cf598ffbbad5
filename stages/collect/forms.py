"""Which form a row has, decided by its keys alone, and its record in the one schema.

The rule, the same for every row and for the header of a table:

1. `data.columns` and `data.format` decide where they are set.
2. `messages` (or `conversations`, `conversation`) make a chat; a prompt with an answer make a
   completion; `instruction` (+ `input`) with an answer is Alpaca's way to say that.
3. `text` gives way to the forms of 2, since they know where the answer begins; the report says so.
4. Anything else that fits twice (two names for the answer, a chat and a completion) is ambiguous
   and refused, naming the keys. Keys no form needs are not trained, and counted in the report.

Records: text → `{"text"}`; completion and Alpaca → `{"prompt", "completion", "system"?}`; chat and
ShareGPT → `{"messages", "tools"?}`. A completion with tools becomes a chat.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.collect import chats
from stages.collect.badrow import BadRow
from stages.collect.jsontext import kind_of, read_value

CHATS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "query", "instruction")
INPUTS = ("input", "context")
ANSWERS = ("completion", "response", "answer", "output")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
OPTIONAL = ("system", "tools", "history")
SLOTS = ("text", "prompt", "input", "completion", "system", "messages", "tools")
KNOWN = ("text", *CHATS, *PROMPTS, *INPUTS, *ANSWERS, *MEDIA, *OPTIONAL)

EXPECTED = (
    "text; prompt and completion (or response, answer); instruction, input and output;"
    " messages; conversations"
)


@dataclass(frozen=True)
class Rules:
    """What the settings say about forms: `data.format` and `data.columns`."""

    format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()

    def column(self, slot: str) -> str | None:
        """The column the user named for a slot."""
        return dict(self.columns).get(slot)


@dataclass(frozen=True)
class Plan:
    """How rows with certain keys are read.

    Attributes:
        form: text, completion, alpaca or chat.
        slots: Slot → key of the row.
        unused: Keys that are not trained.
        outvoted: Keys of another form that also fits (rule 3), or ().
    """

    form: str
    slots: Mapping[str, str]
    unused: tuple[str, ...] = ()
    outvoted: tuple[str, ...] = ()

    def describe(self) -> str:
        """The mapping in one line."""
        slots = dict(self.slots)
        prompt = " + ".join([slots.pop(slot) for slot in ("prompt", "input") if slot in slots])
        parts = [f"{prompt} → prompt"] if prompt else []
        return ", ".join([*parts, *(f"{key} → {slot}" for slot, key in slots.items())])


@dataclass
class Record:
    """A normalized row: its kind, its record, the form it had, and whether it holds numbers."""

    kind: str
    record: dict[str, Any]
    form: str
    numbers: bool = False
    characters: int = 0
    seen: Counter[str] = field(default_factory=Counter)


@functools.lru_cache(maxsize=4096)
def plan(keys: tuple[str, ...], rules: Rules) -> Plan:
    """Decide how rows with these keys (that are not null) are read.

    Raises:
        BadRow: They fit no form, fit two, or not the one of `data.format`.
    """
    named = dict(rules.columns)
    missing = [column for column in named.values() if column not in keys]
    optional = {named.get(slot) for slot in (*OPTIONAL, "input")}
    if any(column not in optional for column in missing):
        raise BadRow(f"no column {', '.join(map(repr, missing))}; found {_names(keys)}")
    wanted = _wanted(rules)
    fits = _fitting(keys, rules, wanted)
    if not fits:
        asked = wanted if rules.format == "auto" else rules.format
        raise BadRow(f"not of the form {asked}: {_names(keys)}" if wanted else _no_form(keys))
    outvoted = tuple(fits.pop("text").values()) if len(fits) > 1 and "text" in fits else ()
    if len(fits) > 1:
        both = sorted(key for slots in fits.values() for key in slots.values())
        raise BadRow(
            f"ambiguous: {_names(both)} fit two forms ({', '.join(fits)});"
            " set data.format or data.columns"
        )
    form, slots = next(iter(fits.items()))
    slots = slots | _optional(keys, rules, form)
    used = {*slots.values(), *outvoted, *MEDIA}
    return Plan(form, slots, tuple(key for key in keys if key not in used), outvoted)


def _wanted(rules: Rules) -> str | None:
    """The form the settings ask for, or None."""
    if rules.format != "auto":
        return "chat" if rules.format == "sharegpt" else rules.format
    for slot, form in (
        ("messages", "chat"),
        ("prompt", "completion"),
        ("completion", "completion"),
    ):
        if rules.column(slot):
            return form
    return "text" if rules.column("text") else None


def _fitting(keys: tuple[str, ...], rules: Rules, wanted: str | None) -> dict[str, dict[str, str]]:
    """Every form the keys fit, with its slots; only the wanted one where there is one."""
    fits: dict[str, dict[str, str]] = {}
    text = rules.column("text") or "text"
    if text in keys and wanted in (None, "text"):
        fits["text"] = {"text": text}
    chat = _candidates("messages", CHATS, keys, rules)
    if chat and wanted in (None, "chat"):
        fits["chat"] = {"messages": _only(chat, "the chat")}
    if wanted in (None, "completion", "alpaca"):
        slots = _prompt_and_answer(keys, rules)
        form = "alpaca" if slots.get("prompt") == "instruction" else "completion"
        if slots and wanted in (None, form):
            fits[form] = slots
    return fits


def _prompt_and_answer(keys: tuple[str, ...], rules: Rules) -> dict[str, str]:
    """The slots of a completion, {} where prompt or answer is missing."""
    prompts = _candidates("prompt", PROMPTS, keys, rules)
    answers = _candidates("completion", ANSWERS, keys, rules)
    inputs = _candidates("input", INPUTS, keys, rules)
    if not prompts and "input" in inputs:
        prompts, inputs = ["input"], [name for name in inputs if name != "input"]
    if not prompts or not answers:
        return {}
    slots = {"prompt": _only(prompts, "the prompt")}
    if inputs and slots["prompt"] != "instruction" and not rules.column("prompt"):
        raise _ambiguous([slots["prompt"], *inputs], "the prompt")
    if inputs and (slots["prompt"] == "instruction" or rules.column("input")):
        slots["input"] = _only(inputs, "the input")
    return slots | {"completion": _only(answers, "the answer")}


def _candidates(
    slot: str, names: tuple[str, ...], keys: tuple[str, ...], rules: Rules
) -> list[str]:
    """The keys that could fill a slot: the one the user named, or the usual names."""
    named = rules.column(slot)
    if named:
        return [named] if named in keys else []
    taken = {column for _, column in rules.columns}
    return [name for name in names if name in keys and name not in taken]


def _only(found: list[str], what: str) -> str:
    if len(found) > 1:
        raise _ambiguous(found, what)
    return found[0]


def _ambiguous(found: list[str], what: str) -> BadRow:
    names = ", ".join(repr(name) for name in found)
    return BadRow(f"ambiguous: {names} could each be {what}; set data.columns")


def _optional(keys: tuple[str, ...], rules: Rules, form: str) -> dict[str, str]:
    """System, tools and Alpaca's history, where they stand beside a form that can take them."""
    allowed = {"text": (), "chat": ("system", "tools"), "completion": ("system", "tools")}
    found = {}
    for slot in allowed.get(form, OPTIONAL):
        key = rules.column(slot) or slot
        if key in keys:
            found[slot] = key
    return found


def _names(keys: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(key[:40] for key in keys[:12])
    return f"keys {shown or '(none)'}" + (f" and {len(keys) - 12} more" if len(keys) > 12 else "")


def _no_form(keys: tuple[str, ...]) -> str:
    if {"chosen", "rejected"} <= set(keys):
        return f"{_names(keys)}: preference pairs are not supported, only supervised rows"
    return f"{_names(keys)} fit no form (expected {EXPECTED}; or set data.columns)"


def record(row: dict[str, Any], rules: Rules) -> tuple[Record, Plan]:
    """Normalize one row.

    Raises:
        BadRow: It fits no form, or a value in it cannot be used.
    """
    keys = tuple(key for key, value in row.items() if value is not None)
    try:
        how = plan(keys, rules)
    except BadRow as bad:
        known = {*KNOWN, *(column for _, column in rules.columns)}
        null = [key for key in row if row[key] is None and key in known]
        raise BadRow(f"{', '.join(null)} is null: {bad.reason}" if null else bad.reason) from None
    for key in MEDIA:
        if row.get(key):
            raise BadRow(f"{key}: only text can be trained")
    made = {"text": _text, "chat": _chat}.get(how.form, _completion)(row, how, rules)
    return made, how


def _text(row: dict[str, Any], how: Plan, _rules: Rules) -> Record:
    text = _string(row, how.slots["text"])
    if not text.strip():
        raise BadRow(_blank(how.slots["text"], text))
    return Record("text", {"text": text}, "text", characters=len(text))


def _string(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if isinstance(value, str):
        return value
    raise BadRow(f"{key} is {kind_of(value)}, text was expected")


def _blank(key: str, value: str) -> str:
    return f"{key} holds only white space" if value else f"{key} is empty"


def _completion(row: dict[str, Any], how: Plan, _rules: Rules) -> Record:
    """Prompt and completion, also Alpaca's; with tools or a history it is a chat."""
    slots = how.slots
    prompt, answer = _string(row, slots["prompt"]), _string(row, slots["completion"])
    more = _string(row, slots["input"]) if "input" in slots else ""
    if more.strip():
        prompt = f"{prompt}\n{more}" if prompt.strip() else more
    if not prompt.strip():
        raise BadRow(_blank(slots["prompt"], prompt))
    if not answer.strip():
        raise BadRow(_blank(slots["completion"], answer))
    system = _string(row, slots["system"]) if "system" in slots else ""
    tools = chats.tools(row.get(slots.get("tools", "")), "tools")
    history = _history(row.get(slots.get("history", "")))
    characters = len(prompt) + len(answer) + len(system)
    if not tools and not history:
        found = {"prompt": prompt, "completion": answer}
        found |= {"system": system} if system.strip() else {}
        return Record("completion", found, how.form, characters=characters)
    turns = [{"role": "system", "content": system}] if system.strip() else []
    turns += [*history, {"role": "user", "content": prompt}]
    found = {"messages": [*turns, {"role": "assistant", "content": answer}]}
    found |= {"tools": tools} if tools else {}
    return Record("chat", found, how.form, numbers=bool(tools), characters=characters)


def _history(value: Any) -> list[dict[str, str]]:
    """Earlier rounds as LLaMA-Factory keeps them: [[question, answer], …]."""
    if isinstance(value, str):
        value = read_value(value, "history") if value.strip() else None
    if not isinstance(value or [], list):
        raise BadRow(f"history is {kind_of(value)}, a list was expected")
    turns = []
    for pair in value or []:
        if not (
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
        ):
            raise BadRow("history is not a list of [question, answer] pairs")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _chat(row: dict[str, Any], how: Plan, rules: Rules) -> Record:
    seen: Counter[str] = Counter()
    key = how.slots["messages"]
    messages = chats.turns(row[key], key, seen)
    sharegpt = "ShareGPT turns" in seen
    if rules.format in ("chat", "sharegpt") and sharegpt != (rules.format == "sharegpt"):
        found = "from/value (sharegpt)" if sharegpt else "role/content (chat)"
        raise BadRow(f"not of the form {rules.format}: turns with {found}")
    tools_key = how.slots.get("tools", "tools")
    tools = chats.tools(row.get(tools_key), tools_key) if "tools" in how.slots else []
    system = _string(row, how.slots["system"]) if "system" in how.slots else ""
    if system.strip():
        if messages[0]["role"] == "system":
            raise BadRow(f"a system turn in {key} and a {how.slots['system']} beside it")
        messages = [{"role": "system", "content": system}, *messages]
    found = {"messages": messages} | ({"tools": tools} if tools else {})
    numbers = bool(tools or seen["turns that call tools"])
    characters = sum(len(turn["content"]) for turn in messages)
    form = "sharegpt" if sharegpt else "chat"
    return Record("chat", found, form, numbers, characters, seen)

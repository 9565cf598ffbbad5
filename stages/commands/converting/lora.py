"""`lora_parameters`, today's and those of 2024 with `alpha`."""

from __future__ import annotations

from typing import Any

from stages.commands.converting.conversion import Conversion, word
from stages.commands.converting.given import Given, as_number, refuse_unknown, wrong
from stages.commands.converting.keys import DEFAULTS, VERSION

KEYS = ("rank", "scale", "dropout", "keys")
STOPS = "mlx-lm stops without it; its default is taken"


def convert(given: Given, found: Conversion, kind: str) -> None:
    """Translate `lora_parameters`.

    Args:
        kind: The fine-tune type; mlx-lm ignores them for `full`, and so does this project.

    Raises:
        UserError: A key is unknown, or a value cannot be used.
    """
    lora = given.group("lora_parameters") if given.said("lora_parameters") else {}
    refuse_unknown("lora_parameters.", lora, (*KEYS, "alpha"), "lora_parameters")
    whole = {**DEFAULTS["lora_parameters"], "keys": None, **lora}
    if isinstance(whole["rank"], bool) or not isinstance(whole["rank"], int) or whole["rank"] < 1:
        raise wrong("lora_parameters.rank", whole["rank"], "a whole number of at least 1")
    keys = whole["keys"]
    if keys is not None and not (isinstance(keys, list) and all(isinstance(k, str) for k in keys)):
        raise wrong("lora_parameters.keys", keys, "a list of module paths")
    whole["dropout"] = as_number("lora_parameters.dropout", whole["dropout"])
    ignored = "ignored for full, by mlx-lm too" if kind == "full" and lora else ""
    for key in KEYS:
        old = _told(key, whole[key], key in lora)
        value, note = whole[key], STOPS if lora and key not in ("keys", *lora) else ""
        if key == "scale":
            value = as_number("lora_parameters.scale", value)
            if "alpha" in lora:
                old, value, note = _with_alpha(lora, whole["rank"])
        found.add(old, {f"train.lora_parameters.{key}": value}, note, ignored)


def _told(key: str, value: Any, said: bool) -> str:
    return f"lora_parameters.{key}: {word(value)}" + ("" if said else " (mlx-lm's default)")


def _with_alpha(lora: dict[str, Any], rank: int) -> tuple[str, float, str]:
    """mlx-lm of March 2024 took scale · alpha / rank; alpha alone is meant as alpha / rank."""
    alpha = as_number("lora_parameters.alpha", lora["alpha"])
    old = f"lora_parameters.alpha: {word(alpha)}"
    if "scale" not in lora:
        return old, alpha / rank, f"alpha / rank; mlx-lm {VERSION} stops at alpha without scale"
    scale = as_number("lora_parameters.scale", lora["scale"])
    note = (
        "scale · alpha / rank, as mlx-lm had it when alpha was a key;"
        f" mlx-lm {VERSION} ignores alpha and takes {scale:g}"
    )
    return f"{_told('scale', scale, True)}, {old}", scale * alpha / rank, note

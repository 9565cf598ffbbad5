"""The one fingerprint function: equal inputs, equal name, on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

LENGTH = 16


def fingerprint(value: Any) -> str:
    """A short stable name of a JSON-like value: 16 hexadecimal digits of its SHA-256.

    Dictionaries are compared by content, not by order.

    Raises:
        TypeError: The value holds something JSON has no form for.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]

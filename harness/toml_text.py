"""Writes plain values as TOML, which the standard library only reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_text(values: Mapping[str, Any]) -> str:
    """A document: numbers, texts, booleans, lists of them, and tables of those one level deep.

    Raises:
        TypeError: there is something else in it.
    """
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    text = "".join(f"{key} = {_value(value)}\n" for key, value in plain.items())
    for key, table in values.items():
        if isinstance(table, Mapping):
            text += f"\n[{key}]\n" + "".join(f"{name} = {_value(value)}\n" for name, value in table.items())
    return text


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML string, but for what only JSON escapes: nothing that ensure_ascii=False writes.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"no TOML for {type(value).__name__}")

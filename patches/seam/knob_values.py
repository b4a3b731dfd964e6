"""Knob values as users write them, checked, with errors that fit on one line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError

from harness.errors import UserError
from patches.seam.patch import Knobs, Patch


def knob_overrides(
    patches: Sequence[Patch], sets: Sequence[str], knobs: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Values by patch and knob; `sets` are `patch.knob=value` texts and win over `knobs`."""
    by_name = {patch.name: patch for patch in patches}
    out: dict[str, dict[str, Any]] = {name: {} for name in by_name}
    for name, values in knobs.items():
        if not isinstance(values, Mapping):
            raise UserError(f"knobs of {name!r} must be a table: [{name}] with one `knob = value` a line")
        for knob, value in values.items():
            out[_known(by_name, name, str(knob))][str(knob)] = value
    for text in sets:
        left, equals, value = text.partition("=")
        name, dot, knob = left.strip().partition(".")
        if not (equals and dot and name and knob):
            raise UserError(
                f"--set {text!r}: expected patch.knob=value, as in --set qos.short_prompt_tokens=512"
            )
        out[_known(by_name, name, knob)][knob] = _parsed(value.strip())
    return out


def make_knobs(patch: Patch, values: Mapping[str, Any]) -> Knobs:
    """The patch's knobs with these values; UserError that names the knob, the value, type and unit expected."""
    for knob in values:
        _known_knob(patch, knob)
    try:
        return patch.knobs(**values)
    except ValidationError as error:
        raise UserError(_explain(patch, error)) from error


def _plain(annotation: Any) -> Any:
    """A type without its bounds, which the message of a wrong value tells: `Annotated[float, ...]` is a float."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain(args[0])
    return origin[tuple(map(_plain, args))] if origin in (dict, list, tuple) else annotation


def type_name(patch: Patch, knob: str) -> str:
    """The type of a knob in words, as `int` or `float`."""
    annotation = _plain(patch.knobs.model_fields[knob].annotation)
    return (
        annotation.__name__
        if isinstance(annotation, type) and annotation.__module__ == "builtins"
        else str(annotation).replace("typing.", "")
    )


def _known(by_name: Mapping[str, Patch], name: str, knob: str) -> str:
    if name not in by_name:
        enabled = ", ".join(by_name) or "none"
        raise UserError(
            f"{name}.{knob}: patch {name!r} is not enabled (enabled: {enabled}); add it to --enable"
        )
    _known_knob(by_name[name], knob)
    return name


def _known_knob(patch: Patch, knob: str) -> None:
    fields = patch.knobs.model_fields
    if knob in fields:
        return
    near = difflib.get_close_matches(knob, fields, n=1, cutoff=0.5)
    hint = f"did you mean {patch.name}.{near[0]}?" if near else f"its knobs: {', '.join(fields) or 'none'}"
    raise UserError(f"patch {patch.name!r} has no knob {knob!r}: {hint}")


def _parsed(text: str) -> Any:
    """Lists and tables as JSON; everything else is left to the knob's own type."""
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _explain(patch: Patch, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return f"knobs of {patch.name!r}: {first['msg'].removeprefix('Value error, ')}; see `bench explain {patch.name}`"
    knob = str(first["loc"][0])
    unit = patch.unit(knob)
    expected = type_name(patch, knob) + (f" in {unit}" if unit else "")
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return (
        f"{patch.name}.{knob}={first['input']!r}: expected {expected} ({message}); "
        f"default {patch.knobs.model_fields[knob].get_default(call_default_factory=True)!r}, see `bench explain {patch.name}`"
    )

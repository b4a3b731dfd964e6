"""Writes who a request belongs to into its JSON body, over whatever the body itself says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from patches.front.tenants import Identity

# Fields of `vllm_xargs` that are the server's to fill in; the rest is the caller's.
FIELDS = ("tenant", "tier", "weight", "slo_ttft_ms")
_MAX_CLAIM = 64

Claims = dict[str, str | float | None]

# Values are kept as the bytes they came as: a prompt of many token ids is neither built nor written anew.
_decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class NotReadableError(ValueError):
    """A body that cannot be read, but that vLLM's own reader might: it must not be let through as it is."""


def stamp(body: bytes, identity: Identity, *, priority: bool) -> tuple[bytes, Claims]:
    """The body with the identity in it, and what it had claimed beyond that.

    A body that is no JSON object comes back as it is: vLLM refuses it, and says why.

    Args:
        priority: whether the server orders requests by priority; if not, the field is taken out.

    Raises:
        NotReadableError: it is nested deeper than can be read.
    """
    try:
        return _stamp_parts(body, identity, priority)
    except msgspec.DecodeError:
        # What vLLM's reader takes and this one does not: NaN, half characters, other encodings.
        return _stamp_whole(body, identity, priority)
    except RecursionError:
        raise NotReadableError("the request's JSON is nested too deeply") from None


def _stamp_parts(body: bytes, identity: Identity, priority: bool) -> tuple[bytes, Claims]:
    parts = _decode_parts(body)
    raw = parts.get("vllm_xargs")
    xargs = None if raw is None else msgspec.json.decode(raw)
    if xargs is not None and not isinstance(xargs, dict):
        return body, {}
    asked = parts.pop("priority", None)
    claims = _claims(xargs or {}, None if asked is None else msgspec.json.decode(asked), identity)
    parts["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(_merged(xargs, identity)))
    if priority:
        parts["priority"] = msgspec.Raw(b"%d" % identity.priority)
    return msgspec.json.encode(parts), claims


def _stamp_whole(body: bytes, identity: Identity, priority: bool) -> tuple[bytes, Claims]:
    try:
        value = json.loads(body)
    except ValueError:
        return body, {}
    except RecursionError:
        raise NotReadableError("the request's JSON is nested too deeply") from None
    if not isinstance(value, dict):
        return body, {}
    xargs = value.get("vllm_xargs")
    if xargs is not None and not isinstance(xargs, dict):
        return body, {}
    claims = _claims(xargs or {}, value.pop("priority", None), identity)
    value["vllm_xargs"] = _merged(xargs, identity)
    if priority:
        value["priority"] = identity.priority
    return json.dumps(value).encode(), claims


def _merged(xargs: Mapping[str, Any] | None, identity: Identity) -> dict[str, Any]:
    return {name: value for name, value in (xargs or {}).items() if name not in FIELDS} | identity.xargs


def _claims(xargs: Mapping[str, Any], priority: Any, identity: Identity) -> Claims:
    """What would have served the request better than its own identity does."""
    claims: Claims = {}
    for name, own in (("tenant", identity.tenant), ("tier", identity.tier)):
        if xargs.get(name) is not None and xargs[name] != own:
            claims[name] = _short(xargs[name])
    if xargs.get("weight") is not None and not _at_most(xargs["weight"], identity.weight):
        claims["weight"] = _short(xargs["weight"])
    slo = xargs.get("slo_ttft_ms")
    if slo is not None and (identity.slo_ttft_ms is None or not _at_most(identity.slo_ttft_ms, slo)):
        claims["slo_ttft_ms"] = _short(slo)
    if priority is not None and not _at_most(identity.priority, priority):
        claims["priority"] = _short(priority)
    return claims


def _at_most(value: Any, bound: Any) -> bool:
    """Both are numbers, and the first is no larger."""
    try:
        return bool(value <= bound)
    except TypeError:
        return False


def _short(value: Any) -> str | float:
    if isinstance(value, int | float) and abs(value) < 1e15:
        return value
    return str(value)[:_MAX_CLAIM]

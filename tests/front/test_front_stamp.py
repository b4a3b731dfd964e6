"""Guards that a body says whose it is whatever it said before, in any form that vLLM's own reader takes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.front.stamp import FIELDS, NotReadableError, stamp
from patches.front.tenants import NOBODY, Identity

GOLD = Identity("gold-a", "gold", 4.0, -1, 200.0)
SILVER = Identity("silver-b", "silver", 2.0, 0, None)


def stamped(body: Any, identity: Identity = SILVER, *, priority: bool = True) -> tuple[dict[str, Any], Any]:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    new, claims = stamp(text, identity, priority=priority)
    value: dict[str, Any] = json.loads(new)
    return value, claims


def test_a_plain_body_gets_its_callers_identity() -> None:
    value, claims = stamped({"model": "m", "prompt": [1, 2], "stream": True}, GOLD)
    assert value == {"model": "m", "prompt": [1, 2], "stream": True, "vllm_xargs": GOLD.xargs, "priority": -1}
    assert claims == {}


def test_what_is_the_callers_own_stays() -> None:
    value, claims = stamped({"vllm_xargs": {"session_id": "s", "mine": [1]}, "x": {"priority": 9}})
    assert value["vllm_xargs"] == {"session_id": "s", "mine": [1], **SILVER.xargs}
    assert value["x"] == {"priority": 9} and claims == {}


def test_its_own_identity_is_no_claim_and_less_is_none_either() -> None:
    assert stamped({"vllm_xargs": GOLD.xargs, "priority": -1}, GOLD)[1] == {}
    value, claims = stamped({"vllm_xargs": {"weight": 1, "slo_ttft_ms": 9000}, "priority": 5}, GOLD)
    assert claims == {} and value["vllm_xargs"] == GOLD.xargs and value["priority"] == -1


@pytest.mark.parametrize(
    ("xargs", "claimed"),
    [
        ({"tenant": "gold-a"}, {"tenant": "gold-a"}),
        ({"tier": "gold"}, {"tier": "gold"}),
        ({"weight": 4}, {"weight": 4}),
        ({"weight": "9"}, {"weight": "9"}),
        ({"weight": [9]}, {"weight": "[9]"}),
        ({"slo_ttft_ms": 1}, {"slo_ttft_ms": 1}),
        ({"tier": "x" * 999}, {"tier": "x" * 64}),
    ],
)
def test_a_claim_is_overruled_and_told(xargs: dict[str, Any], claimed: dict[str, Any]) -> None:
    value, claims = stamped({"vllm_xargs": xargs})
    assert claims == claimed
    assert value["vllm_xargs"] == SILVER.xargs


def test_a_better_priority_is_overruled_and_told() -> None:
    value, claims = stamped({"priority": -7})
    assert value["priority"] == 0 and claims == {"priority": -7}
    value, claims = stamped({"priority": -7}, priority=False)
    assert "priority" not in value and claims == {"priority": -7}
    assert stamped({"priority": 7})[1] == {} and stamped({"priority": None})[1] == {}


def test_who_is_no_tenant_is_served_as_none() -> None:
    value, claims = stamped({"vllm_xargs": {"tier": "gold", "a": 1}, "priority": -1}, NOBODY)
    assert value == {"vllm_xargs": {"a": 1}, "priority": 0}
    assert claims == {"tier": "gold", "priority": -1}


@pytest.mark.parametrize(
    "body",
    [
        b'{"priority": 0, "priority": -9, "vllm_xargs": {}, "vllm_xargs": {"tier": "gold"}}',
        b'{"priorit\\u0079": -9, "\\u0076llm_xargs": {"t\\u0069er": "gold"}}',
        b'\xef\xbb\xbf{"priority": -9, "vllm_xargs": {"tier": "gold"}}',
        '{"priority": -9, "vllm_xargs": {"tier": "gold"}}'.encode("utf-16"),
        b'{"temperature": NaN, "priority": -9, "vllm_xargs": {"tier": "gold"}}',
        b'{"prompt": "\\ud800", "priority": -9, "vllm_xargs": {"tier": "gold"}}',
        b' \n{"priority" : -9 , "vllm_xargs":{"tier":"gold"} }\n ',
    ],
    ids=["twice", "escaped", "mark", "utf-16", "nan", "half a character", "spaces"],
)
def test_other_ways_of_writing_it_do_not_get_around(body: bytes) -> None:
    value, claims = stamped(body)
    assert value["priority"] == 0 and value["vllm_xargs"] == SILVER.xargs
    assert claims == {"priority": -9, "tier": "gold"}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b'{"a": 1} x', b'{"vllm_xargs": [1]}'])
def test_what_vllm_refuses_itself_is_left_to_it(body: bytes) -> None:
    assert stamp(body, SILVER, priority=True) == (body, {})


@pytest.mark.parametrize("inside", [b"", b'"x": NaN, '])
def test_a_body_too_deep_to_read_is_refused(inside: bytes) -> None:
    with pytest.raises(NotReadableError, match="too deeply"):
        stamp(b"{" + inside + b'"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", SILVER, priority=True)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_XARGS = st.dictionaries(st.sampled_from([*FIELDS, "session_id", "other"]), _JSON, max_size=6)
_BODIES = st.fixed_dictionaries(
    {}, optional={"vllm_xargs": _XARGS, "priority": _JSON, "prompt": _JSON, "model": _JSON, "é": _JSON}
)


@given(_BODIES, st.sampled_from([GOLD, SILVER, NOBODY]), st.booleans())
def test_any_object_ends_with_the_callers_identity_and_all_else_unchanged(
    body: dict[str, Any], identity: Identity, priority: bool
) -> None:
    text = json.dumps(body)
    value, _ = stamped(text.encode(), identity, priority=priority)
    told = value.pop("vllm_xargs")
    assert {name: told[name] for name in FIELDS if name in told} == identity.xargs
    assert value.pop("priority", None) == (identity.priority if priority else None)
    before = json.loads(text)
    xargs = before.pop("vllm_xargs", {})
    before.pop("priority", None)
    mine = {name: one for name, one in told.items() if name not in FIELDS}
    # By their text: NaN is not equal to itself.
    assert json.dumps(value) == json.dumps(before)
    assert json.dumps(mine) == json.dumps({name: one for name, one in xargs.items() if name not in FIELDS})


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_come_back_as_they_were_or_stamped(body: bytes) -> None:
    new, _ = stamp(body, SILVER, priority=True)
    # Bytes that are no text stay so inside a stamped body, which vLLM refuses as it would have before.
    with contextlib.suppress(ValueError):
        read = json.loads(new)
        assert read["vllm_xargs"]["tenant"] == "silver-b" if isinstance(read, dict) else new == body

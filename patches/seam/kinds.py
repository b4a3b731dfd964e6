"""How several hooks of one kind combine: small functions, compiled once per engine.

Every `compile_*` takes (name of the patch, hook, its tally) triples, already in the order that the
plan fixed, and returns one callable. Nothing is looked up by name once a step runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from patches.seam.patch import Hooks, KeyPart, Patch
from patches.seam.receipt import PatchTally
from patches.seam.seams import SEAMS

Bound = tuple[str, Callable[..., Any], PatchTally]

#: Parts of the ordering key, in rank order, and when the first of them expires.
KeyParts = tuple[tuple[float, ...], float | None]


class HookError(RuntimeError):
    """A patch's hook returned something that its seam cannot use; names the patch and the seam."""


def check_hooks(patch: Patch, hooks: Hooks) -> None:
    """HookError unless `build` returned exactly the declared seams, each with a hook that can be called as it will be."""
    if hooks.used() != set(patch.seams):
        raise HookError(
            f"patch {patch.name!r} declares the seams {sorted(patch.seams)} "
            f"but build() returned {sorted(hooks.used())}"
        )
    for seam in patch.seams:
        count = SEAMS[seam].arguments
        try:
            inspect.signature(getattr(hooks, seam)).bind(*range(count))
        except TypeError as error:
            raise HookError(
                f"patch {patch.name!r}, seam {seam}: its hook must take {count} positional arguments ({error})"
            ) from error
        except ValueError:
            # A built-in that does not tell its signature.
            continue


def compile_key(hooks: Sequence[Bound]) -> Callable[[Any, float], KeyParts]:
    """Kind `key`: concatenate the parts; the whole expires when its first part does."""

    def check(name: str, part: KeyPart) -> None:
        value, until = part
        if value != value or (until is not None and until != until):
            raise HookError(f"patch {name!r}, seam request_key: returned NaN")

    if len(hooks) == 1:
        name, hook, tally = hooks[0]

        def single(request: Any, now: float) -> KeyParts:
            part = hook(request, now)
            check(name, part)
            tally.add("request_key")
            return (part[0],), part[1]

        return single

    def composite(request: Any, now: float) -> KeyParts:
        values = []
        first_until: float | None = None
        for name, hook, tally in hooks:
            part = hook(request, now)
            check(name, part)
            tally.add("request_key")
            values.append(part[0])
            until = part[1]
            if until is not None and (first_until is None or until < first_until):
                first_until = until
        return tuple(values), first_until

    return composite


def compile_rank(hook: Bound) -> Callable[[str, float], float]:
    """Kind `first`, seam `tenant_rank`: the owner's answer, counted."""
    name, function, tally = hook

    def rank(tenant: str, now: float) -> float:
        value: float = function(tenant, now)
        if value != value:
            raise HookError(f"patch {name!r}, seam tenant_rank: returned NaN")
        tally.add("tenant_rank")
        return value

    return rank


def compile_prefer(hook: Bound) -> Callable[[Sequence[Any], float], int]:
    """Kind `first`, seam `prefer`: the owner's choice, counted when it is not the first."""
    name, function, tally = hook

    def prefer(requests: Sequence[Any], now: float) -> int:
        index: int = function(requests, now)
        if index:
            if not 0 < index < len(requests):
                raise HookError(f"patch {name!r}, seam prefer: chose {index} of {len(requests)}")
            tally.add("prefer")
        return index

    return prefer


def compile_gates(hooks: Sequence[Bound]) -> tuple[Callable[[Any, float], str | None], ...]:
    """Kind `gate`: one callable per gate, in order; the queue asks them in turn and stops at the first reason."""

    def counted(hook: Callable[..., Any], tally: PatchTally) -> Callable[[Any, float], str | None]:
        def gate(request: Any, now: float) -> str | None:
            reason: str | None = hook(request, now)
            if reason is not None:
                tally.add("waiting_gate")
            return reason

        return gate

    return tuple(counted(hook, tally) for _, hook, tally in hooks)


def compile_cap(hooks: Sequence[Bound]) -> Callable[[Any, int, int, float], int]:
    """Kind `cap`: the minimum over all hooks and of what was asked for."""

    def cap(request: Any, computed: int, new_tokens: int, now: float) -> int:
        least = new_tokens
        for _, hook, tally in hooks:
            limit = hook(request, computed, new_tokens, now)
            if limit < new_tokens:
                tally.add("token_cap")
                if limit < least:
                    least = limit
        return least

    return cap


def compile_score(hooks: Sequence[Bound], seam: str) -> Callable[[Any], float]:
    """Kind `score`: the sum of the hints."""

    def score(item: Any) -> float:
        total = 0.0
        for name, hook, tally in hooks:
            hint = hook(item)
            if hint:
                if hint != hint:
                    raise HookError(f"patch {name!r}, seam {seam}: returned NaN")
                tally.add(seam)
                total += hint
        return total

    return score


def compile_expiry(hooks: Sequence[Bound]) -> Callable[[float], dict[str, str]]:
    """Kind `gate`, seam `expire`: the union of what to end now; the first to name a request gives its reason.

    Counted is whose reason held.
    """

    def expire(now: float) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for _, hook, tally in hooks:
            before = len(reasons)
            due: Iterable[tuple[str, str]] = hook(now)
            for request_id, reason in due:
                reasons.setdefault(request_id, reason)
            if len(reasons) > before:
                tally.add("expire", len(reasons) - before)
        return reasons

    return expire


def compile_observers(hooks: Sequence[Bound]) -> tuple[Callable[..., Any], ...]:
    """Kind `observe`: the hooks themselves, in order. What counts as a hit is for the patch to say."""
    return tuple(hook for _, hook, _ in hooks)

"""Requests of several tenants on real schedulers, and what each tenant got, for tests of fair sharing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.drive import make_request
from tests.scheduling.clocked import Served, prompt


def of(
    config: Any, name: str, length: int, *, tokens: int = 4, weight: float = 1.0, at: float = 0.0, **more: Any
) -> Any:
    """A request of the tenant that its name begins with; no two share a prompt."""
    request = make_request(
        config,
        name,
        prompt(sum(ord(c) * 131**i for i, c in enumerate(name)), length),
        max_tokens=tokens,
        arrival_time=at,
        tenant=name[0],
        **more,
    )
    request.sampling_params.extra_args["weight"] = weight
    return request


def service(served: Served) -> list[dict[str, int]]:
    """Tokens of each tenant, step by step."""
    out = []
    for step in served.trace.steps:
        tokens: dict[str, int] = {}
        for name, count in step.items():
            tokens[name[0]] = tokens.get(name[0], 0) + count
        out.append(tokens)
    return out


def waiting_tenants(into: list[set[str]]) -> Callable[[Any], None]:
    """A check for `serve` that notes which tenants wait before each pass."""
    return lambda scheduler: into.append({request.request_id[0] for request in scheduler.waiting})


@dataclass(frozen=True)
class Planned:
    """One request as hypothesis draws it; steps count from the run's start."""

    tenant: str
    arrives: int
    prompt_tokens: int
    output_tokens: int
    cancelled_after: int | None


WEIGHTS = {"a": 4.0, "b": 2.0, "c": 1.0}

PLANNED = st.builds(
    Planned,
    tenant=st.sampled_from("abc"),
    arrives=st.integers(0, 60),
    prompt_tokens=st.integers(1, 420),
    output_tokens=st.integers(1, 60),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 80)),
)


def requests_of(config: Any, drawn: list[Planned]) -> dict[str, tuple[Planned, Any]]:
    """Real requests by id, which begins with the tenant."""
    return {
        f"{one.tenant}{number}": (
            one,
            of(
                config,
                f"{one.tenant}{number}",
                one.prompt_tokens,
                tokens=one.output_tokens,
                weight=WEIGHTS[one.tenant],
                at=1.0 + one.arrives,
            ),
        )
        for number, one in enumerate(drawn)
    }


def arrivals(planned: dict[str, tuple[Planned, Any]]) -> list[tuple[int, Any]]:
    """For `serve`."""
    return [(one.arrives, request) for one, request in planned.values()]


def cancels(planned: dict[str, tuple[Planned, Any]]) -> list[tuple[int, str]]:
    """For `serve`."""
    return [
        (one.arrives + one.cancelled_after, name)
        for name, (one, _) in planned.items()
        if one.cancelled_after is not None
    ]

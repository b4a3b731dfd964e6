"""What the adapter remembers of one request, and what a request says of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from patches.seam.context import RequestInfo
from patches.seam.queue import Key


class Ticket:
    """What the adapter remembers of one request; lives and dies with it."""

    __slots__ = ("info", "key")

    def __init__(self, info: RequestInfo) -> None:
        self.info = info
        self.key: Key = ()


def extra_of(request: Any) -> Mapping[str, Any]:
    """What came with the request beyond what vLLM asks for; the API puts tenant, tier, weight and targets there."""
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}


def info_of(request: Any, extra: Mapping[str, Any], queued_s: float, sequence: int) -> RequestInfo:
    """Who the request belongs to, from what came with it; what it does not say, or says wrongly, is neutral."""
    return RequestInfo(
        tenant=str(extra.get("tenant", "")),
        tier=str(extra.get("tier", "")),
        priority=int(request.priority),
        prompt_tokens=int(request.num_prompt_tokens),
        queued_s=queued_s,
        sequence=sequence,
        weight=_positive(extra.get("weight"), 1.0),
        slo_ttft_s=_positive(extra.get("slo_ttft_ms"), math.inf) / 1e3,
    )


def _positive(value: Any, otherwise: float) -> float:
    """A number above 0 as a request may carry it, else what stands for an absent one."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return number if 0 < number < math.inf else otherwise

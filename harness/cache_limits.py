"""The bounds of a run as its manifest tells them: sums of tokens, so that seeds can be added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from harness.cache_served import ServedBounds, served_bounds
from workloads.request import Workload

# Beside what a reader must know of `harness.cache_served`.
TIERS = (
    "tiers below the device's memory keep blocks too; the clairvoyant bound is of the device's memory alone"
)
OWN_PROMPTS = (
    "the patches compute prompts that no client sent, which no bound counts; a hit rate may pass them"
)
ORDER_UNKNOWN = "who came first within one step was not recorded"

_TIERED = frozenset({"tiering"})
_OWN = frozenset({"warmup", "version"})


def limits_of(
    workload: Workload,
    tables: dict[str, pa.Table],
    *,
    admitted: Sequence[int] | None,
    block_tokens: int,
    blocks: int,
    patches: Sequence[str],
    tiered: bool = False,
) -> dict[str, Any]:
    """The manifest's `cache_bounds`: of all measured requests that were admitted, by phase and by tenant.

    Args:
        tables: of the run.
        admitted, block_tokens, blocks: as in `served_bounds`.
        patches: names of those in force. tiered: whether upstream's own offloading is.
    """
    requests, events, steps, tokens = (
        tables[name].to_pandas() for name in ("requests", "events", "steps", "tokens")
    )
    sequences = [(one.prompt, one.output) for one in workload.requests]
    bounds = served_bounds(sequences, requests, events, steps, tokens, admitted, block_tokens, blocks)
    assumed = []
    if tiered or _TIERED & set(patches):
        assumed.append(TIERS)
    if _OWN & set(patches):
        assumed.append(OWN_PROMPTS)
    if admitted is None:
        assumed.append(ORDER_UNKNOWN)
    frame = _sums(requests, bounds)
    return {
        "block_tokens": block_tokens,
        "blocks": blocks,
        "estimate": assumed,
        "all": _whole(frame.drop(columns=["phase", "tenant"]).sum()),
        "by_phase": _grouped(frame, "phase"),
        "by_tenant": _grouped(frame, "tenant"),
    }


def _sums(requests: pd.DataFrame, bounds: ServedBounds) -> pd.DataFrame:
    cached = requests["cached_tokens"].to_numpy(np.float64)
    keep = ~np.isnan(cached) & requests["measured"].to_numpy(bool)
    return pd.DataFrame(
        {
            "phase": requests["phase"].to_numpy(),
            "tenant": requests["tenant"].to_numpy(object),
            "prompt_tokens": requests["prompt_tokens"].to_numpy(np.int64),
            "cached_tokens": np.nan_to_num(cached).astype(np.int64),
            "infinite_tokens": bounds.infinite,
            "whole_pool_tokens": bounds.whole_pool,
            "clairvoyant_tokens": bounds.clairvoyant,
        }
    )[keep]


def _grouped(frame: pd.DataFrame, by: str) -> dict[str, dict[str, int]]:
    other = "tenant" if by == "phase" else "phase"
    return {
        str(name): _whole(part.drop(columns=[by, other]).sum()) for name, part in frame.groupby(by, sort=True)
    }


def _whole(sums: pd.Series[Any]) -> dict[str, int]:
    return {str(name): int(value) for name, value in sums.items()}


def pooled(told: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The rates of several seeds together, from their manifests' `cache_bounds`; None where there is none.

    `hit_rate` is what was found; `clairvoyant`, `whole_pool` and `infinite` are the bounds (`harness.cache_served`).
    That of a part (a phase, a tenant) is its share of the best whole, not the best for that part.
    """
    if not told:
        return None
    first = told[0]
    return {
        "block_tokens": first["block_tokens"],
        "blocks": first["blocks"],
        "estimate": list(dict.fromkeys(text for one in told for text in one["estimate"])),
        "all": _rates([one["all"] for one in told]),
        **{
            part: {
                name: _rates([one[part][name] for one in told if name in one[part]])
                for name in dict.fromkeys(name for one in told for name in one[part])
            }
            for part in ("by_phase", "by_tenant")
        },
    }


def _rates(sums: Sequence[Mapping[str, int]]) -> dict[str, float]:
    total = sum(one["prompt_tokens"] for one in sums)
    return {
        rate: sum(one[column] for one in sums) / total if total else 0.0
        for rate, column in (
            ("hit_rate", "cached_tokens"),
            ("clairvoyant", "clairvoyant_tokens"),
            ("whole_pool", "whole_pool_tokens"),
            ("infinite", "infinite_tokens"),
        )
    }

"""Guards that patches which order the queue do so beside each other: none of a pair is without effect.

A key that is continuous decides everything after it, so a patch ranked behind such a key would be switched on and do
nothing. Each pair runs in a real engine on one busy traffic; leaving either out must change what is scheduled when.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from patches.seam.plan import resolve
from tests.engines.traffic import NS, ConstantStep, request
from tests.scheduling.clocked import installed
from workloads.request import Phase, Tenant, Workload

ORDERING = ("wfq", "qos", "mlfq", "edf", "cacheaware")
# Priority, weight and deadline disagree with each other, so that each order is another one.
TENANTS = (
    Tenant("a", "gold", "chat", 1, 1, 3_000.0, True),
    Tenant("b", "silver", "chat", 4, 0, 9_000.0, True),
    Tenant("c", "bronze", "rag", 2, 1, 20_000.0, False),
)


@cache
def digest(enable: str) -> str:
    """What is scheduled when, with four seats for fifty requests that come within three seconds."""
    rng = np.random.Generator(np.random.PCG64(5))
    requests = []
    for i in range(50):
        tenant = TENANTS[int(rng.integers(len(TENANTS)))]
        # Each customer of a tenant has a deadline of its own in effect: arrivals differ, lengths cross every level.
        # Within a level some are a little shorter, so that a choice by length is another one there too.
        prompt = int(rng.choice([40, 200, 700, 2_500])) + 10 * (i % 3)
        requests.append(request(i, float(rng.uniform(0, 3)), prompt=prompt, output=12, tenant=tenant))
    load = Workload(
        name="ordering",
        seed=0,
        tenants=TENANTS,
        phases=(Phase(1, "only", 0, 120 * NS, True),),
        requests=tuple(
            replace(one, index=i) for i, one in enumerate(sorted(requests, key=lambda r: r.intended_ns))
        ),
        sha256="",
        corpus_sha256="",
    )
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=4)
    with installed(enable):
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 1_000)
        try:
            run = engine.run(load)
        finally:
            engine.shutdown()
    return run.schedule_digest


@pytest.mark.parametrize("pair", itertools.combinations(ORDERING, 2), ids=",".join)
def test_leaving_either_out_changes_the_schedule(pair: tuple[str, str]) -> None:
    both = digest(",".join(pair))
    for other in pair:
        assert digest(other) != both, f"{next(iter({*pair} - {other}))} does nothing beside {other}"


def test_the_order_of_ranks_is_one_for_all() -> None:
    """Whatever the order on the command line: tenant, class, level, deadline; the choice within all that comes last."""
    order = resolve("cacheaware,edf,mlfq,wfq,qos").order()
    assert order["prefer"] == ("cacheaware",)
    assert order["tenant_rank"] == ("wfq",)
    assert order["request_key"] == ("qos", "mlfq", "edf")

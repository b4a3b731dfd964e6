"""Guards offloading on the virtual engine: transfers take their bytes over their links, equal runs are equal to the byte,
and an arm's flags say what moves. Upstream's own connector is played as ours is.

The engine is vLLM's. Not here: what a block holds (tests/kv/test_tier_laws.py), and what offloading is worth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from harness.arms import patched
from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.errors import UserError
from harness.profiles import load_profile, model_dir
from harness.profiles.profile import Transfers
from patches.seam.plan import resolve
from tests.engines.traffic import LONG, NS, SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import installed

GIB, BLOCK_BYTES = 2**30, 2 * 2**20
SPEEDS = Transfers(
    d2h_bytes_per_s=20e9,
    h2d_bytes_per_s=25e9,
    launch_us=20.0,
    disk_read_bytes_per_s=6e9,
    disk_write_bytes_per_s=5e9,
    disk_access_us=100.0,
    comment="a test",
)
UPSTREAM = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": GIB, "eviction_policy": "arc"},
}
TIGHT: dict[str, Any] = {
    "host_bytes": 64 * BLOCK_BYTES,
    "disk_bytes": 48 * BLOCK_BYTES,
    "save_ahead_share": 0.2,
}
# Two rounds of the same prompts, more than the pool holds; long ones preempt each other.
TRAFFIC = [
    replace(
        request(
            i % 24,
            0.05 * i,
            prompt=800 if i % 3 == 0 else 300,
            output=160,
            tenant=LONG if i % 3 == 0 else SHORT,
            shared=640 if i % 3 == 0 else 288,
            cancel_s=0.05 * i + 0.5 if i % 11 == 5 else None,
        ),
        index=i,
        request_id=f"r{i:03d}",
    )
    for i in range(48)
]


def serve(blocks: int = 140, knobs: dict[str, Any] | None = None, **flags: Any) -> tuple[VirtualRun, Any]:
    """The traffic on a fresh engine, with `tiering` if it is given knobs; and the connector."""
    brought = {} if knobs is None else resolve("tiering", knobs={"tiering": knobs}).engine_flags
    engine = VirtualEngine(
        model_dir("llama-3.1-8b"),
        EngineFlags(**{"max_model_len": 2048, **flags, **brought}),
        ConstantStep(),
        blocks,
        links=SPEEDS,
    )
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    try:
        run = engine.run(workload(TRAFFIC))
        connector = engine.core.scheduler.connector
    finally:
        engine.shutdown()
    assert pool.get_num_free_blocks() == free
    assert set(run.tables["requests"].column("status").to_pylist()) == {"ok", "cancelled"}
    return run, connector


def check_links(table: pa.Table) -> None:
    """Each transfer takes its bytes' time, and no two share a link."""
    rows = table.to_pandas()
    assert len(rows)
    speed = {"d2h": 20e9, "h2d": 25e9, "disk read": 6e9, "disk write": 5e9}
    wait_ns = {"d2h": 20_000, "h2d": 20_000, "disk read": 100_000, "disk write": 100_000}
    for row in rows.itertuples():
        expected = wait_ns[row.link] + round(row.size_bytes * NS / speed[row.link])
        assert row.end_ns - row.begin_ns == expected
        assert row.size_bytes % BLOCK_BYTES == 0
    rows["cable"] = rows.link.str.split().str[0]
    for _, on_one in rows.groupby("cable"):
        assert (on_one.begin_ns.to_numpy()[1:] >= on_one.end_ns.to_numpy()[:-1]).all()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_equal_runs_are_equal_and_transfers_take_their_time(async_scheduling: bool) -> None:
    with installed("tiering", {"tiering": TIGHT}):
        (one, connector), (two, _) = (serve(knobs=TIGHT, async_scheduling=async_scheduling) for _ in range(2))
    assert one.schedule_digest == two.schedule_digest
    assert one.tables.keys() == two.tables.keys() and "transfers" in one.tables
    for name, table in one.tables.items():
        assert table.equals(two.tables[name]), name
    check_links(one.tables["transfers"])
    tiers, moved = connector.tiers, one.tables["transfers"].to_pandas().groupby("link").size_bytes.sum()
    assert tiers.recoveries.preempted > 0
    assert tiers.recoveries.recomputed_tokens < 0.25 * tiers.recoveries.lost_tokens
    assert moved["d2h"] == tiers.counts.d2h_bytes and moved["h2d"] == tiers.counts.h2d_bytes
    assert tiers.disk.counts.to_disk_bytes > 0
    assert len(tiers.host) <= tiers.host.slots == TIGHT["host_bytes"] // BLOCK_BYTES
    assert len(tiers.disk.cache) <= tiers.disk.cache.slots == TIGHT["disk_bytes"] // BLOCK_BYTES


def test_upstreams_own_offloading_is_played_too() -> None:
    (one, _), (two, _) = (serve(kv_transfer_config=UPSTREAM) for _ in range(2))
    assert one.schedule_digest == two.schedule_digest
    assert one.tables["transfers"].equals(two.tables["transfers"])
    check_links(one.tables["transfers"])
    without, _ = serve()
    assert "transfers" not in without.tables
    cached = [run.tables["requests"].to_pandas().cached_tokens.sum() for run in (one, without)]
    assert cached[0] > cached[1]
    # Its short form says the same.
    short, _ = serve(kv_offloading_size=1.0, kv_transfer_config=UPSTREAM)
    assert short.schedule_digest == one.schedule_digest


def test_a_preempted_request_is_saved_though_nothing_else_is() -> None:
    knobs = {"host_bytes": GIB, "save_ahead_share": 1.0, "save_step_blocks": 1}
    with installed("tiering", {"tiering": knobs}):
        _, connector = serve(knobs=knobs)
    recoveries = connector.tiers.recoveries
    assert recoveries.preempted > 0
    assert recoveries.recomputed_tokens < 0.1 * recoveries.lost_tokens
    assert 0 <= recoveries.ms("restore")[1] <= recoveries.ms("own")[1] <= recoveries.ms("recovery")[1]
    assert recoveries.ms("step")[0] > 0


def test_a_load_that_costs_more_than_recomputing_is_not_made() -> None:
    knobs = {"host_bytes": GIB, "reload_cost_ratio": 1e-6}
    with installed("tiering", {"tiering": knobs}):
        run, connector = serve(knobs=knobs)
    assert connector.tiers.counts.loads == 0
    assert connector.tiers.counts.dear_loads > 0
    assert "h2d" not in set(run.tables["transfers"].column("link").to_pylist())


def test_who_ran_in_the_pass_before_can_be_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream cannot, where a connector loads: its own shows it. Then nobody behind in the line runs in that pass."""
    from vllm.v1.core.sched.scheduler import Scheduler

    asked: list[bool] = []
    freed = Scheduler._request_blocks_can_be_freed

    def watched(self: Any, request: Any) -> bool:
        asked.append(freed(self, request))
        return asked[-1]

    monkeypatch.setattr(Scheduler, "_request_blocks_can_be_freed", watched)
    serve(kv_transfer_config=UPSTREAM, async_scheduling=True)
    assert not all(asked)
    asked.clear()
    with installed("tiering", {"tiering": TIGHT}):
        _, connector = serve(knobs=TIGHT, async_scheduling=True)
    assert connector.tiers.recoveries.preempted > 0
    assert all(asked)


def test_the_patch_without_its_connector_says_so() -> None:
    with installed("tiering"), pytest.raises(RuntimeError, match="bench plan --enable tiering"):
        serve()


def test_a_profile_without_links_cannot_offload() -> None:
    with pytest.raises(UserError, match="transfers"):
        VirtualEngine(
            model_dir("llama-3.1-8b"),
            EngineFlags(max_model_len=2048, kv_transfer_config=UPSTREAM),
            ConstantStep(),
            200,
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec"}},
            "cannot|only CPUOffloadingSpec",
        ),
        ({"kv_rule": "kv_both"}, "kv_rule"),
        ({"kv_role": "both"}, "kv_role"),
    ],
)
def test_a_connector_that_cannot_be_played(change: dict[str, Any], says: str) -> None:
    flags = EngineFlags(max_model_len=2048, kv_transfer_config=UPSTREAM | change)
    with pytest.raises(UserError, match=says):
        VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 200, links=SPEEDS)


def test_an_arm_gets_the_flags_that_its_patch_brings() -> None:
    profile = load_profile("rtx4090-24g/llama-3.1-8b")
    arm = patched(profile, ["tiering"], {"tiering": {"host_bytes": GIB}})
    config = arm.flags.kv_transfer_config
    assert config is not None and config["kv_connector"] == "TieringConnector"
    assert config["kv_connector_extra_config"]["tiering"]["host_bytes"] == GIB
    assert arm.plan is not None and arm.plan.brought_by("kv_transfer_config") == "tiering"
    assert patched(profile, ["qos"], {}).flags.kv_transfer_config is None
    for flag, value in (("kv_transfer_config", UPSTREAM), ("kv_offloading_size", 4.0)):
        with pytest.raises(UserError, match=f"'{flag}' is set, but patch 'tiering'"):
            patched(profile, ["tiering"], {}, flags={flag: value})


def test_knobs_that_cannot_be() -> None:
    for knobs in (
        {"disk_folder": "here", "disk_bytes": 1},
        {"disk_folder": "/a/../b", "disk_bytes": 1},
        {"disk_folder": "/a"},
        {"host_bytes": 0},
    ):
        with pytest.raises(UserError, match="tiering"):
            resolve("tiering", knobs={"tiering": knobs})


def test_a_served_plan_brings_its_flags() -> None:
    from harness.engines.live.command import _brought

    (word,) = _brought(resolve("tiering,qos"))
    assert word.startswith('--kv-transfer-config={"kv_connector": "TieringConnector"')
    assert _brought(resolve("qos")) == [] == _brought(None)

"""Guards how a patch ends requests: never scheduled again, told to the client once, also when nothing else runs.

Real Schedulers and real EngineCores, in both modes. Not here: when which patch ends what, and HTTP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.profiles import model_dir
from patches.seam import endings
from patches.seam.endings import CODES, DEADLINE_EXPIRED, MAX_RETRY_AFTER_S, Ending, parse, refused
from tests.drive import cancel, make_config, make_request, make_scheduler
from tests.engines.traffic import SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import installed, patched, prompt, serve

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
TOY = "tests.seam.toys.ending"

# stop reasons


@given(code=st.sampled_from(sorted(CODES)), wait_s=st.floats(allow_nan=True, allow_infinity=True))
def test_a_refusal_says_what_was_put_in(code: str, wait_s: float) -> None:
    ending = parse(refused(code, wait_s))
    assert ending is not None
    assert (ending.status, ending.code, ending.http_status) == ("rejected", code, 503)
    assert ending.retry_after_s is not None
    assert 1 <= ending.retry_after_s <= MAX_RETRY_AFTER_S
    if wait_s <= MAX_RETRY_AFTER_S:
        # Never sooner than said, and never a second too late.
        assert max(wait_s, 0) <= ending.retry_after_s < max(wait_s, 0) + 1 or ending.retry_after_s == 1


def test_expiry_is_a_408() -> None:
    assert parse(DEADLINE_EXPIRED) == Ending("expired", "deadline_expired")
    assert Ending("expired", "deadline_expired").http_status == 408


@pytest.mark.parametrize(
    "other", [None, 7, "", "stop", "refused", "refused:kv_red", "refused:kv_red:0", "refused:kv_red:1.5", "x"]
)
def test_other_stop_reasons_are_not_ours(other: object) -> None:
    assert parse(other) is None


def test_unknown_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="'tired'"):
        refused("tired", 1)
    assert endings.CODES


# on real schedulers


@BOTH
def test_whom_a_patch_refuses_on_arrival_is_never_scheduled(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    with patched(TOY) as (installation, clock):
        tenants = ["ok", "refused", "ok", "refused"]
        requests = [
            make_request(config, f"r{i}", prompt(i, 60), max_tokens=4, tenant=tenant)
            for i, tenant in enumerate(tenants)
        ]
        served = serve(make_scheduler(config, 100), clock, [(2 * i, r) for i, r in enumerate(requests)])
        assert installation.tallies["ending"].by_hook["expire"] == 2
    assert served.trace.order() == ["r0", "r2"]
    assert served.trace.finished == {"r0": "length", "r1": "abort", "r2": "length", "r3": "abort"}
    assert served.trace.stop_reasons["r1"] == "refused:queue_depth:3"


@BOTH
def test_a_running_one_is_ended_and_its_blocks_return(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling, max_num_batched_tokens=128)
    with patched(TOY) as (_, clock):
        requests = [
            make_request(config, f"r{i}", prompt(i, 300), max_tokens=30, tenant=tenant)
            for i, tenant in enumerate(["expired", "ok"])
        ]
        served = serve(make_scheduler(config, 60), clock, [(0, r) for r in requests])
    assert served.trace.finished == {"r0": "abort", "r1": "length"}
    assert served.trace.stop_reasons["r0"] == DEADLINE_EXPIRED
    # It had two passes, and is in none after those.
    assert [step for step in range(len(served.trace.steps)) if "r0" in served.trace.steps[step]] == [0, 1]


@BOTH
def test_one_that_its_client_cancelled_first_is_not_ended_twice(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    with patched(TOY) as (installation, _):
        scheduler = make_scheduler(config, 60)
        scheduler.add_request(make_request(config, "gone", prompt(1, 60), tenant="refused"))
        cancel(scheduler, "gone")
        out = scheduler.schedule()
        assert not out.num_scheduled_tokens
        assert out.finished_req_ids == {"gone"}
        assert installation.tallies["ending"].by_hook["expire"] == 1
    assert not scheduler.requests


# in a real EngineCore


def run(enable: str, requests: list[Any], async_scheduling: bool, tenants: list[str]) -> VirtualRun:
    """The requests on a fresh engine."""
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=512, async_scheduling=async_scheduling)
    traffic = workload(requests)
    named = tuple(replace(SHORT, name=name) for name in tenants)
    with installed(enable):
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 500)
        try:
            assert (engine.core.batch_queue is not None) == async_scheduling
            return engine.run(replace(traffic, tenants=named))
        finally:
            engine.shutdown()


@BOTH
@pytest.mark.parametrize("busy", [False, True])
def test_the_client_hears_of_it_at_once(async_scheduling: bool, busy: bool) -> None:
    """Also where it is the only request of the engine, so that the pass that ends it has nothing to run."""
    ok = replace(SHORT, name="ok")
    requests = [request(1, 1.0, tenant=replace(SHORT, name="refused"))]
    if busy:
        requests.append(request(0, 0.9, tenant=ok, output=40))
    # Later traffic, so that an output left behind would come out seconds late, not be lost.
    requests.append(request(2, 30.0, tenant=ok))
    found = run(TOY, requests, async_scheduling, ["refused", "ok"])
    rows = {row["request_id"]: row for row in found.tables["requests"].to_pylist()}
    gone = rows.pop("r001")
    assert (gone["status"], gone["reason"]) == ("rejected", "queue_depth")
    assert gone["end_ns"] - gone["sent_ns"] < 150_000_000
    assert (gone["output_tokens"], gone["scheduled_ns"]) == (0, None)
    assert {row["status"] for row in rows.values()} == {"ok"}
    events = found.tables["events"].to_pylist()
    assert [e["kind"] for e in events if e["kind"] in ("reject", "expire", "fail")] == ["reject"]


@BOTH
def test_the_only_request_expires_while_it_runs(async_scheduling: bool) -> None:
    requests = [
        request(1, 1.0, tenant=replace(SHORT, name="expired"), prompt=3000),
        request(2, 30.0, tenant=replace(SHORT, name="ok")),
    ]
    found = run(TOY, requests, async_scheduling, ["expired", "ok"])
    rows = {row["request_id"]: row for row in found.tables["requests"].to_pylist()}
    assert (rows["r001"]["status"], rows["r001"]["reason"]) == ("expired", "deadline_expired")
    assert rows["r001"]["end_ns"] < 2_000_000_000
    assert rows["r002"]["status"] == "ok"

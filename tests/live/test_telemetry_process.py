"""Guards telemetry in the processes of a real engine: spawned, forked, killed, with no plan at all, and switched off.

A small model with weights at random runs on the CPU. Does not guard asynchronous scheduling on a real device, which
needs a GPU (test_telemetry_steps has it on the virtual one), and the HTTP front end, which only adds to the ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.engines.live.prometheus import Metrics, Scrape
from harness.engines.live.telemetry.collect import Telemetry, collect
from harness.engines.live.telemetry.join import join
from harness.engines.live.telemetry.reconcile import reconcile


def run(root: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHBENCH_", "VLLM_ENABLE_V1_MULTI"))}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=root,
        env=clean | {"PYTHONPATH": str(root)} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def served(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Telemetry]:
    """What the engine's parent saw, and what the engine wrote before it was killed."""
    folder = tmp_path_factory.mktemp("engine")
    env = {"PATCHBENCH_TELEMETRY": str(folder / "telemetry"), "PATCHBENCH_EPOCH_NS": "1000"}
    done = run(root, "-m", "tests.live.telemetry_engine", str(folder), **env)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told, collect(folder / "telemetry")


@pytest.mark.slow
@pytest.mark.live
def test_a_spawned_engine_writes_and_a_killed_one_leaves_it(served: tuple[dict[str, Any], Telemetry]) -> None:
    told, telemetry = served
    assert telemetry.faults == ()
    (engine,) = telemetry.engines
    assert engine["pid"] != told["pid"] and engine["epoch_ns"] == 1000
    assert engine["step_time"] == "execution" and engine["kv_blocks"] == 16
    late = telemetry.window(told["ended_ns"] - 1000, 1 << 62)
    assert late.steps.num_rows >= 18 and late.requests.num_rows == 4
    assert late.requests["finish_reason"].to_pylist() == [None] * 4


@pytest.mark.slow
@pytest.mark.live
def test_steps_are_on_the_runs_clock(served: tuple[dict[str, Any], Telemetry]) -> None:
    told, telemetry = served
    part = telemetry.window(told["began_ns"] - 1000, told["ended_ns"] - 1000)
    steps, batches = part.steps.to_pandas(), part.batches.to_pandas()
    assert abs(len(steps) - told["steps"]) <= 2
    assert (steps.start_ns >= steps.t_ns).all() and (steps.end_ns > steps.start_ns).all()
    # one batch after the other
    assert (steps.t_ns.to_numpy()[1:] >= steps.end_ns.to_numpy()[:-1]).all()
    within = batches.schedule_us + batches.update_us + batches.step_us
    assert within.sum() * 1000 <= told["ended_ns"] - told["began_ns"]
    assert (steps.running <= 4).all() and steps.waiting.max() >= 3
    assert steps.prefill_tokens.max() <= 128 and steps.preempted.sum() > 0
    assert batches.telemetry_us.median() < 1000


@pytest.mark.slow
@pytest.mark.live
def test_requests_are_those_of_the_client(served: tuple[dict[str, Any], Telemetry]) -> None:
    _, telemetry = served
    joined = join(telemetry, [f"r{i}" for i in range(8)])
    assert (joined.unseen, joined.repeated, len(joined.strangers)) == ((), (), 4)
    requests = joined.requests.to_pandas()
    assert list(requests.output_tokens[:7]) == [60] * 7
    assert list(requests.finish_reason) == ["length"] * 7 + ["abort"]
    ended = requests[:7]
    times = ended[["received_ns", "queued_ns", "scheduled_ns", "first_token_ns", "end_ns"]].to_numpy()
    assert (times[:, 1:] > times[:, :-1]).all()
    # 64 tokens are the same for all: two blocks, once the first request has filled them
    assert set(requests.cached_tokens[:7].astype(int)) == {0, 64}
    assert set(requests.prompt_tokens_counted) == {164}


@pytest.mark.slow
@pytest.mark.live
def test_the_servers_own_counters_agree(served: tuple[dict[str, Any], Telemetry]) -> None:
    told, telemetry = served
    metrics = Metrics(
        [
            Scrape(told[when] - 1000, 1.0, text)
            for when, text in zip(("began_ns", "ended_ns"), told["scrapes"], strict=True)
        ]
    )
    assert metrics.faults == []
    assert metrics.increase("vllm:num_preemptions")
    client = pd.DataFrame(
        [(f"r{i}", "cancelled" if i == 7 else "ok", told["tokens"].get(f"cmpl-r{i}-0", 0)) for i in range(8)],
        columns=["request_id", "status", "output_tokens"],
    )
    assert reconcile(telemetry, client, metrics) == []
    # the same names, a token too many
    client["output_tokens"] += [1, *[0] * 7]
    assert [one.what for one in reconcile(telemetry, client, metrics)] == ["output_tokens"]


FORK = """
import os, sys
from pathlib import Path
from harness import vllm_env; vllm_env.prepare()
from patches.seam import plugin; plugin.register(); plugin.register()
from tests.engines.traffic import ConstantStep, request, workload
from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
child = os.fork()
if not child:
    engine = VirtualEngine(model_dir('llama-3.1-8b'), EngineFlags(max_model_len=4096), ConstantStep(), 300)
    engine.run(workload([request(i, 0.0) for i in range(3)]))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(child)
"""


@pytest.mark.slow
@pytest.mark.live
def test_a_forked_engine_writes_under_its_own_pid(root: Path, tmp_path: Path) -> None:
    done = run(root, "-c", FORK, PATCHBENCH_TELEMETRY=str(tmp_path))
    telemetry = collect(tmp_path)
    assert [engine["pid"] for engine in telemetry.engines] == [int(done.stdout)]
    assert telemetry.requests["engine_id"].to_pylist() == ["r000", "r001", "r002"]


@pytest.mark.parametrize("env", [{}, {"PATCHBENCH_OFF": "1", "PATCHBENCH_TELEMETRY": "somewhere"}])
def test_off_means_absent(root: Path, tmp_path: Path, env: dict[str, str]) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from patches.seam import plugin; plugin.register()\n"
        "new = {m for m in set(sys.modules) - before if m.split('.')[0] in ('patches', 'harness', 'vllm', 'torch')}\n"
        "assert new == {'patches', 'patches.seam', 'patches.seam.plugin'}, new\n"
    )
    run(root, "-c", code, **env)


def test_telemetry_that_cannot_be_installed_leaves_the_reason(root: Path, tmp_path: Path) -> None:
    code = "from patches.seam import plugin; plugin.register()"
    run(root, "-c", code, PATCHBENCH_TELEMETRY=str(tmp_path), PATCHBENCH_EPOCH_NS="noon")
    (fault,) = collect(tmp_path).faults
    assert "ValueError" in fault and "noon" in fault


def test_the_engine_gets_no_heavy_imports(root: Path) -> None:
    code = (
        "import sys\n"
        "from harness.engines.live.telemetry import hooks\n"
        "heavy = {'pyarrow', 'pandas', 'numpy', 'aiohttp', 'pydantic', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run(root, "-c", code)

"""Guards `bench calibrate`: a step model that is known is found again from telemetry made with it, noise and stalls included.

Does not guard that a real machine's steps have such a form: the command itself says how far off they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from harness import step_fit
from harness.calibrate import calibrate
from harness.cli import app
from harness.engines.flags import EngineFlags
from harness.engines.live.telemetry.tables import BATCHES
from harness.errors import RunFailed, UserError
from harness.profiles import load_profile
from harness.profiles.model import StepTimeModel
from harness.schema import arrow_schema
from harness.step_fit import Rising
from harness.toml_text import toml_text

Chunks = list[tuple[int, int]]
GAP_US = 800
FLAGS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 32,
    "block_size": 32,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def true_us(chunks: Chunks, decodes: int, context: int) -> float:
    """A step of a machine that reads its weights once: few tokens cost little more than one, many in proportion."""
    tokens = sum(new for new, _ in chunks)
    work = sum(new * before + new * new / 2 for new, before in chunks)
    mixed = 1_500 if chunks and decodes else 0
    return (
        20_000
        + mixed
        + 150 * min(decodes, 8)
        + 400 * max(decodes - 8, 0)
        + 3 * context
        + 250 * tokens
        + 0.4 * work
    )


def draw(rng: np.random.Generator, kind: str) -> tuple[Chunks, int, int]:
    chunks: Chunks = []
    if kind != "decode":
        for _ in range(int(rng.integers(1, 3))):
            chunks.append((int(rng.integers(4, 128)), int(rng.choice([0, 0, 64, 512]))))
    decodes = int(rng.integers(1, 32)) if kind != "prefill" else 0
    return chunks, decodes, decodes * int(rng.integers(20, 1000))


def telemetry(kinds: dict[str, int], noise: float, seed: int = 0) -> tuple[pa.Table, pa.Table]:
    """Tables of steps in random order, one right after the other but for a pause now and then."""
    rng = np.random.default_rng(seed)
    order = [kind for kind, count in kinds.items() for _ in range(count)]
    rng.shuffle(order)
    at_ns = 0
    steps, batches = [], []
    for number, kind in enumerate(order):
        chunks, decodes, context = draw(rng, kind)
        us = true_us(chunks, decodes, context) * (1 + noise * rng.standard_normal())
        # The machine was busy with something else.
        us *= 12 if number % 97 == 50 else 1
        step: dict[str, Any] = {f.name: 0 for f in arrow_schema("steps")}
        step |= {
            "t_ns": at_ns,
            "start_ns": at_ns,
            "end_ns": at_ns + round(us * 1000),
            "running": 1,
            "scheduled": len(chunks) + decodes,
            "prefill_tokens": sum(new for new, _ in chunks),
            "decode_tokens": decodes,
            "kv_usage": 0.5,
        }
        steps.append(step)
        batch: dict[str, Any] = {f.name: 0 for f in BATCHES}
        batch |= {
            "step_us": us,
            "context_tokens": context,
            "chunk_tokens": [new for new, _ in chunks],
            "chunk_before": [before for _, before in chunks],
        }
        batches.append(batch)
        at_ns += round(us * 1000) + GAP_US * 1000 + (10**9 if number % 31 == 30 else 0)
    return (
        pa.Table.from_pylist(steps, schema=arrow_schema("steps")),
        pa.Table.from_pylist(batches, schema=BATCHES),
    )


@pytest.fixture
def live_run(tmp_path: Path) -> Callable[..., Path]:
    """A folder as `bench run --engine live` leaves it, as far as calibration reads it."""

    def make(kinds: dict[str, int], noise: float = 0.03) -> Path:
        model, run = tmp_path / "Small Model", tmp_path / "run"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        for arm, seed in (("stock", 0), ("tuned", 1)):
            folder = run / arm / f"seed-{seed}"
            folder.mkdir(parents=True)
            steps, batches = telemetry(kinds, noise, seed)
            pq.write_table(steps, folder / "steps.parquet")
            pq.write_table(batches, folder / "batches.parquet")
            flags = EngineFlags(**FLAGS, scheduling_policy="priority" if arm == "tuned" else "fcfs")
            manifest = {
                "arm": arm,
                "base": arm,
                "patches": [],
                "engine_flags": flags.model_dump(),
                "telemetry": {"step_time": "execution", "kv_blocks": 128},
                "host": {"cpu": 'A "Fast" Processor', "cores": 2, "memory_bytes": 8 * 10**9},
            }
            (folder / "manifest.json").write_text(json.dumps(manifest))
        plan = {"model_path": str(model), "sha256": "abc", "live": {"model_name": "Small Model"}}
        (run / "plan.json").write_text(json.dumps(plan))
        return run

    return make


def test_a_known_machine_is_found_again(live_run: Callable[..., Path], tmp_path: Path) -> None:
    run = live_run({"decode": 700, "prefill": 300, "mixed": 700})
    found = calibrate(run, tmp_path / "profile")
    assert set(found.fitted) == {"decode", "prefill", "mixed"} and found.records == 2
    # The noise is 3%, whose median absolute value is 2%.
    assert all(1.5 < found.held_out[kind].median_pct < 3.0 for kind in found.fitted)
    assert found.cpu_step_us == pytest.approx(GAP_US, rel=0.01)

    profile = load_profile(str(tmp_path / "profile"))
    assert profile.not_measured == [] and profile.measured and profile.name == "cpu/small-model"
    links = profile.transfers
    assert links is not None and min(links.h2d_bytes_per_s, links.disk_write_bytes_per_s) > 0
    assert profile.kv_blocks == 128 and profile.tuned == {"scheduling_policy": "priority"}
    assert EngineFlags(**profile.stock).async_scheduling is False
    model = StepTimeModel(profile)
    rng = np.random.default_rng(99)
    for kind in ("decode", "prefill", "mixed"):
        off = []
        for _ in range(300):
            chunks, decodes, context = draw(rng, kind)
            said = model.step_us(chunks, decodes, context, len(chunks) + decodes)
            off.append(said / true_us(chunks, decodes, context) - 1)
        assert np.median(np.abs(off)) < 0.01 and np.percentile(np.abs(off), 95) < 0.03, kind
        # Stalls and noise that is as often up as down do not make it slower or faster.
        assert abs(np.mean(off)) < 0.005, kind
    assert model.steps_outside < 0.05 * model.steps


def test_few_prefills_alone_are_read_from_mixed_steps(live_run: Callable[..., Path], tmp_path: Path) -> None:
    run = live_run({"decode": 300, "prefill": 8, "mixed": 500}, noise=0.01)
    profile = calibrate(run, tmp_path / "profile").profile
    assert profile.not_measured == ["prefill"]
    said = StepTimeModel(profile).step_us([(100, 0)], 0, 0, 1)
    # What a mixed step costs beyond its parts is in it, too.
    assert said == pytest.approx(true_us([(100, 0)], 0, 0) + 1_500, rel=0.05)


def test_regimes_that_were_not_seen_are_not_measured(live_run: Callable[..., Path], tmp_path: Path) -> None:
    run = live_run({"decode": 300, "prefill": 200, "mixed": 5})
    profile = calibrate(run, tmp_path / "profile").profile
    assert profile.not_measured == ["mixed"] and profile.domain.max_decodes_mixed == 0
    assert profile.tables.mixed is None


def test_what_is_no_basis_is_refused(live_run: Callable[..., Path], tmp_path: Path) -> None:
    run = live_run({"decode": 100, "prefill": 10, "mixed": 10})
    out = tmp_path / "profile"
    with pytest.raises(RunFailed, match="too few steps to fit"):
        calibrate(run, out)
    assert not out.exists()
    with pytest.raises(UserError, match="the run has stock, tuned"):
        calibrate(run, out, ["qos"])
    with pytest.raises(UserError, match=r"no batches\.parquet"):
        calibrate(tmp_path / "Small Model", out)
    (tmp_path / "Small Model" / "config.json").unlink()
    with pytest.raises(UserError, match="is not there any more"):
        calibrate(run, out)


def test_the_command_prints_the_error(live_run: Callable[..., Path], tmp_path: Path) -> None:
    run = live_run({"decode": 200, "prefill": 100, "mixed": 200})
    words = [
        "calibrate",
        str(run),
        str(tmp_path / "profile"),
        "--arm",
        "stock",
        "--json",
        str(tmp_path / "x.json"),
    ]
    done = CliRunner().invoke(app(), words)
    assert done.exit_code == 0, done.output
    assert "from 1 servers" in done.output and "next: bench run --profile" in done.output
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["held_out"]["all"]["rows"] == 100


def test_a_rising_function_goes_on_past_its_last_knot() -> None:
    f = Rising((4, 10), (2.0, 1.0))
    assert [f.at(x) for x in (0, 2, 4, 10, 20)] == [0, 4, 8, 14, 24]
    assert step_fit.NOTHING.at(5) == 0


def test_toml_is_read_back() -> None:
    import tomllib

    values = {"a": 'x "y" \\ ü\n', "b": [1, 2.5], "c": True, "t": {"d": 1e-05, "e": []}}
    assert tomllib.loads(toml_text(values)) == values
    with pytest.raises(TypeError):
        toml_text({"a": None})

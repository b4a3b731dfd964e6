"""The machine of a live run without a GPU: the flags that are compared on it, and its pace, measured once and kept."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.arms import Arm
from harness.atomic import write_json
from harness.engines.flags import EngineFlags
from harness.engines.live import host, pace
from harness.engines.live.command import CPU_BLOCK_SIZE
from harness.engines.live.loads import Engine, five_phases
from harness.engines.live.model import cache_folder
from harness.engines.live.pace import Pace
from harness.engines.live.served import ServedModel
from harness.engines.live.server import launch
from harness.engines.live.telemetry.collect import collect
from harness.engines.live.warmup import warm_up
from harness.live_plan import Machine
from harness.profiles.profile import FivePhase
from harness.worker import versions
from patches.seam.plugin import TELEMETRY_ENV

Say = Callable[[str], None]

LONGEST = 8192
# What vLLM 0.32.0's API server resolves on a CPU (`EngineArgs.get_batch_defaults`), with the block size that its
# attention there takes.
_STOCK: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "scheduling_policy": "fcfs"}
# A step of 2,048 prompt tokens takes seconds on a few cores, and all others wait for it: smaller chunks, and no
# more requests at once than its cache holds.
_TUNED: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 32, "scheduling_policy": "priority"}
_WARM_UP_S = 3.0


def cpu_machine(
    model: ServedModel, kv_cache_bytes: int, length_scale: float, *, again: bool, say: Say
) -> Machine:
    """The machine, calibrated now unless it was before.

    Args:
        again: measure its pace anew.
        say: told what is being done, when it takes long.

    Raises:
        RunFailed: the server for the calibration did not come up, or its steps say nothing.
    """
    longest = min(LONGEST, model.max_tokens)
    machine = Machine(
        name=f"cpu/{model.name}",
        title=f"{host.cpu_title()}, {host.cores()} cores",
        stock={"max_model_len": longest, "block_size": CPU_BLOCK_SIZE, **_STOCK},
        tuned=dict(_TUNED),
        five_phase=FivePhase(),
        max_model_len=longest,
    )
    if longest < _STOCK["max_num_batched_tokens"]:
        machine = replace(machine, stock={**machine.stock, "max_num_batched_tokens": max(longest, 128)})
    found = _known(machine, model, kv_cache_bytes, again=again, say=say)
    token_bytes = model.kv_token_bytes or kv_cache_bytes // longest
    flags = {**machine.stock, **machine.tuned}
    engine = Engine(flags["max_num_seqs"], flags["block_size"], kv_cache_bytes // token_bytes)
    sized = five_phases(found, engine, length_scale, model.vocab_size)
    return replace(machine, five_phase=sized, measured=found.to_json())


def _known(machine: Machine, model: ServedModel, kv_cache_bytes: int, *, again: bool, say: Say) -> Pace:
    """The pace from the cache, or measured and put there."""
    facts = {
        "machine": machine.title,
        "flags": {**machine.stock, **machine.tuned},
        "model": model.sha256,
        "kv_cache_bytes": kv_cache_bytes,
        "vllm": versions()["vllm"],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    path = cache_folder() / "machines" / f"{model.name}-{digest[:12]}.json"
    if not again:
        try:
            return Pace.from_json(json.loads(path.read_text(encoding="utf-8"))["pace"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            say(f"{path} is not readable; measuring again")
    say("measuring how fast this machine serves the model (a minute, once; --recalibrate does it again)")
    load = host.facts()
    found = _measured(machine, model, kv_cache_bytes, say)
    # As it will be read, so that the first run and the next are planned alike.
    write_json(path, {"pace": found.to_json(), **facts, "host": load})
    return Pace.from_json(found.to_json())


def _measured(machine: Machine, model: ServedModel, kv_cache_bytes: int, say: Say) -> Pace:
    arm = Arm("calibration", "tuned", EngineFlags(**{**machine.stock, **machine.tuned}), None)
    with tempfile.TemporaryDirectory(prefix="bench-pace-") as scratch:
        folder = Path(scratch)
        with launch(
            arm,
            model.folder,
            log_path=folder / "server.log",
            receipts_dir=folder / "receipts",
            env={TELEMETRY_ENV: str(folder / "telemetry")},
            kv_cache_bytes=kv_cache_bytes,
            say=say,
        ) as server:
            warm_up(server, model.vocab_size, _WARM_UP_S, arm.flags.max_model_len)
            first_token_s = pace.measure(server, model.vocab_size)
        return pace.fit(collect(folder / "telemetry"), first_token_s)

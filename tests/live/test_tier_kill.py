"""Guards the disk tier of a real server against `kill -9`: what it leaves is whole or known not to be, and serves again.

Three servers, one after the other: without tiers, with them until they are killed amid traffic, and with them again on
the same folder, of which one file was cut and of another one bit flipped. What the tiers keep, and when, is for
tests/kv; what a disk may do to a file, for tests/kv/test_tier_files.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.arms import Arm
from harness.engines.flags import EngineFlags
from harness.engines.live import processes
from harness.engines.live.endpoint import Endpoint
from harness.engines.live.server import Server, launch
from patches.kv.tiers.files import HEADER_BYTES, BadBlock, TierFolder, tenant_digest
from patches.seam.plan import resolve
from tests.live import served_model

pytestmark = [pytest.mark.live, pytest.mark.slow]

BLOCK_TOKENS = 32
# Two layers, keys and values, two heads of 32 numbers of four bytes.
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK_TOKENS
FLAGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "block_size": BLOCK_TOKENS,
}
# The prompts have ten blocks each, 120 in all: far more than the pool, which holds three, and host memory, which holds two.
PROMPTS, PROMPT_TOKENS, POOL_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 12, 330, 36, 24, 400
KNOBS = {
    "host_bytes": HOST_BLOCKS * BLOCK_BYTES,
    "disk_bytes": DISK_BLOCKS * (BLOCK_BYTES + HEADER_BYTES),
    "disk_from_rank": 0,
    # A model this small computes faster than it copies: come back whatever it costs.
    "reload_min_blocks": 1,
    "reload_cost_ratio": 100.0,
    "token_recompute_us": 1e6,
    "reload_patience_ms": 5000.0,
}


@dataclass(frozen=True)
class Chain:
    """A prompt's blocks on the disk, from the first on without a gap."""

    prompt: int
    paths: tuple[Path, ...]


@contextlib.contextmanager
def served(folder: Path, name: str, model: Path, disk: Path | None) -> Iterator[Server]:
    """A server, with tiers where it is given a folder for them."""
    plan = None if disk is None else resolve("tiering", knobs={"tiering": KNOBS | {"disk_folder": str(disk)}})
    brought = {} if plan is None else plan.engine_flags
    with launch(
        Arm(name, "tuned", EngineFlags(**FLAGS, **brought), plan),
        model,
        log_path=folder / f"{name}.log",
        receipts_dir=folder / f"receipts-{name}",
        engine_extra=(f"--num-gpu-blocks-override={POOL_BLOCKS}",),
    ) as server:
        yield server


def made_up(seed: int, count: int) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, served_model.VOCABULARY, PROMPT_TOKENS).tolist() for _ in range(count)]


def answer(at: Endpoint, model: str, prompt: Sequence[int], max_tokens: int = 8) -> list[int]:
    """Greedy tokens."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, text = at.call("POST", "/v1/completions", body, timeout_s=60)
    assert status == 200, text
    found: list[int] = json.loads(text)["choices"][0]["token_ids"]
    return found


def answers(server: Server, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """One after the other: each finds what those before it have pushed down."""
    return [answer(server.endpoint, server.model_name, prompt) for prompt in prompts]


def files(disk: Path) -> list[Path]:
    """The blocks' files, those half written apart."""
    return sorted(disk.rglob("[!.]*.kv"))


def busy(at: Endpoint) -> bool:
    """Whether some request is in the engine's steps."""
    _, text = at.call("GET", "/metrics")
    running = (line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in running)


def killed_amid(server: Server, prompts: Sequence[Sequence[int]]) -> int:
    """Kill all its processes while it answers; how many answers were cut off."""
    server.note_shared_memory()
    ours = [server.guard.pid, *(one.pid for one in processes.descendants(server.guard.pid))]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(answer, server.endpoint, server.model_name, prompt, 400) for prompt in prompts]
        deadline_s = time.monotonic() + 30
        while not busy(server.endpoint) and time.monotonic() < deadline_s:
            pass
        for pid in ours:
            # One may end by itself when another is gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return sum(future.exception(timeout=60) is not None for future in asked)


def chains(disk: Path, prompts: Sequence[Sequence[int]]) -> list[Chain]:
    """What of each prompt is on the disk, the longest first; vLLM's own hashes name the files."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hashed = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hashed)
    found = []
    by_name = {path.stem: path for path in files(disk)}
    for number, prompt in enumerate(prompts):
        parent, paths = None, list[Path]()
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = kv_cache_utils.hash_block_tokens(hashed, parent, prompt[start : start + BLOCK_TOKENS])
            if (path := by_name.get(parent.hex())) is None:
                break
            paths.append(path)
        found.append(Chain(number, tuple(paths)))
    return sorted(found, key=lambda chain: -len(chain.paths))


def faults(disk: Path) -> list[str]:
    """What cannot be read back as it was written; another engine's lock would stop us here."""
    (model,) = (path for path in disk.iterdir() if path.is_dir())
    folder, block, out = TierFolder(disk, bytes.fromhex(model.name), BLOCK_BYTES), bytearray(BLOCK_BYTES), []
    for path in files(disk):
        key = tenant_digest("") + bytes.fromhex(path.stem)
        assert folder.path(key) == path
        try:
            folder.read(key, memoryview(block))
        except BadBlock as error:
            out.append(str(error))
    folder.close()
    return out


def test_killed_and_damaged_it_answers_as_before(tmp_path: Path) -> None:
    disk, prompts, others = tmp_path / "tier", made_up(1, PROMPTS), made_up(2, 8)
    with served_model.alone():
        model = served_model.make_small_llama(tmp_path / "small-llama")
        with served(tmp_path, "plain", model, None) as server:
            expected = answers(server, prompts)
        with served(tmp_path, "killed", model, disk) as server:
            # Asked again they are worth keeping.
            assert answers(server, prompts) == expected
            assert answers(server, prompts) == expected
            assert killed_amid(server, others) > 0
        assert server.ended is not None and not server.ended.left

        left = files(disk)
        assert len(left) > HOST_BLOCKS
        assert not faults(disk)
        assert {path.stat().st_size for path in left} == {BLOCK_BYTES + HEADER_BYTES}
        cut, flipped, *_ = (chain.paths[1] for chain in chains(disk, prompts) if len(chain.paths) > 3)
        os.truncate(cut, BLOCK_BYTES // 2)
        damaged = bytearray(flipped.read_bytes())
        damaged[HEADER_BYTES + BLOCK_BYTES // 2] ^= 1
        flipped.write_bytes(damaged)

        with served(tmp_path, "again", model, disk) as server:
            kept = files(disk)
            assert cut not in kept and flipped in kept
            assert answers(server, prompts) == expected
    told = [r["metrics"]["tiering"] for r in server.receipts().values() if "tiering" in r.get("metrics", {})]
    counted = max(told, key=lambda one: one.get("asked_tokens", 0))
    assert counted["disk_hit_tokens"] > BLOCK_TOKENS
    assert counted["disk_bad_blocks"] == 1

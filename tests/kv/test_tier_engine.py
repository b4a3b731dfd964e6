"""Guards that KV blocks come back from host memory and disk as they went: on a real model, greedy outputs are the same.

The engine is real (CPU, in process, synchronous scheduling), the pool small enough that requests are preempted and
cached blocks evicted. A control spoils blocks on their way back, and must change outputs: a comparison that
could not tell would be worth nothing. Not here: CUDA, where upstream's worker copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils

from patches.kv.tiers import copy_worker
from patches.kv.tiers.connector import TieringConnector
from tests.kv.tier_engine import (
    BLOCK_BYTES,
    EAGER,
    churn,
    prompts,
    scheduler_of,
    serve,
    tiered_engine,
    tiers_of,
)
from tests.real.conftest import _no_forced_collections, small_model  # noqa: F401


@pytest.fixture(scope="module")
def expected(small_model: Path) -> list[list[int]]:  # noqa: F811
    """What vLLM as it is generates."""
    with tiered_engine(small_model, None) as engine:
        outputs = churn(engine)
    assert len({tuple(tokens) for tokens in outputs}) > 20, "outputs too alike to tell a mix-up"
    return outputs


def test_round_trips_through_host_memory_change_nothing(
    small_model: Path,  # noqa: F811
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    update = TieringConnector.update_connector_output

    def noted(self: Any, output: Any) -> None:
        if output.kv_connector_worker_meta is not None:
            told.append(output.kv_connector_worker_meta.transfer_stats)
        update(self, output)

    monkeypatch.setattr(TieringConnector, "update_connector_output", noted)
    with tiered_engine(small_model, EAGER | {"host_bytes": 400 * BLOCK_BYTES}) as engine:
        assert churn(engine) == expected
        tiers = tiers_of(engine)
        assert tiers.recoveries.preempted > 0
        assert tiers.counts.d2h_bytes > 0 and tiers.counts.loads > 20
        assert 0 < tiers.counts.loads_within_step <= tiers.counts.loads
        # Loads within steps say how fast the link is, too, and are no saves.
        assert sum(stats.load.bytes for stats in told) == tiers.counts.h2d_bytes
        assert sum(stats.store.bytes for stats in told) == tiers.counts.d2h_bytes
        pool = scheduler_of(engine).kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1


def test_loads_beside_steps_change_nothing(small_model: Path, expected: list[list[int]]) -> None:  # noqa: F811
    with tiered_engine(
        small_model, EAGER | {"host_bytes": 400 * BLOCK_BYTES, "reload_sync_ms": 0.0}
    ) as engine:
        assert churn(engine) == expected
        counts = tiers_of(engine).counts
        assert counts.loads > 20 and counts.loads_within_step == 0


def test_spoiled_blocks_do_change_outputs(
    small_model: Path,  # noqa: F811
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = copy_worker.CopyWorker._copy

    def spoiled(self: Any, job: int, blocks: Any, slots: Any, to_host: bool) -> None:
        copy(self, job, blocks, slots, to_host)
        if not to_host:
            for device in self._device:
                # Half of each block's bytes as they are, half of the first one's in the other order.
                device[blocks] = device[blocks].flip(0)

    monkeypatch.setattr(copy_worker.CopyWorker, "_copy", spoiled)
    with tiered_engine(small_model, EAGER | {"host_bytes": 400 * BLOCK_BYTES}) as engine:
        outputs = churn(engine)
        assert tiers_of(engine).counts.loads > 20
    assert outputs != expected


@pytest.fixture
def disk_knobs(tmp_path: Path) -> dict[str, Any]:
    return EAGER | {
        "host_bytes": 40 * BLOCK_BYTES,
        "disk_bytes": 2000 * BLOCK_BYTES,
        "disk_folder": str(tmp_path / "tier"),
        "disk_from_rank": 0,
    }


def test_round_trips_through_the_disk_change_nothing(
    small_model: Path,  # noqa: F811
    expected: list[list[int]],
    disk_knobs: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in a new process: no engine has been there before this one.
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)
    with tiered_engine(small_model, disk_knobs) as engine:
        assert churn(engine) == expected
        disk = tiers_of(engine).disk
        assert disk.counts.to_disk_bytes > 0 and disk.counts.from_disk_bytes > 0
        assert disk.counts.bad_blocks == 0
        assert len(tiers_of(engine).host) <= 40
    files = list(Path(disk_knobs["disk_folder"]).rglob("*.kv"))
    assert files
    assert not list(Path(disk_knobs["disk_folder"]).rglob("*.tmp"))


def test_damaged_files_are_computed_anew(
    small_model: Path,  # noqa: F811
    expected: list[list[int]],
    disk_knobs: dict[str, Any],
) -> None:
    """One byte of each file is turned while the engine runs, or the file cut or removed: found, and not used."""
    asked = prompts(24)
    with tiered_engine(small_model, disk_knobs) as engine:
        first = serve(engine, asked, "a", wave="x")
        disk = tiers_of(engine).disk
        files = sorted(Path(disk_knobs["disk_folder"]).rglob("*.kv"))
        assert len(files) > 20
        for number, path in enumerate(files):
            if number % 3 == 0:
                data = bytearray(path.read_bytes())
                data[-100] ^= 1
                path.write_bytes(data)
            elif number % 3 == 1:
                path.write_bytes(path.read_bytes()[:-1])
            else:
                path.unlink()
        second = serve(engine, asked, "a", wave="y")
        assert disk.counts.bad_blocks > 0
    assert first + second == expected

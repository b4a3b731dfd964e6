"""Copies between the KV cache and the host tier where there is no GPU: by a thread, beside the model's steps."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult


class CopyWorker(OffloadingWorker):
    """What upstream's CUDA worker does, with memory copies; one thread, so transfers end in order.

    Args:
        kv_caches: the engine's KV cache, a row a block. region: the host tier's memory, a row a block.
    """

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._device = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._host = [region.create_next_worker_view(t.page_size_bytes) for t in kv_caches.tensors]
        self._pool = ThreadPoolExecutor(1, "kv-tier-copy")
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[None]] = {}
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """GPU blocks to slots."""
        self._begin(job_id, src_spec, dst_spec, to_host=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Slots to GPU blocks."""
        self._begin(job_id, dst_spec, src_spec, to_host=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers that have ended since the last call."""
        with self._lock:
            results, self._results = self._results, []
        for result in results:
            # Raises what the copy raised: the bytes are not where they are said to be.
            self._under_way.pop(result.job_id).result()
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return when these have ended."""
        for job in sorted(job_ids):
            future = self._under_way.get(job)
            if future is not None:
                future.result()

    def shutdown(self) -> None:
        """End, and give the memory back."""
        self._pool.shutdown()
        self._device.clear()
        self._host.clear()
        self._region.cleanup()

    def _begin(self, job_id: int, gpu: Any, cpu: Any, *, to_host: bool) -> None:
        blocks = torch.from_numpy(gpu.block_ids.astype("int64"))
        slots = torch.from_numpy(cpu.block_ids.astype("int64"))
        self._under_way[job_id] = self._pool.submit(self._copy, job_id, blocks, slots, to_host)

    def _copy(self, job_id: int, blocks: Any, slots: Any, to_host: bool) -> None:
        began = time.perf_counter()
        moved = 0
        try:
            for device, host in zip(self._device, self._host, strict=True):
                if to_host:
                    host[slots] = device[blocks]
                else:
                    device[blocks] = host[slots]
                moved += len(blocks) * device.shape[1]
        finally:
            with self._lock:
                self._results.append(TransferResult(job_id, True, moved, time.perf_counter() - began))

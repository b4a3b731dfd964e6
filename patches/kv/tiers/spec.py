"""Where the host tier's memory lies, and what copies to and from it: upstream's, but for the CPU platform."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from patches.kv.tiers.copy_worker import CopyWorker
from patches.kv.tiers.files import MODEL_BYTES


class TierSpec(TieringOffloadingSpec):
    """Upstream's tiering specification without its manager: the region shared by scheduler and workers, the CUDA worker."""

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker for this platform."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        return CopyWorker(kv_caches, self.region(self.config.parallel.rank))

    def region(self, rank: int | None) -> Any:
        """The host tier's memory; the scheduler's view of it has no rank."""
        return SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )


def model_digest(config: Any, facts: Mapping[str, Any]) -> bytes:
    """What tells the blocks of one model, in one layout, from those of another.

    Block hashes are of tokens. So this is of all else: the weights (a local folder's files by name, size and time),
    precision, the layout of a block, and what the hashes start from (`facts`).
    """
    folder = Path(config.model.name)
    weights = []
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_file():
                weights.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
    told = (
        config.model,
        config.groups,
        config.cache,
        config.parallel,
        config.worker_kv_bytes_per_block,
        config.kv_cache_layout,
        weights,
        sorted(facts.items()),
    )
    return hashlib.blake2b(repr(told).encode(), digest_size=MODEL_BYTES, person=b"kv tier model").digest()

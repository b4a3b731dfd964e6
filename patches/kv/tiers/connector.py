"""The KV connector that `tiering` brings along: vLLM's calls, handed to the scheduler's side or to the worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from patches.kv.tiers import disk_io
from patches.kv.tiers.cache import BlockCache
from patches.kv.tiers.disk import DiskTier
from patches.kv.tiers.disk_io import ThreadedDisk
from patches.kv.tiers.files import TierFolder
from patches.kv.tiers.jobs import Move
from patches.kv.tiers.knobs import TieringKnobs
from patches.kv.tiers.rates import Link
from patches.kv.tiers.scheduler import TierScheduler

#: The key of `kv_connector_extra_config` under which the patch's knobs stand.
KNOBS_KEY = "tiering"
#: What `kv_connector` and `kv_connector_module_path` say.
NAME, MODULE = "TieringConnector", __name__


class TierConfigError(ValueError):
    """The engine cannot have tiers; says why and what to change."""


@dataclass
class TierMetadata(OffloadingConnectorMetadata):
    """A step's transfers; `sync_loads` must end before its forward pass."""

    sync_loads: dict[int, Any] = field(default_factory=dict)


class TierWorker(OffloadingConnectorWorker):
    """Upstream's worker, which also makes loads that the step itself needs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Loads within steps whose end has not been told. Upstream's own list is of those that somebody waits for.
        self._sync_jobs: set[int] = set()

    def start_kv_transfers(self, metadata: Any) -> None:
        """Begin this step's loads; those that the step needs are done on return."""
        super().start_kv_transfers(metadata)
        if not metadata.sync_loads:
            return
        for job_id, entry in metadata.sync_loads.items():
            begun = self.worker.submit_load(job_id, entry.src_spec, entry.dst_spec)
            assert begun
        self._sync_jobs.update(metadata.sync_loads)
        self.worker.wait(set(metadata.sync_loads))
        metadata.sync_loads = {}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As upstream's: (none, requests whose loads have ended); loads within steps are recorded as loads too."""
        received: set[str] = set()
        told = self._connector_worker_meta
        for ended in self.worker.get_finished():
            assert ended.success
            within, waits = ended.job_id in self._sync_jobs, self._load_jobs.pop(ended.job_id, None)
            if ended.transfer_size is not None and ended.transfer_time is not None:
                is_load = within or waits is not None
                stats = told.transfer_stats.load if is_load else told.transfer_stats.store
                stats.record(ended.transfer_size, ended.transfer_time)
            told.mark_completed(ended.job_id)
            self._sync_jobs.discard(ended.job_id)
            if waits is not None:
                received.add(waits)
        return set(), received


class TieringConnector(KVConnectorBase_V1, SupportsHMA):
    """Tiers below the GPU's KV cache. Without the patch `tiering` in force it moves nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        knobs = TieringKnobs(**extra[KNOBS_KEY])
        _check(vllm_config, kv_cache_config)
        extra.setdefault("cpu_bytes_to_use", knobs.host_bytes)
        config = build_offloading_config(vllm_config, kv_cache_config)
        # It maps memory as soon as it is asked for a worker or a region, and not before.
        from patches.kv.tiers.spec import TierSpec

        self._spec = TierSpec(config)
        if self._spec.num_chunks < 1:
            raise TierConfigError(
                f"tiering.host_bytes {knobs.host_bytes} holds no block of {self._spec.kv_bytes_per_chunk} bytes; "
                "give more"
            )
        self.tiers: TierScheduler | None = None
        self._worker: TierWorker | None = None
        self._region: Any = None
        self._rows: memoryview | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.tiers = self._scheduler_side(vllm_config, knobs)
        else:
            self._worker = TierWorker(self._spec, vllm_config, kv_cache_config)

    def _scheduler_side(self, vllm_config: Any, knobs: TieringKnobs) -> TierScheduler:
        block_bytes = self._spec.kv_bytes_per_chunk
        block_tokens = self._spec.config.cache.tokens_per_hash
        played = disk_io.simulated()
        if not knobs.disk_bytes:
            return TierScheduler(knobs, block_tokens, block_bytes)
        if played is None and not knobs.disk_folder:
            raise TierConfigError(
                "tiering.disk_bytes is set; set tiering.disk_folder to a folder of this engine's own"
            )

        def make_disk(host: BlockCache) -> DiskTier:
            link = Link(knobs.disk_bytes_per_s)
            if played is not None:
                slots = knobs.disk_bytes // block_bytes
                return DiskTier(
                    _some(slots), block_bytes, played(block_bytes), host, link, knobs.disk_retry_s
                )
            from patches.kv.tiers.spec import model_digest

            algorithm = vllm_config.cache_config.prefix_caching_hash_algo
            # The scheduler is made before the engine settles the root of its hashes, so what it is derived from has
            # to do. Where that is random, files of another process are of no use, and are not found.
            facts = {
                "root": kv_cache_utils.resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
                "algorithm": algorithm,
            }
            folder = TierFolder(Path(knobs.disk_folder), model_digest(self._spec.config, facts), block_bytes)
            slots = _some(knobs.disk_bytes // folder.file_bytes)
            found = folder.sweep()
            self._region = self._spec.region(None)
            self._rows = self._region.create_kv_memoryview()
            io = ThreadedDisk(folder, self._rows)
            return DiskTier(slots, block_bytes, io, host, link, knobs.disk_retry_s, found)

        return TierScheduler(knobs, block_tokens, block_bytes, make_disk)

    # the scheduler's side

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, no more."""
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens below the GPU that are worth loading."""
        assert self.tiers is not None
        return self.tiers.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks."""
        assert self.tiers is not None
        self.tiers.allocated(request, blocks.blocks[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TierMetadata:
        """This step's transfers."""
        assert self.tiers is not None
        block_tokens, moves = self._spec.config.cache.tokens_per_hash, self.tiers.moves
        if moves.reads:
            # Most were told of as they lost their hash. After a reset of the prefix cache they have none to lose.
            moves.overwritten(_to_be_written(scheduler_output, block_tokens))
            for move in (*moves.loads.values(), *moves.sync_loads.values()):
                moves.overwritten(move.gpu_blocks)
        self.tiers.scheduled(_new_blocks(scheduler_output, block_tokens))
        saves, loads, sync_loads, flush = moves.take()
        return TierMetadata(
            load_jobs={job: _job(move) for job, move in loads.items()},
            store_jobs={job: _job(move) for job, move in saves.items()},
            jobs_to_flush=flush,
            sync_loads={job: _job(move) for job, move in sync_loads.items()},
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker reports."""
        assert self.tiers is not None
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, OffloadingWorkerMetadata):
            return
        self.tiers.completed(sorted(meta.completed_jobs))
        load = meta.transfer_stats.load
        self.tiers.rates.load.measured(load.bytes, load.time)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may be freed: what is saved is watched."""
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether transfers are under way whose end only a step reports."""
        return self.tiers is not None and self.tiers.busy

    def reset_cache(self) -> bool:
        """Forget everything below the GPU."""
        assert self.tiers is not None
        self.tiers.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """None are told."""
        return ()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """As upstream's offloading: the layer outermost, so that a block of it is one piece."""
        return "LBHNC"

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV cache."""
        assert self._worker is not None
        self._worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before a step: saves whose blocks it overwrites end now."""
        assert self._worker is not None
        self._worker.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        assert self._worker is not None
        self._worker.start_kv_transfers(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads that a step needs are done before it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole."""

    def wait_for_save(self) -> None:
        """Saves begin with the next step, when this one's tokens are on their way."""
        assert self._worker is not None
        self._worker.prepare_store_kv(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads have ended."""
        assert self._worker is not None
        sent, received = self._worker.get_finished(finished_req_ids)
        return sent, received

    def build_connector_worker_meta(self) -> Any:
        """Which transfers have ended, and what they took."""
        return self._worker.build_connector_worker_meta() if self._worker is not None else None

    def shutdown(self) -> None:
        """End threads and give memory back."""
        if self._worker is not None:
            self._worker.shutdown()
        if self.tiers is not None and self.tiers.disk is not None:
            self.tiers.disk.close()
        if self._rows is not None:
            self._rows.release()
            self._rows = None
        if self._region is not None:
            self._region.cleanup()
            self._region = None


def _job(move: Move) -> Any:
    gpu = GPULoadStoreSpec(list(move.gpu_blocks), group_sizes=[len(move.gpu_blocks)], block_indices=[0])
    host = CPULoadStoreSpec(list(move.slots))
    source, target = (host, gpu) if move.is_load else (gpu, host)
    return TransferJob(req_id=move.request_id, src_spec=source, dst_spec=target)


def _new_blocks(scheduler_output: Any, block_tokens: int) -> int:
    """Blocks that a pass handed out, those of loads beside steps apart."""
    count = 0
    for new in scheduler_output.scheduled_new_reqs:
        count += max(0, len(new.block_ids[0]) - new.num_computed_tokens // block_tokens)
    for ids in filter(None, scheduler_output.scheduled_cached_reqs.new_block_ids):
        count += len(ids[0])
    return count


def _to_be_written(scheduler_output: Any, block_tokens: int) -> Iterator[int]:
    """Blocks that a pass handed out and writes to: not those whose tokens were found, or are loaded."""
    for new in scheduler_output.scheduled_new_reqs:
        yield from new.block_ids[0][new.num_computed_tokens // block_tokens :]
    cached = scheduler_output.scheduled_cached_reqs
    for name, ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if ids is not None:
            # All of one that resumes are named; of others those that are new.
            yield from ids[0][computed // block_tokens if name in cached.resumed_req_ids else 0 :]


def _some(slots: int) -> int:
    if slots < 1:
        raise TierConfigError("tiering.disk_bytes holds no block; give more, or 0 for no disk tier")
    return slots


def _check(vllm_config: Any, kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
        raise TierConfigError(
            "tiering serves models with full attention in all layers and one group of KV blocks; this one has "
            f"{len(groups)} groups; leave tiering out"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise TierConfigError("tiering names blocks by their prefix hashes: leave enable_prefix_caching on")
    _, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if hash_tokens != spec.block_size:
        raise TierConfigError(
            f"tiering needs a hash for each KV block, but blocks have {spec.block_size} tokens and hashes are of "
            f"{hash_tokens}"
        )

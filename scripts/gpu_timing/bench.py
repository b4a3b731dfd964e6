"""One device with one model's kernels on it: set up, checked, and asked for the time of any row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import UserError
from scripts.gpu_timing import check
from scripts.gpu_timing.attention import ONE_CALL, TWO_CALLS, Attention
from scripts.gpu_timing.dense import Dense
from scripts.gpu_timing.device import Device
from scripts.gpu_timing.kernels import Kernel, Sdpa, TorchFlash, Unavailable, VllmFlash
from scripts.gpu_timing.kv import KvCache
from scripts.gpu_timing.rows import ATTENTION, DENSE, PER_SEQUENCE, Block, Row, largest
from scripts.gpu_timing.timer import Call, Sample, Timer
from scripts.gpu_timing.work import Ceilings, kv_token_bytes, kv_tokens, work_of

if TYPE_CHECKING:
    from harness.profiles.shape import ModelShape

FASTER = "faster of both"
# Of the free memory, what the cache may take: outputs, graphs and the allocator's rounding need the rest.
_CACHE_SHARE = 0.8
_CHECK_TOKENS = 16384
_CPU_PAGE = 16
# Long enough that an event's resolution (0.5 us) and a graph's start do not count.
TARGET_US = {"cuda": 400.0, "cpu": 1.0}
_MAX_LAUNCHES = 64


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user may ask for: `kernel` auto, vllm or torch; `mixed` auto, or how a mixed batch is called."""

    kernel: str = "auto"
    mixed: str = "auto"
    fuse: bool = True


class Bench:
    """Times rows. `failures` says which kernels were tried and why they are not used."""

    def __init__(
        self,
        device: Device,
        shape: ModelShape,
        timer: Timer,
        ceilings: Ceilings,
        blocks: Sequence[Block],
        choices: Choices,
    ) -> None:
        """Allocate, choose the attention kernel and check it.

        Raises:
            UserError: no kernel works here.
        """
        self._device, self._shape, self._timer, self._ceilings = device, shape, timer, ceilings
        self.failures: list[str] = []
        common = {"l2_bytes": device.l2_bytes, "dtype": device.dtype, "device": device.kind}
        max_tokens = max(largest(blocks, DENSE), largest(blocks, ATTENTION))
        self.dense = Dense(
            shape,
            max_tokens=max_tokens,
            max_sequences=largest(blocks, PER_SEQUENCE),
            fuse=choices.fuse and device.kind == "cuda",
            **common,
        )
        kernel, self.check_error = self._choose(choices.kernel, common)
        self.mixed = self._mixed_way(choices.mixed, kernel)
        keys = [
            kv_tokens(r.sizes) + 256 * (r.sizes[2] + 1)
            for b in blocks
            for r in b.rows
            if r.table == ATTENTION
        ]
        room = int(_CACHE_SHARE * device.free_bytes()) // kv_token_bytes(shape)
        cache = self._cache(kernel, min(max(keys, default=1), room))
        self.attention = Attention(shape, kernel, cache, max_tokens=max_tokens, **common)
        # More than one sequence on a page only where the device is too small.
        self.cache_tokens, self.cache_wanted = cache.tokens, max(keys, default=1)

    def estimate_us(self, row: Row) -> float:
        """About how long one launch of a row takes."""
        return self._ceilings.us(work_of(row, self._shape))

    def launches(self, row: Row) -> int:
        """How many launches share one pair of events."""
        wanted = int(TARGET_US[self._device.kind] / self.estimate_us(row)) + 1
        return min(wanted, _MAX_LAUNCHES)

    def time(self, row: Row) -> dict[str, Any]:
        """The time of a row, as it is kept; raises TooLarge or OutOfMemoryError where it does not fit."""
        count = self.launches(row)
        if row.table != ATTENTION:
            return _kept(self._timer.time(self.dense.calls(row.layer, row.sizes[0], count)))
        if self.mixed != FASTER or not (row.sizes[0] and row.sizes[2]):
            return _kept(self._timer.time(self._attend(row, count, self.mixed)))
        both = {way: self._timer.time(self._attend(row, count, way)) for way in (ONE_CALL, TWO_CALLS)}
        best = min(both, key=lambda way: both[way].us)
        return _kept(both[best]) | {"way": best, **{f"{w} us": round(s.us, 4) for w, s in both.items()}}

    def _attend(self, row: Row, count: int, way: str) -> list[Call]:
        return self.attention.calls(row.sizes, count, way)

    def _cache(self, kernel: Kernel, tokens: int) -> KvCache:
        return KvCache(
            self._shape, tokens, kernel.page, dtype=self._device.dtype, device=self._device.kind, seed=0
        )

    def _choose(self, wanted: str, common: dict[str, Any]) -> tuple[Kernel, float]:
        """The first kernel that is there and right."""
        shape, device = self._shape, self._device
        makers: dict[str, Any] = {
            "vllm": lambda: VllmFlash(shape, device.capability, device.dtype),
            "torch, paged": lambda: TorchFlash(shape, paged=True),
            "torch": lambda: TorchFlash(shape, paged=False),
        }
        if device.kind == "cpu":
            makers = {"torch": lambda: Sdpa(_CPU_PAGE)}
        for name, make in makers.items():
            if wanted not in ("auto", name.split(",")[0]):
                continue
            try:
                kernel = make()
                tokens = max(sum((c, k, n * (x + 256), 512)) for c, k, n, x in check.BATCHES)
                attention = Attention(
                    shape, kernel, self._cache(kernel, max(tokens, _CHECK_TOKENS)), max_tokens=64, **common
                )
                error = check.check(attention)
                device.synchronize()
            # A kernel that is missing, refuses these shapes or computes something else: the next one, then.
            except (Unavailable, check.WrongResult, RuntimeError, TypeError, AssertionError) as problem:
                self.failures.append(
                    f"{name}: {str(problem).splitlines()[0] if str(problem) else type(problem).__name__}"
                )
                continue
            return kernel, error
        raise UserError(
            "no attention kernel for batches of unequal sequences works here ("
            + "; ".join(self.failures or [f"--attention {wanted} has none on {device.kind}"])
            + "); FlashAttention needs compute capability 8.0"
        )

    def _mixed_way(self, wanted: str, kernel: Kernel) -> str:
        if wanted != "auto":
            return wanted
        # From capability 9 on vLLM's kernels spread a long decode over thread blocks beside a chunk, which
        # version 2 does not do in one call: in two it does, and the truth is near the faster.
        old = isinstance(kernel, TorchFlash) and self._device.capability[0] >= 9
        return FASTER if old else ONE_CALL


def _kept(sample: Sample) -> dict[str, Any]:
    return {
        "us": round(sample.us, 4),
        "spread_pct": round(sample.spread_pct, 2),
        "launches": sample.launches,
        "repeats": sample.repeats,
        "how": sample.how,
    }

"""What a reload takes and what recomputing would: measured, with the knobs as a start."""

from __future__ import annotations

from patches.kv.tiers.knobs import TieringKnobs

# Transfers over which a bandwidth is averaged.
_TRANSFERS = 32.0
# A transfer below this says more of its launch than of the link.
_TELLING_BYTES = 2**20


class Link:
    """Bandwidth of one link, and how much is under way on it."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._measured = 0
        self.under_way_bytes = 0

    def begin(self, size: int) -> None:
        """A transfer was handed over."""
        self.under_way_bytes += size

    def end(self, size: int) -> None:
        """It is done, one way or another."""
        self.under_way_bytes -= size

    def measured(self, size: int, seconds: float) -> None:
        """What transfers of `size` bytes took, without waiting for others."""
        if size < _TELLING_BYTES or seconds <= 0:
            return
        self._measured += 1
        self.bytes_per_s += (size / seconds - self.bytes_per_s) / min(self._measured, _TRANSFERS)

    def seconds(self, size: int) -> float:
        """Until a transfer that is begun now would be done."""
        return (self.under_way_bytes + size) / self.bytes_per_s


class Rates:
    """Prices of an engine: its links and its prefill."""

    def __init__(self, knobs: TieringKnobs) -> None:
        self.load = Link(knobs.host_bytes_per_s)
        self.disk_read = Link(knobs.disk_bytes_per_s)
        self._prior_token_s = knobs.token_recompute_us / 1e6
        self.token_s = 0.0

    def recompute_s(self, tokens: int) -> float:
        """Computing so many prompt tokens anew."""
        return tokens * (self.token_s or self._prior_token_s)

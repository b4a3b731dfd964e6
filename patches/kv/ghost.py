"""A bounded memory of evicted blocks: arrays only, no object per entry."""

from __future__ import annotations

from array import array
from struct import Struct

# The first 8 bytes of a block's hash; also of a hash with its group id behind it.
_key = Struct("<Q").unpack_from


class GhostTable:
    """Remembers, by hash, which segment evicted a block and when.

    Direct-mapped: a newer entry overwrites an older one in its slot, so an entry lives for about as many
    evictions as there are slots, and 16 bytes a slot is all the memory there will ever be. KV cache groups
    that share a hash share its entry.

    Args:
        slots: least number of slots; rounded up to a power of two.
    """

    def __init__(self, slots: int) -> None:
        size = 1 << max(0, slots - 1).bit_length()
        self._mask = size - 1
        # Key and value side by side, since each access is a miss of the processor's cache.
        self._rows = array("Q", bytes(16 * size))

    def __len__(self) -> int:
        return self._mask + 1

    def __contains__(self, block_hash: bytes) -> bool:
        (key,) = _key(block_hash)
        return bool(self._rows[2 * (key & self._mask)] == key)

    def put(self, block_hash: bytes, segment: int, eviction: int) -> None:
        """Note that segment 0 or 1 evicted this block as the `eviction`-th of that segment."""
        (key,) = _key(block_hash)
        place = 2 * (key & self._mask)
        self._rows[place] = key
        self._rows[place + 1] = eviction << 1 | segment

    def take(self, block_hash: bytes) -> tuple[int, int]:
        """Forget a block that is in the table; its (segment, eviction)."""
        (key,) = _key(block_hash)
        place = 2 * (key & self._mask)
        # The complement belongs to another slot, so nothing looked up here can match it.
        self._rows[place] = ~key & 0xFFFF_FFFF_FFFF_FFFF
        value = self._rows[place + 1]
        return value & 1, value >> 1

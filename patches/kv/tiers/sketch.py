"""How often a block was asked for lately, in a few bytes a block."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from patches.kv.tiers.files import TENANT_BYTES

_ROWS = 4
_LIMIT = 15
_HALVED = bytes(value // 2 for value in range(256))
_long, _short = Struct(">4Q"), Struct(">4I")
_LONG_KEY = TENANT_BYTES + _long.size


class FrequencySketch:
    """A count-min sketch with ageing: counts up to 15, all halved after `window` notes.

    Behind the tenant a key is a digest of 16 bytes or more, so slices of it serve as hashes, nothing depends on the process,
    and blocks of one tenant do not share counters more than others. A count is never too low since the last halving, and rarely too high.
    Source: G. Einziger, R. Friedman, B. Manes: TinyLFU, ACM Transactions on Storage 13(4), 2017.
    """

    def __init__(self, entries: int) -> None:
        width = 1 << max(6, (8 * max(1, entries) - 1).bit_length())
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]
        self._window = 10 * max(1, entries)
        self._noted = 0

    def note(self, keys: Iterable[bytes]) -> None:
        """These blocks were asked for once more, one after the other."""
        mask = self._mask
        first, second, third, fourth = self._rows
        for key in keys:
            words = _long if len(key) >= _LONG_KEY else _short
            one, two, three, four = words.unpack_from(key, TENANT_BYTES)
            one &= mask
            two &= mask
            three &= mask
            four &= mask
            least = min(first[one], second[two], third[three], fourth[four])
            if least < _LIMIT:
                # Only the smallest counters grow: the others are too high by what shares them.
                if first[one] == least:
                    first[one] = least + 1
                if second[two] == least:
                    second[two] = least + 1
                if third[three] == least:
                    third[three] = least + 1
                if fourth[four] == least:
                    fourth[four] = least + 1
            self._noted += 1
            if self._noted >= self._window:
                self._noted //= 2
                for row in self._rows:
                    row[:] = row.translate(_HALVED)

    def count(self, key: bytes) -> int:
        """About how often it was noted, 0 to 15."""
        mask = self._mask
        first, second, third, fourth = self._rows
        words = _long if len(key) >= _LONG_KEY else _short
        one, two, three, four = words.unpack_from(key, TENANT_BYTES)
        return min(first[one & mask], second[two & mask], third[three & mask], fourth[four & mask])

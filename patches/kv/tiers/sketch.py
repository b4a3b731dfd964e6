"""How often a block was asked for lately, in a few bytes a block."""

from __future__ import annotations

_ROWS = 4
_LIMIT = 15
_HALVED = bytes(value // 2 for value in range(256))


class FrequencySketch:
    """A count-min sketch with ageing: counts up to 15, all halved after `window` notes.

    Keys are digests, so slices of them serve as hashes and nothing depends on the process. A count is
    never too low since the last halving, and rarely too high.
    Source: G. Einziger, R. Friedman, B. Manes: TinyLFU, ACM Transactions on Storage 13(4), 2017.
    """

    def __init__(self, entries: int) -> None:
        width = 1 << max(6, (8 * max(1, entries) - 1).bit_length())
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]
        self._window = 10 * max(1, entries)
        self._noted = 0

    def note(self, key: bytes) -> None:
        """The block was asked for once more."""
        least = self.count(key)
        if least < _LIMIT:
            # Only the smallest counters grow: the others are too high by what shares them.
            for row, place in zip(self._rows, self._places(key), strict=True):
                if row[place] == least:
                    row[place] = least + 1
        self._noted += 1
        if self._noted >= self._window:
            self._noted //= 2
            self._rows = [bytearray(row.translate(_HALVED)) for row in self._rows]

    def count(self, key: bytes) -> int:
        """About how often it was noted, 0 to 15."""
        return min(row[place] for row, place in zip(self._rows, self._places(key), strict=True))

    def _places(self, key: bytes) -> tuple[int, int, int, int]:
        mask = self._mask
        return (
            int.from_bytes(key[-32:-24], "big") & mask,
            int.from_bytes(key[-24:-16], "big") & mask,
            int.from_bytes(key[-16:-8], "big") & mask,
            int.from_bytes(key[-8:], "big") & mask,
        )

"""How large a cache the traffic asks for: reuse distances of a sample of its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

_TRACKED = 2048
_LEAST_SHARE = 4


class ReuseDistance:
    """The number of different blocks asked for between two requests for the same one, on a sample.

    A block belongs to the sample by its hash, one in `share`; distances within the sample stand for `share` times as
    many. At most 2,048 blocks are followed, so what lies farther back than `reach` blocks counts as new. (C. Waldspurger
    et al.: Efficient MRC construction with SHARDS. FAST 2015.)

    Args:
        reach: distances up to this many blocks must be told.

    Attributes:
        share: one block in so many is followed; a power of two.
    """

    def __init__(self, reach: int) -> None:
        self.share = max(_LEAST_SHARE, 1 << max(0, -(-reach // _TRACKED) - 1).bit_length())
        self._asked = 0
        self._times: list[int] = []
        self._last: OrderedDict[int, int] = OrderedDict()

    @property
    def reach(self) -> int:
        """The longest distance that is told, in blocks."""
        return _TRACKED * self.share

    def distance(self, key: int) -> int | None:
        """Of a block of the sample that is asked for now; None where it is new."""
        times, last = self._times, self._last
        self._asked += 1
        before = last.pop(key, None)
        distance = None
        if before is not None:
            place = bisect_left(times, before)
            distance = (len(times) - 1 - place) * self.share
            del times[place]
        elif len(times) >= _TRACKED:
            last.popitem(last=False)
            del times[0]
        last[key] = self._asked
        times.append(self._asked)
        return distance

"""What became of each block of a cache, from a log of look-ups and evictions: arrays of fixed size, worked in batches.

A look-up names the blocks of a prompt and how many of them were found; an eviction names a block and who took its place.
A block is told by the first 8 bytes of its hash. Of the one event before it follows why it was not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

#: Why a block was not found, as numbers; 0 is one that was.
FOUND, NEVER, EVICTED, UNLANDED, CUT, OTHER_SALT = range(6)
CAUSES = ("found", "never", "evicted", "unlanded", "cut", "other_salt")

#: Who a block belonged to that nobody had asked for: what a request generated, say.
NOBODY = 255
# An event: whether it is one, an eviction, a look-up that found it, and whose.
_UNKNOWN, _KNOWN, _EVICTION, _HIT = 0, 1 << 8, 1 << 9, 1 << 10
_ROW = np.dtype([("key", np.uint64), ("event", np.uint64)])
_CLOCK_BITS = np.uint64(32)
_CLOCK = np.uint64(0xFFFF_FFFF)
# What tells blocks apart while a batch is sorted; the rest of the number is an event's place in it.
_PLACES = 1 << 20
_HIGH = np.uint64(~(_PLACES - 1) & 0xFFFF_FFFF_FFFF_FFFF)
_WHOSE = np.uint32(0xFF)


@dataclass(slots=True)
class EventLog:
    """What happened since the last batch, in order; appending costs next to nothing.

    `names[i]` is the hash of the i-th evicted block and `culprits[i]` the tenant whose request got it. A look-up is
    (hashes end to end, number of blocks, found, tenant, evictions before it), the length of one hash in `width`.
    """

    names: list[bytes] = field(default_factory=list)
    culprits: bytearray = field(default_factory=bytearray)
    lookups: list[tuple[bytes, int, int, int, int]] = field(default_factory=list)
    width: int = 32
    blocks: int = 0

    def lookup(self, hashes: list[bytes], found: int, tenant: int) -> None:
        """Note a look-up; `hashes` of the blocks that were looked for, the first `found` of them were there."""
        self.width = len(hashes[0])
        self.lookups.append((b"".join(hashes), len(hashes), found, tenant, len(self.names)))
        self.blocks += len(hashes)


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """A batch's look-ups, block by block, in order. Shapes (blocks,).

    Attributes:
        lookup: number of the look-up, from 0 in the batch. tenant: who asked.
        cause: one of `CAUSES`, as a number. by: who evicted it, where that is the cause; else NOBODY.
        asked_by: who had asked for it last, where that is the last that is known of it; else NOBODY.
    """

    keys: Keys
    lookup: Ints
    tenant: Ints
    cause: Ints
    by: Ints
    asked_by: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Evictions:
    """A batch's evictions, in order. Shapes (evictions,).

    Attributes:
        whose: tenant that asked for the block last, or NOBODY. by: tenant whose request got it.
        used: it had been found at least once since it was computed.
        age: blocks evicted since it was last asked for; -1 where that is not known.
    """

    whose: Ints
    by: Ints
    used: Bools
    age: Ints


class BlockHistory:
    """The last event of each block, in a direct-mapped table: a newer entry takes the place of an older one.

    Args:
        slots: least number of entries, 16 bytes each; rounded up to a power of two. What is no longer in it counts as
            never seen.
    """

    def __init__(self, slots: int) -> None:
        size = 1 << max(4, slots - 1).bit_length()
        self._mask = np.uint64(size - 1)
        # Key, and event with its place in time: side by side, since each access is a miss of the processor's cache.
        self._rows = np.zeros(size, _ROW)
        self._evictions = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Memory of the table, bytes."""
        return self._rows.nbytes

    def take(self, log: EventLog) -> tuple[Lookups, Evictions]:
        """Work a log off; the caller starts a new one. At most 2**20 events."""
        looked, lookup, found, asker, looked_at = _looked(log)
        evicted, whom = _evicted(log)
        count, whole = len(looked), len(looked) + len(evicted)
        keys = np.concatenate([looked, evicted])
        # In order of time: the look-ups that came before the first eviction, that eviction, and so on.
        when = np.empty(whole, np.int64)
        when[:count] = looked_at + np.arange(count)
        evicted_number = np.arange(len(evicted))
        when[count:] = evicted_number + np.searchsorted(looked_at, evicted_number, side="right")
        # An event and, below it, the evictions before it.
        own = np.empty(whole, np.uint64)
        own[:count] = asker | _KNOWN | found * _HIT
        own[count:] = whom | _KNOWN | _EVICTION
        own <<= _CLOCK_BITS
        own[:count] |= (looked_at + self._evictions).astype(np.uint64) & _CLOCK
        own[count:] |= (evicted_number + self._evictions).astype(np.uint64) & _CLOCK
        # By block, then by time: as one number, which is sorted several times faster than two.
        order = np.argsort((keys & _HIGH) | when.astype(np.uint64))
        sorted_keys, sorted_own = keys[order], own[order]
        first = np.ones(whole, bool)
        np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=first[1:])
        heads = np.flatnonzero(first)
        head_keys = sorted_keys[heads]
        slot = (head_keys & self._mask).astype(np.int64)
        rows = self._rows[slot]
        before = np.empty(whole, np.uint64)
        before[1:] = sorted_own[:-1]
        before[heads] = np.where(rows["key"] == head_keys, rows["event"], _UNKNOWN)
        # The last event of each block stays.
        tails = np.append(heads[1:], whole)[: len(heads)] - 1
        rows["key"], rows["event"] = head_keys, sorted_own[tails]
        self._rows[slot] = rows
        self._evictions += len(evicted)
        told = np.empty(whole, np.uint64)
        told[order] = before
        return (
            _causes(looked, lookup, found, asker, (told[:count] >> _CLOCK_BITS).astype(np.int64)),
            _ends(whom, told[count:], own[count:]),
        )


def _looked(log: EventLog) -> tuple[Keys, Ints, Bools, Ints, Ints]:
    lengths = np.array([one[1] for one in log.lookups], np.int64)
    total = int(lengths.sum())
    keys = _first_words(b"".join(one[0] for one in log.lookups), log.width)
    lookup = np.repeat(np.arange(len(lengths)), lengths)
    depth = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found, asker, at = (
        np.array([one[field] for one in log.lookups], np.int64)[lookup] for field in (2, 3, 4)
    )
    return keys, lookup, depth < found, asker, at


def _evicted(log: EventLog) -> tuple[Keys, Ints]:
    width = len(log.names[0]) if log.names else 8
    return _first_words(b"".join(log.names), width), np.frombuffer(bytes(log.culprits), np.uint8).astype(
        np.int64
    )


def _first_words(joined: bytes, width: int) -> Keys:
    if not joined:
        return np.zeros(0, np.uint64)
    return np.ascontiguousarray(np.frombuffer(joined, np.uint8).reshape(-1, width)[:, :8]).view("<u8").ravel()


def _causes(keys: Keys, lookup: Ints, found: Bools, asker: Ints, before: Ints) -> Lookups:
    evicted = (before & _EVICTION) != 0
    cause = np.full(len(keys), UNLANDED)
    cause[evicted] = EVICTED
    cause[before == _UNKNOWN] = NEVER
    cause[found] = FOUND
    whose = before & _WHOSE
    by = np.where(cause == EVICTED, whose, NOBODY)
    # What lies behind an evicted block may well be there still, but cannot be found.
    missed = np.flatnonzero(~found)
    if len(missed):
        first = np.ones(len(missed), bool)
        first[1:] = lookup[missed][1:] != lookup[missed][:-1]
        led = missed[first][np.cumsum(first) - 1]
        behind = (cause[missed] == UNLANDED) & (cause[led] == EVICTED)
        cause[missed[behind]] = CUT
        by[missed[behind]] = by[led[behind]]
    asked_by = np.where((before == _UNKNOWN) | evicted, NOBODY, whose)
    return Lookups(keys, lookup, asker, cause, by, asked_by)


def _ends(by: Ints, before: Keys, own: Keys) -> Evictions:
    event = (before >> _CLOCK_BITS).astype(np.int64)
    asked = (event & (_KNOWN | _EVICTION)) == _KNOWN
    whose = np.where(asked, event & _WHOSE, NOBODY)
    age = ((own & _CLOCK) - (before & _CLOCK)) & _CLOCK
    return Evictions(whose, by, asked & ((event & _HIT) != 0), np.where(asked, age.astype(np.int64), -1))

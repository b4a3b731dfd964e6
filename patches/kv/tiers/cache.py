"""What one tier keeps: a fixed number of blocks, the least worth keeping evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from patches.kv.tiers.returns import Kind, Returns
from patches.kv.tiers.sketch import FrequencySketch


@dataclass(slots=True, eq=False)
class Entry:
    """A block in a tier.

    Attributes:
        key: tenant digest, then block hash. slot: where it lies, 0 up to the tier's size.
        low: whether only requests of low priority used it.
        ready: False while it is being written. pins: transfers that read it, and who reserved it.
        used: number of the use that came last. doomed: to be dropped once nothing uses it.
        passing: it is here for one request only. unproven: what it is evidence of when it is asked for.
    """

    key: bytes
    slot: int
    low: bool
    ready: bool = False
    pins: int = 0
    used: int = 0
    doomed: bool = False
    passing: bool = False
    unproven: Kind | None = None


class BlockCache:
    """Blocks by key in `slots` places.

    A newcomer comes in if blocks of its kind are asked for again often enough (`least_rate`), and, where there is no room,
    more often than those of the kind that would leave for it: both are measured (`Returns`), so that a scan finds
    its way in barred. Unless it `must` come in. The block that leaves is one that is here in passing, if any, else the one
    that was used longest ago among those that nothing reads or writes; one used
    by a request of high priority counts as `high_factor` times as recent. A chain is used tail first, so
    its head leaves last.
    Every call is O(1) for each block named.

    Args:
        slots: places. high_factor: at least 1. least_rate: share of a kind that must come again, 0 to 1.
        on_evict: called with each block that leaves to make room.
    """

    def __init__(
        self,
        slots: int,
        *,
        high_factor: float = 1.0,
        least_rate: float = 0.0,
        on_evict: Callable[[Entry], None] | None = None,
    ) -> None:
        self.slots = slots
        self._high_factor = high_factor
        self._least_rate = least_rate
        self._on_evict = on_evict
        self._entries: dict[bytes, Entry] = {}
        # Ready and not pinned, used longest ago first: high, low, and those in passing.
        self._idle: tuple[OrderedDict[bytes, Entry], ...] = OrderedDict(), OrderedDict(), OrderedDict()
        self._free: list[int] = []
        self._fresh = 0
        self._clock = 0
        self.seen = FrequencySketch(slots)
        self.returns = Returns(slots)
        self.version = 0
        self.refused_worth = 0
        self.refused_full = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Entry | None:
        """The block, being written or ready; None if it is not here."""
        entry = self._entries.get(key)
        return None if entry is None or entry.doomed else entry

    def note(self, keys: Sequence[bytes]) -> None:
        """A request asked for these blocks, here or not."""
        self.seen.note(keys)
        self.returns.asked(key for key in keys if key not in self._entries)

    def use(self, keys: Sequence[bytes], low: bool) -> None:
        """A request used these blocks of one chain, head first; those not here are passed over."""
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is None:
                continue
            idle = self._shelf(entry).pop(key, None)
            entry.low = entry.low and low
            entry.passing = False
            if entry.unproven is not None:
                entry.unproven.again += 1
                entry.unproven = None
            self._stamp(entry)
            if idle is not None:
                self._shelf(entry)[key] = entry

    def add(self, key: bytes, low: bool, *, must: bool = False, passing: bool = False) -> Entry | None:
        """A place for a block that is not here, to be written; None if it is not worth one.

        One in passing leaves first when nothing reads it any more.
        """
        if key in self._entries:
            # Doomed, and still being read or written.
            return None
        kind = None if must else self._worth(key)
        slot = self._place(kind)
        if slot is None:
            if kind is not None:
                self.returns.refused(key, kind)
            return None
        entry = self._entries[key] = Entry(key, slot, low, passing=passing, unproven=kind)
        self._stamp(entry)
        return entry

    def keep(self, entry: Entry) -> None:
        """One that is here in passing is offered to stay."""
        entry.unproven = kind = self._worth(entry.key)
        if kind.rate < self._least_rate:
            return
        idle = self._shelf(entry).pop(entry.key, None)
        entry.passing = False
        self._stamp(entry)
        if idle is not None:
            self._shelf(entry)[entry.key] = entry

    def written(self, keys: Sequence[bytes]) -> None:
        """These are there now; head first."""
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None and not entry.ready:
                entry.ready = True
                self.version += 1
                self._stamp(entry)
                self._settle(entry)

    def failed(self, keys: Iterable[bytes]) -> None:
        """These could not be written: they are not here."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and not entry.ready:
                # Who has it pinned lets it go first.
                entry.ready = entry.doomed = True
                self._settle(entry)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Something reads these; they stay."""
        for key in keys:
            entry = self._entries[key]
            entry.pins += 1
            self._shelf(entry).pop(key, None)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """One reader less for each of these; head first."""
        for key in reversed(keys):
            entry = self._entries[key]
            assert entry.pins > 0
            entry.pins -= 1
            self._settle(entry)

    def remove(self, key: bytes) -> None:
        """It is not worth anything any more: it goes at once, or when its readers and writers are done."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.ready and not entry.pins:
            self._shelf(entry).pop(key, None)
            self._drop(entry)
        else:
            entry.doomed = True

    def clear(self) -> None:
        """All of them."""
        for key in list(self._entries):
            self.remove(key)

    def coldest(self, low: bool) -> Iterator[Entry]:
        """Idle blocks of one class, used longest ago first, without those in passing; the cache must not change meanwhile."""
        return iter(self._idle[low].values())

    def room(self) -> int:
        """Places that can be had: free ones and idle blocks."""
        return self.slots - len(self._entries) + sum(map(len, self._idle))

    def _worth(self, key: bytes) -> Kind:
        """The kind of a block that is offered, one more of which there is now."""
        kind = self.returns.newcomer(key, self.seen.count(key))
        self.returns.tried(kind)
        return kind

    def _place(self, kind: Kind | None) -> int | None:
        """A free place, or one that is made; None if no block leaves for one of this kind. All leave for None."""
        if kind is not None and kind.rate < self._least_rate:
            self.refused_worth += 1
            return None
        if self._free:
            return self._free.pop()
        if self._fresh < self.slots:
            self._fresh += 1
            return self._fresh - 1
        victim = self._victim()
        if victim is None:
            self.refused_full += 1
            return None
        if not victim.passing:
            leaver = self.returns.leaver(victim.key, self.seen.count(victim.key))
            if kind is not None and kind.rate <= leaver.rate:
                self.refused_worth += 1
                return None
            self.returns.gone(victim.key, leaver)
        elif victim.unproven is not None:
            # It was offered to stay and not taken.
            self.returns.refused(victim.key, victim.unproven)
        del self._shelf(victim)[victim.key]
        if self._on_evict is not None:
            self._on_evict(victim)
        self.evicted += 1
        self._drop(victim)
        return self._free.pop()

    def _victim(self) -> Entry | None:
        high, low, passing = (next(iter(idle.values()), None) for idle in self._idle)
        if passing is not None:
            return passing
        if high is None or low is None:
            return low or high
        age_high, age_low = self._clock - high.used, self._clock - low.used
        return high if age_high > self._high_factor * age_low else low

    def _shelf(self, entry: Entry) -> OrderedDict[bytes, Entry]:
        """Where it lies when it is idle."""
        return self._idle[2 if entry.passing else entry.low]

    def _stamp(self, entry: Entry) -> None:
        self._clock += 1
        entry.used = self._clock

    def _settle(self, entry: Entry) -> None:
        if not entry.ready or entry.pins:
            return
        if entry.doomed:
            self._drop(entry)
            return
        self._stamp(entry)
        self._shelf(entry)[entry.key] = entry

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._free.append(entry.slot)
        self.version += 1

"""How likely a block is asked for again while a tier would hold it: measured, by tenant and by how often it was before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from patches.kv.tiers.files import TENANT_BYTES

# Blocks that what is assumed at first counts for; that fades like any other evidence.
_ASSUMED = 16.0
# Blocks that were asked for more often than this are of one kind.
_MOST_ASKED = 3
# Kinds that are told apart, at most; the one unused longest is forgotten for a new one.
_KINDS = 4096


class Kind:
    """Blocks of one tenant that had been asked for equally often: how many there were, and how many came again."""

    __slots__ = ("again", "tried")

    def __init__(self, assumed: float) -> None:
        self.tried, self.again = _ASSUMED, _ASSUMED * assumed

    @property
    def rate(self) -> float:
        """The share that came again, at most 1: what came late can come again after its trial has faded."""
        return min(1.0, self.again / self.tried)


class Returns:
    """What newcomers are worth, and what those are that would leave for them.

    Newcomers count from when they are offered, leavers from when they leave: each until it is asked for, or until so many
    others have been refused or have left as the tier has places, which is about how long it would have stayed. Old
    evidence fades as new comes in. Nothing is assumed to be worth more for having been asked for often: that is measured.

    Args:
        slots: places of the tier.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._halved_at = max(slots, 4 * _ASSUMED)
        self._kinds: OrderedDict[tuple[bytes, int, bool], Kind] = OrderedDict()
        # Blocks that are not here, and what they would be evidence of; oldest first.
        self._refused: OrderedDict[bytes, Kind] = OrderedDict()
        self._gone: OrderedDict[bytes, Kind] = OrderedDict()

    def newcomer(self, key: bytes, asked: int) -> Kind:
        """The kind of a block that was asked for so often and is offered; believed to come again until seen otherwise."""
        return self._kind((key[:TENANT_BYTES], min(asked, _MOST_ASKED), True), 1.0)

    def leaver(self, key: bytes, asked: int) -> Kind:
        """The kind of a block that would leave; believed not to come again until seen otherwise."""
        return self._kind((key[:TENANT_BYTES], min(asked, _MOST_ASKED), False), 0.0)

    def tried(self, kind: Kind) -> None:
        """One more of that kind."""
        kind.tried += 1
        if kind.tried >= self._halved_at:
            kind.tried /= 2
            kind.again /= 2

    def refused(self, key: bytes, kind: Kind) -> None:
        """It was not taken."""
        self._remember(self._refused, key, kind)

    def gone(self, key: bytes, kind: Kind) -> None:
        """It left."""
        self.tried(kind)
        self._remember(self._gone, key, kind)

    def asked(self, keys: Iterable[bytes]) -> None:
        """Blocks that are not here were asked for."""
        for key in keys:
            for absent in (self._refused, self._gone):
                kind = absent.pop(key, None)
                if kind is not None:
                    kind.again += 1

    def _kind(self, name: tuple[bytes, int, bool], assumed: float) -> Kind:
        kind = self._kinds.get(name)
        if kind is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.popitem(last=False)
            kind = self._kinds[name] = Kind(assumed)
        else:
            self._kinds.move_to_end(name)
        return kind

    def _remember(self, absent: OrderedDict[bytes, Kind], key: bytes, kind: Kind) -> None:
        absent.pop(key, None)
        absent[key] = kind
        if len(absent) > self._slots:
            absent.popitem(last=False)

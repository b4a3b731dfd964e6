"""Which prompt does a tenant use, and has it gone over to another? Told from what its requests begin with.

A tenant's *trunk* is what nearly all of its requests begin with: its system prompt, in whole blocks. While that holds for
some time it is settled. A request that leaves a settled trunk before its end is a stray, and strays that leave
it alike are a branch: a canary, or the next version. A branch takes over when what has come lately is so much
likelier under "nearly all go there" than under "its share is what it was" that chance is no explanation. A document that is
popular or a file that is open lies beyond the trunk's end and is never a branch.

Only products of fractions decide, so every machine decides alike.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

# Share of a tenant's requests that must begin with a block for it to be of the trunk.
_NEARLY_ALL = 0.9
# Counts are halved when they reach this, so that a trunk follows its tenant.
_HALVE_AT = 256
# A branch's usual share is judged without the latest requests, and taken for no less than this.
_LATEST = 16
_LEAST_SHARE = 0.1
_MOST_SHARE = 0.8
# Branches remembered of one tenant; the longest unseen go first.
_MOST_BRANCHES = 8
# So often must a trunk's beginning hold for half of the requests; else it was made of an odd one.
_ODD_AFTER = 8
# Requests that tell how far a new prompt reaches, at least; before, it is what tells it from the old one.
_FEW = 4


@dataclass(frozen=True, slots=True)
class Switch:
    """A tenant has gone over to another prompt.

    Attributes:
        old, new: hashes of the two trunks' blocks. common: how many blocks they have in common.
    """

    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    common: int


class _Shared:
    """The longest prefix that nearly all of some requests have, measured along the chain of one of them."""

    def __init__(self, chain: Sequence[bytes]) -> None:
        self.chain = tuple(chain)
        self.total = 0
        self._through = [0] * len(self.chain)

    def see(self, hashes: Sequence[bytes]) -> int:
        """A request; returns how many blocks it has in common with the chain."""
        common = 0
        for mine, other in zip(self.chain, hashes, strict=False):
            if mine != other:
                break
            self._through[common] += 1
            common += 1
        self.total += 1
        if self.total >= _HALVE_AT:
            self.total //= 2
            self._through = [count // 2 for count in self._through]
        return common

    def depth(self, share: float) -> int:
        """Blocks that at least this share of the requests begin with."""
        least = share * self.total
        depth = 0
        for count in self._through:
            if not count or count < least:
                break
            depth += 1
        return depth


class _Branch:
    """Requests that leave the trunk with the same block."""

    def __init__(self, hashes: Sequence[bytes], common: int) -> None:
        self.shared = _Shared(hashes)
        self.common = common
        self.count = 0
        # How much likelier what has come is if nearly all go there now.
        self.odds = 1.0

    def weigh(self, came: bool, usual: float) -> None:
        if came:
            self.odds *= _NEARLY_ALL / usual
        else:
            self.odds = max(1.0, self.odds * (1 - _NEARLY_ALL) / (1 - usual))


class Trunk:
    """One tenant's trunk and its branches.

    Args:
        settle_s, settle_requests: for how long and how many requests a trunk must hold before a switch from it counts.
        evidence_times: how much likelier a switch must be than chance.
        most_blocks: blocks from a prompt's beginning that are looked at.
    """

    def __init__(
        self, *, settle_s: float, settle_requests: int, evidence_times: float, most_blocks: int
    ) -> None:
        self._settle_s, self._settle_requests = settle_s, settle_requests
        self._evidence = evidence_times
        self._most_blocks = most_blocks
        self._shared: _Shared | None = None
        self._since_s = 0.0
        # The trunk's length once it is settled, in blocks; 0 before.
        self._settled = 0
        # Whether it was judged by the few requests that made a switch certain, and is to be measured again.
        self._young = False
        self._branches: OrderedDict[bytes, _Branch] = OrderedDict()
        self._total = 0
        self._latest: deque[bytes | None] = deque(maxlen=_LATEST)

    @property
    def blocks(self) -> tuple[bytes, ...]:
        """The settled trunk; empty before it is."""
        return () if self._shared is None else self._shared.chain[: self._settled]

    def see(self, hashes: Sequence[bytes], now: float, *, announced: bool = False) -> Switch | None:
        """A request came that begins with these blocks; the switch that it makes certain, if any.

        `announced`: the sender says that this is the prompt from now on.
        """
        hashes = hashes[: self._most_blocks]
        if not hashes:
            return None
        if self._shared is None:
            self._begin(hashes, now)
        shared = self._shared
        assert shared is not None
        if not self._settled:
            shared.see(hashes)
            if shared.total >= _ODD_AFTER and not shared.depth(0.5):
                self._begin(hashes, now)
            elif shared.total >= self._settle_requests and now - self._since_s >= self._settle_s:
                self._settled = shared.depth(_NEARLY_ALL)
                if not self._settled:
                    # Nothing that nearly all begin with: look again later.
                    self._begin(hashes, now)
            return None
        return self._settled_see(shared, hashes, now, announced)

    def version_of(self, hashes: Sequence[bytes]) -> bytes | None:
        """The block with which these leave the settled trunk; None if they do not, or end before they could."""
        for mine, other in zip(self.blocks, hashes, strict=False):
            if mine != other:
                return other
        return None

    # inside

    def _begin(self, hashes: Sequence[bytes], now: float) -> None:
        self._shared, self._since_s, self._settled = _Shared(hashes), now, 0
        self._young = False
        self._branches.clear()
        self._latest.clear()
        self._total = 0

    def _settled_see(
        self, shared: _Shared, hashes: Sequence[bytes], now: float, announced: bool
    ) -> Switch | None:
        leaves = self.version_of(hashes)
        if leaves is None and len(hashes) < self._settled:
            # Too short to tell.
            return None
        common = shared.see(hashes)
        if self._young and shared.total >= self._settle_requests:
            self._young = False
            self._settled = max(self._settled, shared.depth(_NEARLY_ALL))
        branch = None
        if leaves is not None:
            branch = self._branches.pop(leaves, None) or _Branch(hashes, common)
            self._branches[leaves] = branch
            if len(self._branches) > _MOST_BRANCHES:
                self._branches.popitem(last=False)
            branch.shared.see(hashes)
        for name, each in self._branches.items():
            # The one that has just appeared weighs as if its share had been the least that is assumed.
            each.weigh(each is branch, self._usual(name, each))
        if branch is not None:
            branch.count += 1
        self._total += 1
        self._latest.append(leaves)
        if branch is None:
            return None
        if branch.odds < self._evidence and not announced:
            return None
        return self._go_over(branch, now)

    def _usual(self, name: bytes, branch: _Branch) -> float:
        recent = sum(1 for leaves in self._latest if leaves == name)
        before = self._total - len(self._latest)
        usual = (branch.count - recent) / before if before else 0.0
        return min(max(usual, _LEAST_SHARE), _MOST_SHARE)

    def _go_over(self, branch: _Branch, now: float) -> Switch:
        old = self.blocks
        shared = branch.shared
        depth = branch.common + 1
        if shared.total >= _FEW:
            depth = max(depth, shared.depth(_NEARLY_ALL))
        self._begin(shared.chain, now)
        self._shared, self._settled, self._young = shared, depth, True
        return Switch(old, shared.chain[:depth], branch.common)

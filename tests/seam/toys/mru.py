"""Owns the free blocks; takes the most recently freed cached block first."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from patches.seam.patch import Hooks
from tests.seam.toys import toy


class MruQueue(FreeKVCacheBlockQueue):
    """Upstream's queue, filled from the other end."""

    def append_n(self, blocks: list[Any]) -> None:
        """Put cached blocks first instead of last."""
        self.prepend_n(blocks)


def build(knobs: Any, context: Any) -> Hooks:
    """The owner alone."""

    def owner(blocks: list[Any]) -> Any:
        context.count("eviction_owner")
        return MruQueue(blocks)

    return Hooks(eviction_owner=owner)


PATCH = toy("mru", build, "eviction_owner", area="kv")

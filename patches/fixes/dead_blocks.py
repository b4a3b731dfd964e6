"""Blocks behind a prompt that is no longer sent: evicted before anything that is in use, until somebody asks again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patches.seam.worth import Worths

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from patches.seam.context import Context

_DEAD = -4.0
# Blocks whose users are known, as a multiple of the pool's.
_MOST_USERS_TIMES = 4


class DeadBlocks:
    """Who has used which block of one engine's cache, and which of them are dead.

    Attributes:
        worths: of the dead ones, by their names in the pool. demoted: how many have ever been.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        # None for several.
        self._users: dict[bytes, str | None] = {}
        self.worths = Worths(demotes=True)
        self.demoted = 0

    @property
    def limit(self) -> int:
        """Blocks of the pool."""
        return int(self._context.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def used(self, hashes: Sequence[bytes], tenant: str) -> None:
        """A request of that tenant has filled or found these."""
        users, foreign = self._users, False
        for each in hashes:
            if users.setdefault(each, tenant) != tenant:
                users[each], foreign = None, True
        if foreign:
            self.revive(hashes)
        if len(users) > _MOST_USERS_TIMES * self.limit * len(self._groups()):
            # Only a reset of the prefix cache, which tells of no block, lets it come to this.
            users.clear()

    def gone(self, names: Iterable[bytes]) -> None:
        """Blocks of these names leave the cache."""
        worths, forget = self.worths, self._users.pop
        for name in names:
            forget(name[:-4], None)
            if worths:
                worths.pop(name, None)

    def demote(self, hashes: Iterable[bytes], tenant: str) -> None:
        """These are dead, as far as they are there and nobody else has used them."""
        blocks = []
        for each in hashes:
            if self._users.get(each) == tenant:
                for key, block in self._in_pool(each):
                    self.worths[key] = _DEAD
                    blocks.append(block)
        for block in blocks:
            self._context.revalue(block)
        self.demoted += len(blocks)
        self._context.count("demoted_blocks", len(blocks))

    def revive(self, hashes: Iterable[bytes]) -> None:
        """Somebody still uses these: they are dead no more."""
        if not self.worths:
            return
        pool = self._pool()
        for each in hashes:
            for key in self._keys(each):
                # The key goes in any case: a reset of the prefix cache takes blocks away and tells nobody.
                if self.worths.pop(key, None) is not None and (block := pool.get_one_block(key)) is not None:
                    self._context.revalue(block)

    def _groups(self) -> range:
        return range(len(self._context.scheduler.kv_cache_config.kv_cache_groups))

    def _in_pool(self, block_hash: bytes) -> list[tuple[Any, Any]]:
        pool = self._pool()
        return [
            (key, block) for key in self._keys(block_hash) if (block := pool.get_one_block(key)) is not None
        ]

    def _pool(self) -> Any:
        return self._context.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block

    def _keys(self, block_hash: bytes) -> list[Any]:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        name: Any = block_hash
        return [make_block_hash_with_group_id(name, group) for group in self._groups()]

"""The least possible after a switch of a prompt: a tenant's hits if the cache were infinite and its prompts were known.

Bounds on what any patch can reach, for the schedule that a run served:

- `Known.PROMPTS`: nothing is ever evicted, and all of the tenant's system prompts are in the cache from the start. A
  conversation is found under the prompt under which it was seen, and under no other.
- `Known.CONVERSATIONS`: besides, what was seen of a conversation is found under each of the prompts from then on, as if
  it were computed anew under all of them at once. So does an infinite cache where nothing is switched at all.

Nobody can find what nobody has sent: the turns with which a conversation comes in are always computed once.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable

import numpy as np
import pandas as pd

from workloads.request import PlannedRequest, TokenIds, Workload


class Known(enum.Enum):
    """What is in the infinite cache besides what requests have computed."""

    PROMPTS = "prompts"
    CONVERSATIONS = "conversations"


def limited(
    workload: Workload,
    requests: pd.DataFrame,
    tenant: str,
    since_s: float,
    known: Known,
    block_tokens: int = 16,
) -> pd.DataFrame:
    """A run's `requests`, with the `cached_tokens` that the bound gives the tenant's admitted from `since_s` on.

    A request finds all of those that were admitted before it, computed by then or not. What was admitted before
    `since_s` stays as it was measured.

    Args:
        workload: what the run served. requests: its table.
    """
    planned = {one.request_id: one for one in workload.requests if one.tenant == tenant}
    prompts = _prompts(planned.values())
    there: set[bytes] = set()
    for prompt in prompts.values():
        there.update(_chain(prompt, block_tokens))
    limit = requests.reset_index(drop=True)
    cached = limit["cached_tokens"].to_numpy(np.float64, copy=True)
    at_ns = limit["scheduled_ns"].to_numpy(np.float64)
    mine = np.flatnonzero((limit["tenant"] == tenant) & ~np.isnan(cached))
    for row in mine[np.argsort(at_ns[mine], kind="stable")].tolist():
        one = planned[str(limit["request_id"].iloc[row])]
        if at_ns[row] >= since_s * 1e9:
            # The last token is always computed.
            wanted = _chain(one.prompt[:-1], block_tokens)
            found = next((i for i, name in enumerate(wanted) if name not in there), len(wanted))
            cached[row] = max(cached[row], found * block_tokens)
        rest = [one.prompt[one.segments[0].tokens :], one.output]
        under = prompts.values() if known is Known.CONVERSATIONS else [prompts[one.segments[0].name]]
        for prompt in under:
            there.update(_chain(np.concatenate([prompt, *rest]), block_tokens))
    return limit.assign(cached_tokens=cached)


def _prompts(planned: Iterable[PlannedRequest]) -> dict[str, TokenIds]:
    """The system prompts, by name: what each request begins with."""
    return {one.segments[0].name: one.prompt[: one.segments[0].tokens] for one in planned}


def _chain(tokens: TokenIds, block_tokens: int) -> list[bytes]:
    """A name for each full block, which stands for all before it too."""
    digest, names = hashlib.blake2b(digest_size=16), []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        digest.update(np.ascontiguousarray(tokens[end - block_tokens : end], np.int32).tobytes())
        names.append(digest.digest())
    return names

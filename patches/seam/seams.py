"""The named seams: what a patch may hang a hook on, and how several hooks of one seam combine.

Kinds:
    key      parts of one composite ordering key, in order of declared rank
    gate     hold or refuse; the first refusal wins and gives the reason
    cap      the minimum over all hooks
    score    one owner decides, others add declared hints
    first    exactly one owner; a second one is refused when the plan is made
    observe  called in order of rank or catalogue, changes nothing by its return value
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("key", "gate", "cap", "score", "first", "observe")


@dataclass(frozen=True, slots=True)
class Seam:
    """One seam.

    `ranked`: every patch that uses it declares a rank, no two the same; smaller comes first.
    `exclusive`: at most one patch of a plan may use it.
    `targets`: keys of the upstream objects whose code this seam relies on (see `targets.py`).
    `hit`: what counts as one hit in the receipt; empty where the patch counts for itself.
    `arguments`: how many positional arguments its hooks take.
    """

    name: str
    kind: str
    summary: str
    targets: tuple[str, ...]
    hit: str
    arguments: int
    ranked: bool = False
    exclusive: bool = False


_ENGINE = ("Scheduler.__init__", "AsyncScheduler")
_STEP = (*_ENGINE, "Scheduler.schedule")
_QUEUE = (
    *_STEP,
    "Scheduler._enqueue_waiting_request",
    "Scheduler._preempt_request",
    "Scheduler._free_request",
    "Scheduler.finish_requests",
    "Scheduler.update_from_output",
    "RequestQueue",
    "create_request_queue",
)
_POOL = (
    *_ENGINE,
    "BlockPool.__init__",
    "BlockPool.touch",
    "BlockPool.get_new_blocks",
    "BlockPool.free_blocks",
    "BlockPool._maybe_evict_cached_block",
    "FreeKVCacheBlockQueue",
)

_ALL = (
    Seam(
        "request_key",
        "key",
        "one part of the key that orders waiting requests, running prefills, resumption and victims",
        _QUEUE,
        "a key was computed",
        2,
        ranked=True,
    ),
    Seam(
        "tenant_rank",
        "first",
        "makes the queue one of tenants around queues, and says which tenant is next",
        _QUEUE,
        "a tenant's rank was asked",
        2,
        exclusive=True,
    ),
    Seam(
        "prefer",
        "first",
        "says which of the first waiting requests of one level goes first",
        (
            *_QUEUE,
            "KVCacheManager.get_computed_blocks",
            "UnitaryKVCacheCoordinator",
            "FullAttentionManager.find_longest_cache_hit",
            "BlockHashToBlockMap",
            "make_block_hash_with_group_id",
        ),
        "another than the first was chosen",
        2,
        exclusive=True,
    ),
    Seam(
        "on_pick",
        "observe",
        "called when the scan takes a request out of the waiting queue",
        _QUEUE,
        "",
        2,
    ),
    Seam(
        "on_put_back",
        "observe",
        "called when the scan returns a request that it took and did not admit",
        _QUEUE,
        "",
        2,
    ),
    Seam(
        "waiting_gate",
        "gate",
        "holds a waiting request inside the queue, with a reason",
        _QUEUE,
        "a request was held",
        2,
        ranked=True,
    ),
    Seam(
        "token_cap",
        "cap",
        "upper limit on the tokens of one request in one step",
        (*_STEP, "Scheduler._reserve_prefill_lookahead"),
        "this patch's cap cut the count",
        4,
        ranked=True,
    ),
    Seam(
        "victim_hint",
        "score",
        "raises a running request's place among the candidates for preemption",
        (*_STEP, "Scheduler._preempt_request"),
        "a hint other than 0 was given while victims were ranked",
        1,
        ranked=True,
    ),
    Seam(
        "before_schedule",
        "observe",
        "called before each scheduling pass; may preempt, re-key and release",
        (*_STEP, "Scheduler._preempt_request", "PriorityRequestQueue"),
        "a request was preempted on the patch's demand",
        1,
    ),
    Seam("after_schedule", "observe", "called with each SchedulerOutput", _STEP, "", 2),
    Seam(
        "after_update",
        "observe",
        "called after each model output was applied",
        (*_ENGINE, "Scheduler.update_from_output"),
        "",
        3,
    ),
    Seam(
        "on_add",
        "observe",
        "called before a new request is queued",
        (*_ENGINE, "Scheduler.add_request"),
        "",
        2,
    ),
    Seam(
        "on_finish",
        "observe",
        "called when a request ends, however it ends, before its blocks are freed",
        (*_ENGINE, "Scheduler._free_request"),
        "",
        2,
    ),
    Seam(
        "on_preempt",
        "observe",
        "called before a running request loses its blocks and returns to the queue",
        (*_ENGINE, "Scheduler._preempt_request"),
        "",
        2,
    ),
    Seam(
        "eviction_owner",
        "first",
        "supplies the object that keeps free blocks and picks the one to reuse",
        _POOL,
        "",
        1,
        exclusive=True,
    ),
    Seam(
        "eviction_hint",
        "score",
        "a block's extra worth: below 0 it is evicted first, above 0 last",
        _POOL,
        "a hint other than 0 was given to the owner",
        1,
        ranked=True,
    ),
    Seam(
        "on_touch",
        "observe",
        "called with the blocks of a prefix hit before they leave the free queue",
        _POOL,
        "",
        1,
    ),
    Seam(
        "on_evict",
        "observe",
        "called with cached blocks that are about to lose their hashes, all of one allocation at once",
        (*_POOL, "BlockPool.evict_blocks"),
        "",
        2,
    ),
    Seam(
        "expire",
        "gate",
        "ends requests before the next pass, with a stop reason; the first patch to name one gives the reason",
        (*_STEP, "Scheduler.update_from_output", "Scheduler.finish_requests", "EngineCoreOutput"),
        "a request was ended",
        1,
        ranked=True,
    ),
    Seam(
        "on_own",
        "observe",
        "lets the patch put requests of its own into idle moments (Context.inject); called when a prefix is done",
        (
            *_STEP,
            "Scheduler.add_request",
            "Scheduler.finish_requests",
            "Scheduler.update_from_output",
            "EngineCore.__init__",
            "FreeKVCacheBlockQueue",
        ),
        "",
        3,
    ),
    Seam(
        "report",
        "observe",
        "tells an API server, between two steps, what the patch knows of its engine",
        (*_ENGINE, "EngineCore.__init__"),
        "",
        1,
    ),
    Seam(
        "api_admission",
        "gate",
        "may refuse a request at the API, after upstream's own limits",
        ("AsyncLLM.check_admission",),
        "a request was refused",
        3,
        ranked=True,
    ),
)

SEAMS: dict[str, Seam] = {seam.name: seam for seam in _ALL}

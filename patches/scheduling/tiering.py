"""`tiering`: KV blocks go on to host memory and disk, and come back when that is cheaper than computing them anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patches.kv.tiers.knobs import TieringKnobs
from patches.kv.tiers.recovery import PARTS
from patches.scheduling.steptime import StepTime
from patches.seam.patch import Hooks, Patch

if TYPE_CHECKING:
    from patches.kv.tiers.scheduler import TierScheduler
    from patches.seam.context import Context

# The connector's name and place, and where the knobs stand in its configuration: it imports vLLM, plans do not.
_CONNECTOR, _MODULE, _KNOBS_KEY = "TieringConnector", "patches.kv.tiers.connector", "tiering"


class NoTiersError(RuntimeError):
    """The patch is in force, but the engine was not built with the flags that it brings."""


def engine_flags(knobs: TieringKnobs) -> dict[str, Any]:
    """What the engine is started with; None is what must stay unset."""
    return {
        "kv_transfer_config": {
            "kv_connector": _CONNECTOR,
            "kv_connector_module_path": _MODULE,
            "kv_role": "kv_both",
            # What cannot be loaded is computed: a tier never fails a request.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": knobs.host_bytes,
                _KNOBS_KEY: knobs.model_dump(mode="json"),
            },
        },
        "kv_offloading_size": None,
    }


def build(knobs: TieringKnobs, context: Context) -> Hooks:
    """The hooks for one engine: they tell its connector what vLLM does not."""
    steps = StepTime()
    found: list[TierScheduler] = []
    counted_blocks = 0

    def tiers() -> TierScheduler:
        if not found:
            connector = context.scheduler.connector
            if type(connector).__name__ != _CONNECTOR:
                raise NoTiersError(
                    "tiering needs the engine flag kv_transfer_config that it brings along: start the engine "
                    "through `bench run` or `bench serve`, or take the flag from `bench plan --enable tiering`"
                )
            found.append(connector.tiers)
            connector.tiers.bind(context)
            _publish(context, connector.tiers)
        return found[0]

    def before_schedule(now: float) -> None:
        tiers().before_schedule(now)

    def on_preempt(request: Any, now: float) -> None:
        tiers().on_preempt(request)
        context.count("saved_preemptions")

    def on_evict(blocks: list[Any], names: list[Any]) -> None:
        # Before the first request there is nothing to watch.
        if found:
            found[0].on_evict(blocks)

    def after_schedule(scheduler_output: Any, now: float) -> None:
        nonlocal counted_blocks
        steps.on_schedule(scheduler_output, now)
        recoveries, saved_blocks = tiers().recoveries, tiers().counts.saved_blocks
        # Those of preempted requests too.
        if saved_blocks > counted_blocks:
            context.count("saved_blocks", saved_blocks - counted_blocks)
            counted_blocks = saved_blocks
        if recoveries:
            recoveries.on_scheduled(scheduler_output.num_scheduled_tokens, now)

    def after_update(scheduler_output: Any, outputs: dict[int, Any], now: float) -> None:
        steps.on_update(scheduler_output, now)
        mine = tiers()
        mine.rates.token_s = steps.token_s
        mine.recoveries.on_pass_ended(scheduler_output.num_scheduled_tokens, now)

    return Hooks(
        before_schedule=before_schedule,
        after_schedule=after_schedule,
        after_update=after_update,
        on_add=lambda request, now: _ready(tiers()),
        on_finish=lambda request, now: tiers().on_finish(request),
        on_preempt=on_preempt,
        on_evict=on_evict,
    )


def _ready(tiers: TierScheduler) -> None:
    """Finding them is all that a first request needs."""


def _publish(context: Context, tiers: TierScheduler) -> None:
    counts, recoveries, host, disk = tiers.counts, tiers.recoveries, tiers.host, tiers.disk
    for place, name in enumerate(("p50", "p99")):
        for part in PARTS:
            context.gauge(f"{part}_ms_{name}", lambda part=part, place=place: recoveries.ms(part)[place])  # type: ignore[misc]
    context.gauge("preempted", lambda: float(recoveries.preempted))
    context.gauge("lost_tokens", lambda: float(recoveries.lost_tokens))
    context.gauge("recomputed_tokens", lambda: float(recoveries.recomputed_tokens))
    for name in ("d2h_bytes", "h2d_bytes", "host_hit_tokens", "disk_hit_tokens", "asked_tokens"):
        context.gauge(name, lambda name=name: float(getattr(counts, name)))  # type: ignore[misc]
    for name in (
        *("loads", "loads_within_step", "next_step_loads", "dear_loads"),
        *("late_saves", "flushed_saves", "patience_ended"),
    ):
        context.gauge(name, lambda name=name: float(getattr(counts, name)))  # type: ignore[misc]
    context.gauge("host_blocks", lambda: float(len(host)))
    context.gauge("host_evicted", lambda: float(host.evicted))
    context.gauge("host_refused_worth", lambda: float(host.refused_worth))
    context.gauge("host_refused_size", lambda: float(host.refused_full))
    if disk is not None:
        context.gauge("disk_blocks", lambda: float(len(disk.cache)))
        for name in ("to_disk_bytes", "from_disk_bytes", "bad_blocks", "refused_blocks"):
            context.gauge(f"disk_{name}", lambda name=name: float(getattr(disk.counts, name)))  # type: ignore[misc]


PATCH = Patch(
    name="tiering",
    number="S8",
    area="scheduling",
    summary="KV blocks to host memory and disk; preemption saves, not recomputes",
    knobs=TieringKnobs,
    build=build,
    engine_flags=engine_flags,
    seams=(
        "before_schedule",
        "after_schedule",
        "after_update",
        "on_add",
        "on_finish",
        "on_preempt",
        "on_evict",
    ),
    why="""\
A preempted request loses all it has computed and computes it again, for seconds, while others wait; and what the
GPU's cache evicts is gone although host memory has room for many times as much. A block of Llama-3.1-8B is 2 MiB:
PCIe moves it in 0.1 ms, a fast GPU needs ten times as long to compute it. Upstream can offload (`OffloadingConnector`),
but it copies every block of every prompt at once, wanted again or not, keeps nothing that a preempted request
generated, and a request that returns waits for two steps while its blocks are loaded.""",
    how="""\
Preemption: all full blocks of the victim that are not below yet are copied to host memory, beside steps, and stay
there until it is back. A step that would overwrite a block still being copied waits for it.
Other blocks are saved when their request ends, prompts only and heads first, a bounded number a step;
with `save_ahead_share` only once that share of what is ahead of them in the free list has been reused, which moves a
little less and comes too late for some.
Whether a block is worth that is measured: of the blocks of its kind (one tenant's, asked for equally often lately, by a
count-min sketch with ageing) the share that was asked for again within the time that the host tier would hold them,
taken or not. It is saved if that share is `save_return_share` or more and, where the tier is full, more than the same
of the kind that would leave. So a conversation finds its history in the next turn, which no count could tell from a
document that is read once, and a scan of documents does not wash it out. What came down for a preempted request alone
leaves first when that is back; else the block unused longest does, tails of chains before their heads.
Low priorities may go on to disk: their coldest blocks are written ahead of need, so leaving host memory costs nothing.
Blocks that a more urgent request used never go there, and count as more recent in exchange. Blocks on disk come up
for the next waiting requests before their turn, and for a request at its turn; it waits for them for a bounded time.
A hit below is loaded only if it is long enough and the transfer, behind what is under way on the link, takes less
than computing it would: both are measured as the engine runs. Loads are made before the step's forward pass, so that the
request runs in that step. What is too much for one step has the next; only a load that is longer than
`reload_sync_ms` by itself, or that no step had room for in `reload_patience_ms`, is made beside steps, for which its
request waits for four.
Where a connector loads, upstream holds freed blocks back for as long as a pass under way may write to them. So it cannot
preempt who ran in that pass, and those behind in the line do not run in the next. The loads here begin after
all that the GPU was given before them, as those of upstream's worker do, so nothing is held back.
Files are written beside their place and renamed, carry key and checksum, and are checked on each read: one that is
missing, cut or changed is computed anew. A disk that is full or refuses is let alone for a while. Tenants are
kept apart by a digest of their name in each key and path. At the start whatever is no whole file is removed.
A load delays its request by the transfer, one beside steps by four steps more, a wait for the disk or for a step with
room by `reload_patience_ms`, and a step waits for `reload_sync_ms` of loads and for saves of blocks that it overwrites.""",
    baseline="OffloadingConnector with ARC and as many bytes of host memory (arm tuned-offload)",
    mechanism="recomputed_tokens",
    removable_when="vLLM's offloading saves what preemption takes, chooses what it saves, and weighs a load against recomputing",
    references=(
        "W. Kwon et al.: Efficient memory management for large language model serving with PagedAttention. SOSP 2023 "
        "(swapping against recomputation)",
        "G. Einziger, R. Friedman, B. Manes: TinyLFU: a highly efficient cache admission policy. ACM Transactions on "
        "Storage 13(4), 2017",
        "R. Qin et al.: Mooncake: trading more storage for less computation. FAST 2025",
    ),
)

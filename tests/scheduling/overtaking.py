"""Who was admitted before whom: streams of requests on real schedulers, watched pass by pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import strategies as st

from patches.seam.context import TICKET_ATTR
from patches.seam.runtime import RUNTIME_ATTR
from tests.drive import make_config, make_request, make_scheduler
from tests.scheduling.clocked import STEP_NS, Knobs, Served, patched, prompt, serve

SEATS, STEP_TOKENS, BLOCKS, BLOCK_SIZE = 4, 128, 45, 16
STEP_S = STEP_NS / 1e9


@dataclass(frozen=True)
class Sender:
    """A tenant as its requests carry it."""

    name: str
    tier: str
    priority: int
    weight: int
    slo_s: float


SENDERS = (
    Sender("gold-a", "gold", 0, 4, 0.4),
    Sender("silver-0", "silver", 1, 2, 1.0),
    Sender("bronze-0", "bronze", 2, 1, 3.0),
)


@dataclass(frozen=True)
class Stream:
    """Equal requests of one sender, one every few steps; steps count from the run's start."""

    sender: int
    starts: int
    every: int
    count: int
    prompt_tokens: int
    output_tokens: int
    cancelled_after: int | None = None


# One stream may fill the engine for as long as it lasts, so whoever has no bound waits that long.
STREAMS = st.lists(
    st.builds(
        Stream,
        sender=st.integers(0, len(SENDERS) - 1),
        starts=st.integers(0, 30),
        every=st.integers(1, 5),
        count=st.integers(1, 30),
        prompt_tokens=st.integers(1, 420),
        output_tokens=st.integers(1, 30),
        cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 60)),
    ),
    min_size=1,
    max_size=4,
)


@dataclass(frozen=True)
class Came:
    """One request as it came: its number in order of arrival at the scheduler, and when."""

    name: str
    number: int
    sender: Sender
    prompt_tokens: int
    total_tokens: int
    queued_s: float


@dataclass
class Pass:
    """One scheduling pass.

    Attributes:
        number: from 0. now_s: on the scheduler's clock.
        waiting: those that had never been admitted, and were not ended by it, in order of arrival.
        running: those in the running list before it. prefilling: those of them whose prefill was under way.
        admitted: those of `waiting` that it admitted, in order.
        tokens: what each request got.
        keys: ordering keys of `waiting` when it was over.
        resuming: how many waited that had been admitted before and lost their blocks.
        resumed: those of them that it admitted again.
    """

    number: int
    now_s: float
    waiting: list[str]
    running: list[str]
    prefilling: list[str]
    admitted: list[str]
    tokens: dict[str, int]
    keys: dict[str, tuple[Any, ...]]
    resuming: int
    resumed: list[str]


@dataclass
class Watched:
    """A whole run."""

    served: Served
    came: dict[str, Came] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    # By request, each answer of the key: its parts, and until when they are valid.
    keyed: dict[str, list[tuple[tuple[float, ...], float | None]]] = field(default_factory=dict)

    def overtakes(self) -> Iterator[tuple[Pass, Came, Came]]:
        """(pass, who was overtaken, by whom) for each admission before one that came earlier and still waited."""
        for made in self.passes:
            left = list(made.waiting)
            for name in made.admitted:
                left.remove(name)
                later = self.came[name]
                for other in left:
                    if self.came[other].number < later.number:
                        yield made, self.came[other], later


@cache
def config_of(async_scheduling: bool) -> Any:
    """A small engine: its pool cannot hold much more than one of the largest requests."""
    return make_config(
        block_size=BLOCK_SIZE,
        max_num_seqs=SEATS,
        max_num_batched_tokens=STEP_TOKENS,
        async_scheduling=async_scheduling,
    )


def watch(
    enable: str, knobs: Knobs, async_scheduling: bool, streams: list[Stream], blocks: int = BLOCKS
) -> Watched:
    """Serve the streams and note each pass."""
    config = config_of(async_scheduling)
    with patched(enable, {name: dict(values) for name, values in knobs.items()}) as (_, clock):
        arrivals, cancels, senders = [], [], dict[str, Sender]()
        for which, stream in enumerate(streams):
            for number in range(stream.count):
                name, step = f"s{which}-{number}", stream.starts + number * stream.every
                senders[name] = SENDERS[stream.sender]
                arrivals.append((step, _request(config, name, stream, senders[name], step)))
                if stream.cancelled_after is not None:
                    cancels.append((step + stream.cancelled_after, name))
        scheduler = make_scheduler(config, blocks)
        watched = Watched(Served())
        _note_passes(scheduler, clock, watched, senders)
        watched.served = serve(scheduler, clock, arrivals, cancels)
    return watched


def _request(config: Any, name: str, stream: Stream, sender: Sender, step: int) -> Any:
    which, number = name[1:].split("-")
    made = make_request(
        config,
        name,
        prompt(1_000 * int(which) + int(number), stream.prompt_tokens),
        max_tokens=stream.output_tokens,
        arrival_time=1.0 + step,
        priority=sender.priority,
        tenant=sender.name,
        tier=sender.tier,
    )
    made.sampling_params.extra_args |= {"weight": sender.weight, "slo_ttft_ms": 1e3 * sender.slo_s}
    return made


def _note_passes(scheduler: Any, clock: Any, watched: Watched, senders: Mapping[str, Sender]) -> None:
    schedule, add = scheduler.schedule, scheduler.add_request
    never = dict[str, Any]()
    runtime = scheduler.__dict__.get(RUNTIME_ATTR)

    def add_request(request: Any) -> None:
        name = request.request_id
        prompt_tokens = request.num_prompt_tokens
        request.arrival_time = clock.seconds()
        never[name] = request
        watched.came[name] = Came(
            name,
            len(watched.came),
            senders[name],
            prompt_tokens,
            prompt_tokens + request.max_tokens,
            clock.seconds(),
        )
        add(request)

    def noted() -> Any:
        running = [request.request_id for request in scheduler.running]
        prefilling = [request.request_id for request in scheduler.running if request.is_prefill_chunk]
        resuming = sum(1 for r in scheduler.waiting if r.request_id not in never)
        out = schedule()
        waiting = {name: r for name, r in never.items() if name in scheduler.requests}
        never.clear()
        never.update(waiting)
        admitted = [new.req_id for new in out.scheduled_new_reqs]
        keys = {name: getattr(r, TICKET_ATTR, None) for name, r in waiting.items()}
        watched.passes.append(
            Pass(
                len(watched.passes),
                clock.seconds(),
                list(waiting),
                running,
                prefilling,
                admitted,
                dict(out.num_scheduled_tokens),
                {name: ticket.key for name, ticket in keys.items() if ticket is not None},
                resuming,
                sorted(out.scheduled_cached_reqs.resumed_req_ids),
            )
        )
        for name in admitted:
            del never[name]
        return out

    scheduler.schedule, scheduler.add_request = noted, add_request
    if runtime is not None:
        of_key = runtime.key

        def key(request: Any, now: float) -> Any:
            found = of_key(request, now)
            watched.keyed.setdefault(request.request_id, []).append(found)
            return found

        runtime.key = key

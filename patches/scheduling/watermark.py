"""S2: KV levels with hysteresis; low priority is admitted only if the running requests will still have room to grow."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from patches.scheduling.claims import Rank, class_of
from patches.scheduling.room import Room
from patches.seam.patch import Hooks, Knobs, Patch

WHY = """
A request is admitted when its prompt fits. Its answer, the answers of all others and the rest of the prompts that are
still in prefill need blocks too, later, and when there are none left somebody is preempted and starts from nothing. A
fixed share that stays free, as upstream's watermark has it, is too much in a quiet hour and too little in a busy one,
and it holds the important as well as the unimportant.
"""

HOW = """
The blocks that are referenced, and those that running prefills will still take, give a level: green, yellow from 70%,
red from 85%, each left again only some way below. Blocks that are only cached count as free: reclaiming them would cost
hits and gain nothing. In green everybody may pass. In yellow requests of a lower class than the best present are held,
in red everybody, but for short ones as long as somebody of a lower class than theirs runs, whose blocks would be taken
sooner than their own.

What decides beyond the level is whether it will fit: what runs is carried forward at the mean length that answers of its
tenant had, each giving back its blocks as it ends, and the peak with the new one must stay below a share of the pool. Who
is held by the level passes all the same if it fits, so memory is not idle; whom the level lets pass is held if it does not,
so no admission is expected to cause a preemption. Requests do not say how long their answer will be, and the limit that
they carry is not used as such.

Seats are room too, and what better classes hold rises and falls by chance: how many of them run is as good as Poisson's,
so its standard deviation is the root of it. A lower class is let in only if so many of these deviations, in blocks and in
seats, stay free for them; otherwise each of their bursts would wait for answers of that class to end.

If those that run are expected to need more than there is after all, a lower class has a quota of prefill tokens a step from
yellow on: of the step's budget a factor for each class below the best, times the share that is free, beside others only.
(A quota that follows the usage alone would slow down prefills whose memory is spoken for, and gain nothing.) While decodes
may need every free block, running prefills of a lower class pause, for they would be the ones to be preempted: that is
what reclaiming can do before it costs. Both are for long prompts: a short one frees nothing by waiting with what it holds,
and is sooner over. When blocks are short all the same, requests of a lower class with a prompt above
the short length are the first to go.

Who stands at the head of those held for longer than the patience is waited for: nobody of its own or a lower class passes
before it, and it is admitted as soon as its prompt fits, forecast or not. So at the head it waits no longer than the
patience and the time in which requests admitted before it end, unless better ones take all blocks. If nothing runs, nobody
is held, and a pause is never longer than the patience.
"""


class WatermarkKnobs(Knobs):
    """What may be tuned."""

    yellow_share: float = Field(
        0.70, gt=0, lt=1, description="share of the blocks from which on it is yellow"
    )
    red_share: float = Field(0.85, gt=0, lt=1, description="share of the blocks from which on it is red")
    hysteresis_share: float = Field(
        0.05, ge=0, lt=0.5, description="how far below its threshold a level is left"
    )
    forecast: bool = Field(
        True, description="whether the forecast decides: who fits passes, who does not is held"
    )
    peak_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of the blocks that the forecast peak may reach, and of the seats that lower classes may take; "
        "the rest is for short ones and the best class",
    )
    reserve_deviations_ratio: float = Field(
        1.5,
        ge=0,
        description="standard deviations of what better classes hold that are left for them when a lower one is admitted",
    )
    first_output_tokens: int = Field(
        128, ge=1, description="length of an answer as long as none of its tenant has ended"
    )
    short_prompt_tokens: int = Field(
        2048, ge=0, description="prompts below this length count as short; they pass while a lower class runs"
    )
    quota_always: bool = Field(
        False, description="whether the quota holds from yellow on even if all that run will have room"
    )
    quota_factor: float = Field(
        0.5, gt=0, le=1, description="for each class below the best, the part of the quota that it keeps"
    )
    least_quota_tokens: int = Field(32, ge=1, description="the quota is never below this")
    patience_s: float = Field(
        5.0, ge=0, description="wait at the head of those held after which it is waited for"
    )

    @model_validator(mode="after")
    def _rising(self) -> WatermarkKnobs:
        if self.yellow_share >= self.red_share:
            raise ValueError("yellow_share must be below red_share")
        return self


GREEN, YELLOW, RED = range(3)


def next_level(level: int, used_share: float, knobs: WatermarkKnobs) -> int:
    """The level at this usage when it was `level` before: up at the threshold, down only some way below it."""
    thresholds = (0.0, knobs.yellow_share, knobs.red_share)
    reached = RED if used_share >= knobs.red_share else YELLOW if used_share >= knobs.yellow_share else GREEN
    while level > reached and used_share < thresholds[level] - knobs.hysteresis_share:
        level -= 1
    return max(level, reached)


class _Watermark:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: WatermarkKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._room = Room(knobs, context)
        self._level = GREEN
        self._rank: dict[str, Rank] = {}
        self._present: dict[Rank, int] = {}
        # The first that was refused in the last pass, since when it has been, and whether it is waited for.
        self._head = ""
        self._head_since_s = 0.0
        self._refused = False
        self._waited_for = False
        self._paused_since_s: dict[str, float] = {}
        self._crowd: bool | None = None
        self._steps_at = [0, 0, 0]
        self._pauses = 0
        for name, level in (("green", GREEN), ("yellow", YELLOW), ("red", RED)):
            context.gauge(f"watermark_{name}_steps", lambda level=level: float(self._steps_at[level]))
        context.gauge("watermark_pauses", lambda: float(self._pauses))

    def level(self) -> int:
        """The level now."""
        self._level = next_level(self._level, self._room.used_share(), self._knobs)
        return self._level

    def _best(self) -> Rank:
        return min(self._present)

    # the gate

    def waiting_gate(self, request: Any, now: float) -> str | None:
        """Hold what the level holds and the forecast has no room for."""
        room, request_id = self._room, request.request_id
        if not self._context.scheduler.running or room.is_admitting(request_id):
            return None
        rank, best = self._rank[request_id], self._best()
        short = self._context.request_info(request).prompt_tokens < self._knobs.short_prompt_tokens
        if short and room.lower_runs(rank):
            return None
        if self._waited_for and request_id != self._head and rank >= self._rank[self._head]:
            return "an earlier one waits for blocks"
        level = self.level()
        passes = level == GREEN or (level == YELLOW and rank == best)
        if self._knobs.forecast:
            passes = room.fits(request, rank)
        if rank != best and not room.seat_to_spare(rank):
            passes = False
        if passes:
            return None
        if not self._refused:
            self._refused = True
            if self._head != request_id:
                self._head, self._head_since_s, self._waited_for = request_id, now, False
        if self._head == request_id and now - self._head_since_s >= self._knobs.patience_s:
            self._waited_for = True
            free, _ = room.pool()
            if room.blocks(request.num_tokens) + room.promised_blocks() <= free:
                # If something else holds it, nobody need wait for it.
                self._waited_for = False
                return None
        return ("no room to grow", "KV is yellow", "KV is red")[level]

    # tokens and victims

    def token_cap(self, request: Any, computed: int, new_tokens: int, now: float) -> int:
        """From yellow on, the quota of a lower class; a pause while decodes may need every free block."""
        running = self._context.is_running(request)
        if not running:
            self._room.begin_admission(request)
        rank, best = self._rank[request.request_id], self._best()
        short = request.num_prompt_tokens < self._knobs.short_prompt_tokens
        if short or rank == best or self._level == GREEN or not self._room.beside_others(rank):
            return new_tokens
        if running and self._decodes_need_all(request, computed, new_tokens, now):
            return 0
        if not self._crowded():
            return new_tokens
        below = sorted(self._present).index(rank)
        free, total = self._room.pool()
        base = self._context.scheduler.max_num_scheduled_tokens
        quota = int(base * self._knobs.quota_factor**below * free / total)
        return min(new_tokens, max(self._knobs.least_quota_tokens, quota))

    def _crowded(self) -> bool:
        """Whether those who run are expected to need more blocks than there are; looked at once a pass."""
        if self._crowd is None:
            self._crowd = self._knobs.quota_always or self._room.peak() > self._room.pool()[1]
        return self._crowd

    def _decodes_need_all(self, request: Any, computed: int, new_tokens: int, now: float) -> bool:
        decodes, (free, _) = self._room.decodes(), self._room.pool()
        chunk = self._room.blocks(computed + new_tokens) - self._room.blocks(computed)
        if not decodes or free - chunk >= decodes:
            self._paused_since_s.pop(request.request_id, None)
            return False
        since_s = self._paused_since_s.setdefault(request.request_id, now)
        if now - since_s > self._knobs.patience_s:
            return False
        self._pauses += 1
        return True

    def victim_hint(self, request: Any) -> float:
        """Above green, a lower class with a long prompt goes first."""
        rank = self._rank.get(request.request_id)
        if self._level == GREEN or rank is None or rank == self._best():
            return 0.0
        return 0.5 if request.num_prompt_tokens >= self._knobs.short_prompt_tokens else 0.0

    # bookkeeping

    def on_add(self, request: Any, now: float) -> None:
        """Note its class."""
        rank = self._rank[request.request_id] = class_of(self._context.request_info(request))
        self._present[rank] = self._present.get(rank, 0) + 1

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """See who runs and who prefills."""
        requests = self._context.scheduler.requests
        entered = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        for request_id in (*entered, *scheduler_output.scheduled_cached_reqs.resumed_req_ids):
            self._room.admit(requests[request_id], self._rank[request_id])
            self._leave_head(request_id)
        self._room.end_pass()
        self._refused = False
        self._crowd = None
        self._steps_at[self.level()] += 1

    def _leave_head(self, request_id: str) -> None:
        if request_id == self._head:
            self._head, self._waited_for = "", False

    def on_preempt(self, request: Any, now: float) -> None:
        """Its blocks are free and it waits again."""
        self._stop_running(request.request_id, self._rank[request.request_id])

    def on_finish(self, request: Any, now: float) -> None:
        """Learn the length of its answer, and forget it."""
        request_id = request.request_id
        rank = self._rank.pop(request_id, None)
        if rank is None:
            return
        if str(request.status.name) in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            self._room.answered(request)
        self._stop_running(request_id, rank)
        self._leave_head(request_id)
        self._present[rank] -= 1
        if not self._present[rank]:
            del self._present[rank]

    def _stop_running(self, request_id: str, rank: Rank) -> None:
        self._paused_since_s.pop(request_id, None)
        self._room.stop(request_id, rank)


def build(knobs: WatermarkKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Watermark(knobs, context)
    return Hooks(
        waiting_gate=state.waiting_gate,
        token_cap=state.token_cap,
        victim_hint=state.victim_hint,
        after_schedule=state.after_schedule,
        on_add=state.on_add,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="watermark",
    number="S2",
    area="scheduling",
    summary="KV levels with hysteresis; low priority is admitted only where a forecast leaves room to grow",
    knobs=WatermarkKnobs,
    build=build,
    seams=(
        "waiting_gate",
        "token_cap",
        "victim_hint",
        "after_schedule",
        "on_add",
        "on_preempt",
        "on_finish",
    ),
    ranks={"waiting_gate": 10, "token_cap": 10, "victim_hint": 10},
    why=WHY,
    how=HOW,
    baseline="--watermark: a fixed share of the blocks stays free at admission, for everybody",
    mechanism="preemptions",
    replaces=("watermark",),
    references=(
        "Gong et al.: Past-Future Scheduler for LLM Serving under SLA Guarantees (ASPLOS 2025), for the peak from past "
        "lengths of answers",
    ),
    removable_when="upstream's admission forecasts what running requests will still need",
)

"""`wfq`, or another patch that is by tenant, on plain objects and a real queue of tenants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from patches.scheduling import wfq
from patches.seam.context import RequestInfo
from patches.seam.patch import Hooks, Patch
from patches.seam.tenant_queue import TenantLine, TenantQueue
from tests.scheduling.fakes import FakeContext, FakeRequest, FakeScheduler, scheduled


class TenantContext(FakeContext):
    """A FakeContext whose requests have tenants, with a real queue of tenants."""

    def __init__(self, scheduler: FakeScheduler, others: tuple[str, ...] = ()) -> None:
        super().__init__(scheduler, others)
        self.tenants: dict[str, tuple[str, float]] = {}
        self.queue: TenantQueue

    def start(self, hooks: Hooks, gates: tuple[Any, ...] = ()) -> None:
        """Build the queue around the patch's hooks; FCFS inside a tenant."""
        self.hooks = hooks
        rank = hooks.tenant_rank
        self.queue = TenantQueue(
            lambda request, now: ((self.order.index(request.request_id),), None),
            lambda: self.now,
            gates,
            (hooks.on_pick,) if hooks.on_pick else (),
            (hooks.on_put_back,) if hooks.on_put_back else (),
            tenant_of=lambda request: self.tenants[request.request_id][0],
            rank=rank or (lambda tenant, now: 0.0),
        )

    @property
    def order(self) -> list[str]:
        """Ids in order of arrival."""
        return list(self.tenants)

    def request_info(self, request: FakeRequest) -> RequestInfo:
        """Its tenant and weight."""
        tenant, weight = self.tenants[request.request_id]
        return RequestInfo(tenant, "", 0, request.num_prompt_tokens, 0.0, 0, weight)

    def line(self, tenant: str) -> TenantLine:
        """From the queue."""
        return self.queue.line(tenant)

    def lines(self, most: int) -> list[TenantLine]:
        """From the queue."""
        return self.queue.lines(most)

    def tenant_rank(self, tenant: str) -> float | None:
        """As the patch under test has it."""
        rank = self.hooks.tenant_rank
        return None if rank is None else rank(tenant, self.now)

    def rerank(self, tenant: str) -> None:
        """To the queue."""
        self.queue.rerank(tenant)


class Policy:
    """The patch with requests that a test adds, admits, serves and ends; blocks and seats are plenty.

    `wfq` is ahead by no burst unless a test says so.
    """

    def __init__(self, patch: Patch = wfq.PATCH, *, beside: tuple[str, ...] = (), **knobs: Any) -> None:
        if patch is wfq.PATCH:
            knobs = {"burst_tokens": 0, **knobs}
        self.scheduler = FakeScheduler(free_blocks=10_000, all_blocks=10_000)
        self.context = TenantContext(self.scheduler, beside)
        self.hooks: Hooks = patch.build(patch.knobs(**knobs), self.context)  # type: ignore[arg-type]
        gate = self.hooks.waiting_gate
        self.context.start(self.hooks, (gate,) if gate is not None else ())

    def add(self, name: str, prompt: int = 100, *, tenant: str = "", weight: float = 1.0) -> FakeRequest:
        """It comes, and waits."""
        self.context.tenants[name] = (tenant or name[0], weight)
        request = FakeRequest(name, num_prompt_tokens=prompt, num_tokens=prompt)
        assert self.hooks.on_add
        self.hooks.on_add(request, 0.0)
        self.context.queue.add_request(request)
        return request

    def pick(self) -> FakeRequest:
        """The scan takes the first that passes; the pass is not over."""
        request: FakeRequest = self.context.queue.pop_request()
        self.scheduler.running.append(request)
        return request

    def serve(self, **tokens: int) -> None:
        """The pass ends with these tokens; who has its whole prompt decodes. The next one begins."""
        new = []
        for request in self.scheduler.running:
            count = tokens.get(request.request_id, 0)
            if count and not request.num_computed_tokens:
                new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=0))
            request.num_computed_tokens += count
            request.num_tokens = max(request.num_tokens, request.num_computed_tokens)
            request.is_prefill_chunk = request.num_computed_tokens < request.num_prompt_tokens
        output = scheduled(tokens)
        output.scheduled_new_reqs = new
        assert self.hooks.after_schedule
        self.hooks.after_schedule(output, 0.0)
        self.context.queue.begin_step(0.0)

    def run(self, name: str, prompt: int = 100, **who: Any) -> FakeRequest:
        """Added, admitted and prefilled in one pass; nothing else may wait."""
        request = self.add(name, prompt, **who)
        assert self.pick() is request
        self.serve(**{name: prompt})
        return request

    def update(self, drafted: dict[str, int], delivered: dict[str, int]) -> None:
        """A model output for so many drafts, with so many tokens."""
        outputs = [SimpleNamespace(request_id=name, new_token_ids=[7] * n) for name, n in delivered.items()]
        assert self.hooks.after_update
        self.hooks.after_update(
            SimpleNamespace(scheduled_spec_decode_tokens={name: [-1] * n for name, n in drafted.items()}),
            {0: SimpleNamespace(outputs=outputs)},
            0.0,
        )

    def preempt(self, request: FakeRequest) -> None:
        """Upstream takes its blocks and queues it again."""
        assert self.hooks.on_preempt
        self.hooks.on_preempt(request, 0.0)
        self.scheduler.running.remove(request)
        request.num_computed_tokens = 0
        self.context.queue.prepend_request(request)

    def finish(self, request: FakeRequest) -> None:
        """It ends, wherever it is."""
        if request in self.scheduler.running:
            self.scheduler.running.remove(request)
        else:
            self.context.queue.remove_request(request)
        assert self.hooks.on_finish
        self.hooks.on_finish(request, 0.0)

    def rank(self, tenant: str) -> float:
        """Its counter."""
        assert self.hooks.tenant_rank
        return self.hooks.tenant_rank(tenant, 0.0)

    def cap(self, request: FakeRequest, new_tokens: int) -> int:
        """What it may have of `new_tokens`."""
        assert self.hooks.token_cap
        return self.hooks.token_cap(request, request.num_computed_tokens, new_tokens, 0.0)

    def gauge(self, name: str) -> float:
        """A mechanism metric."""
        return self.context.gauges[name]()

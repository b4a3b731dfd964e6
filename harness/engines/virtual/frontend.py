"""The client and the API server of a virtual run.

Requests arrive at their times, pass upstream's own admission, and enter the engine the way its input
thread lets them in: between two calls of the engine's step function. A cancellation takes the
engine's abort queue, which is drained before a step's output is processed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM

from harness.engines.virtual.account import ENGINE, FRONT_END
from harness.engines.virtual.clock import VirtualClock
from harness.engines.virtual.executor import DeviceState
from harness.engines.virtual.recorder import Recorder, RequestState
from patches.seam import endings
from workloads.request import PlannedRequest, Workload


class FrontEnd:
    """Open loop: send times are fixed in advance and never wait for a response."""

    def __init__(self, core: Any, device: DeviceState, recorder: Recorder, workload: Workload) -> None:
        self._core, self._device, self._recorder = core, device, recorder
        self._enter_part = device.account.enter
        # The only clock that lets things happen at their times.
        assert isinstance(device.clock, VirtualClock)
        self._clock = device.clock
        self._inbox: deque[Callable[[], None]] = deque()
        self._live: dict[str, RequestState] = {}
        self._tenants = {t.name: t for t in workload.tenants}
        # `check_admission` reads only what this class offers, so upstream's own code decides here.
        self._check_admission = AsyncLLM.check_admission
        self.scheduler_config = core.vllm_config.scheduler_config
        self.admission_stats = None
        self._queued_tokens = 0
        self._rejection = ""
        for request in workload.requests:
            self._clock.at(request.intended_ns, self._counted(self._send, request))
            if request.cancel_ns is not None:
                self._clock.at(request.cancel_ns, self._counted(self._cancel, request))

    def _counted(self, act: Callable[[PlannedRequest], None], planned: PlannedRequest) -> Callable[[], None]:
        def action() -> None:
            before = self._enter_part(FRONT_END)
            act(planned)
            self._enter_part(before)

        return action

    # What upstream's admission asks for.

    def get_num_unfinished_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self._live)

    def get_num_queued_tokens(self) -> int:
        """Prompt tokens of the requests still in prefill, uncached or not (as upstream counts)."""
        return self._queued_tokens

    def _record_admission_rejection(self, reason: str) -> None:
        self._rejection = reason

    # Client side.

    def _send(self, planned: PlannedRequest) -> None:
        state = self._recorder.states[planned.request_id]
        state.sent_ns = self._clock.now_ns
        self._rejection = ""
        try:
            self._check_admission(self, 1, planned.request_id)
        except GracefulHTTPError as error:
            reason = self._rejection or error.message
            self._recorder.on_end(state, "rejected", reason, self._clock.now_ns)
            return
        self._live[planned.request_id] = state
        self._queued_tokens += len(planned.prompt)
        arrival_s = self._clock.seconds()
        self._inbox.append(lambda: self._enter(planned, arrival_s))

    def _cancel(self, planned: PlannedRequest) -> None:
        state = self._live.pop(planned.request_id, None)
        if state is None:
            return
        if state.first_token_ns < 0:
            self._queued_tokens -= len(planned.prompt)
        self._recorder.on_end(state, "cancelled", "client closed the stream", self._clock.now_ns)
        self._core.aborts_queue.put_nowait([planned.request_id])
        self._inbox.append(lambda: self._core.abort_requests([planned.request_id]))

    # Engine side.

    def _enter(self, planned: PlannedRequest, arrival_s: float) -> None:
        tenant = self._tenants[planned.tenant]
        self._device.outputs[planned.request_id] = planned.output.tolist()
        params = SamplingParams(
            max_tokens=len(planned.output),
            ignore_eos=True,
            temperature=0.0,
            extra_args=tenant.identity,
        )
        sent = EngineCoreRequest(
            request_id=planned.request_id,
            prompt_token_ids=planned.prompt.tolist(),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival_s,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=tenant.priority,
            session_id=planned.session or None,
        )
        self._enter_part(ENGINE)
        self._core.add_request(*self._core.preprocess_add_request(sent))
        self._enter_part(FRONT_END)

    def deliver(self) -> None:
        """Let in what has arrived, as the engine's loop does before each step."""
        if not self._inbox:
            return
        before = self._enter_part(FRONT_END)
        while self._inbox:
            self._inbox.popleft()()
        self._enter_part(before)

    def receive(self, outputs: dict[int, Any] | None) -> None:
        """Hand a step's outputs to the clients that still listen."""
        if not outputs:
            return
        now_ns, live = self._clock.now_ns, self._live
        rows: list[int] = []
        for per_client in outputs.values():
            for output in per_client.outputs:
                state = live.get(output.request_id)
                if state is None:
                    continue
                tokens = output.new_token_ids
                if tokens:
                    if state.first_token_ns < 0:
                        self._queued_tokens -= len(state.planned.prompt)
                        self._recorder.on_first_tokens(state, len(tokens), now_ns)
                    rows.append(state.row)
                    if len(tokens) > 1:
                        rows += [state.row] * (len(tokens) - 1)
                if output.finish_reason is not None:
                    self._end(state, output, now_ns)
        self._recorder.on_tokens(rows, now_ns)

    def _end(self, state: RequestState, output: Any, now_ns: int) -> None:
        del self._live[state.planned.request_id]
        if state.first_token_ns < 0:
            self._queued_tokens -= len(state.planned.prompt)
        retry_after_s = None
        if output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            status, reason = "ok", ""
        elif (ending := endings.parse(output.stop_reason)) is not None:
            status, reason, retry_after_s = ending.status, ending.code, ending.retry_after_s
        else:
            status, reason = "failed", str(output.stop_reason or output.finish_reason)
        self._recorder.on_end(state, status, reason, now_ns, retry_after_s)

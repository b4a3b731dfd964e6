"""What will be sent and when, worked out of a workload before the run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from harness.engines.live.client.target import Options
from harness.errors import UserError
from workloads.request import Tenant, TokenIds, Workload


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """One request to be sent; times are ns from the run's start.

    Attributes:
        prompt: token ids, shape (prompt_tokens,), int32.
        max_tokens: length of the true output; the stop token is ignored, so that many come.
        cancel_ns: when the stream is closed if it has not ended by then, or None.
        session: groups requests of one chat or completion session, or "".
        identity: whose it is (`Tenant.identity`).
    """

    request_id: str
    intended_ns: int
    prompt: TokenIds
    max_tokens: int
    cancel_ns: int | None
    session: str
    identity: Mapping[str, str | int | float]
    priority: int


def sends_of(workload: Workload) -> tuple[Send, ...]:
    """The workload's requests in order of their times.

    Raises:
        UserError: a request id cannot be sent as a header, or a request has no prompt or no output.
    """
    tenants = {tenant.name: tenant for tenant in workload.tenants}
    return tuple(_send(request, tenants[request.tenant]) for request in workload.requests)


def _send(request: Any, tenant: Tenant) -> Send:
    name = request.request_id
    if not name or any(not 32 < ord(c) < 127 for c in name):
        raise UserError(
            f"workload request {request.index}: the id {name!r} cannot be sent as X-Request-Id; "
            "use printable ASCII without spaces"
        )
    if len(request.prompt) == 0 or len(request.output) == 0:
        raise UserError(
            f"workload request {name}: a request needs a prompt and an output of one token or more"
        )
    return Send(
        request_id=name,
        intended_ns=request.intended_ns,
        prompt=request.prompt,
        max_tokens=len(request.output),
        cancel_ns=request.cancel_ns,
        session=request.session,
        identity=tenant.identity,
        priority=tenant.priority,
    )


def share(sends: Sequence[Send], workers: int) -> tuple[tuple[Send, ...], ...]:
    """Deal requests out to workers, round robin by session in order of appearance, so that a session stays whole."""
    shares: list[list[Send]] = [[] for _ in range(workers)]
    owner: dict[str, int] = {}
    dealt = 0
    for send in sends:
        number = owner.get(send.session) if send.session else None
        if number is None:
            number = dealt % workers
            dealt += 1
            if send.session:
                owner[send.session] = number
        shares[number].append(send)
    return tuple(tuple(part) for part in shares)


def body_of(send: Send, model: str, options: Options) -> bytes:
    """The request's JSON body, as `CompletionRequest` of vLLM 0.32.0 takes it."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": send.prompt.tolist(),
        "max_tokens": send.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": options.continuous_usage},
        "return_token_ids": options.token_ids,
        "vllm_xargs": send.identity,
    }
    if send.session:
        body["session_id"] = send.session
    if options.send_priority:
        body["priority"] = send.priority
    if options.cache_salt:
        body["cache_salt"] = options.cache_salt
    body.update(options.extra_body)
    return msgspec.json.encode(body)

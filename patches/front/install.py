"""Puts the front before vLLM's API server. In a process without one, nothing is done or imported."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from http import HTTPStatus
from pathlib import Path
from typing import Any

from harness.errors import UserError
from patches.front.access import Access
from patches.front.events import Events
from patches.front.middleware import Front
from patches.seam import adapter, endings
from patches.seam.ledger import Ledger
from patches.seam.plugin import SERVER_MODULE
from patches.seam.targets import FRONT, REFUSALS
from patches.seam.upstream_lock import check

# Seams whose patches end requests, or refuse them at the API.
_REFUSING = frozenset({"expire", "api_admission"})
_ledger: Ledger | None = None


def in_server(identity: str | None, events: str | None = None) -> bool:
    """Install what this API server needs; whether anything was.

    Args:
        identity: path of an identity file, or None. events: file for the lines of `Events`, or None.

    Raises:
        UserError: the identity file is wrong. DriftError: vLLM is not what this was written for.
    """
    global _ledger
    module = sys.modules.get(SERVER_MODULE)
    refuses, watches = _plan_refuses(), _plan_has("cachedash")
    if module is None or _ledger is not None or not (identity or refuses or watches):
        return False
    check((*FRONT, *REFUSALS) if refuses else FRONT)
    if identity:
        _check_front_end()
    # Read once here, so that a server with a wrong file does not start.
    access = Access(Path(identity)) if identity else None
    record = Events(Path(events) if events else None)
    ledger = Ledger()
    stock = vars(module)["init_entrypoints_middleware"]
    ledger.replace(module, "init_entrypoints_middleware", _with_front(stock, access, record, watches))
    if refuses:
        # The server's process loads it in a moment anyway.
        from vllm.v1.engine.async_llm import AsyncLLM

        ledger.replace(AsyncLLM, "generate", _raising(vars(AsyncLLM)["generate"]))
    _ledger = ledger
    return True


def undo() -> None:
    """Take out what was installed."""
    global _ledger
    if _ledger is not None:
        _ledger.undo()
        _ledger = None


def _check_front_end() -> None:
    """Refuse ways of serving that the front does not stand before: they would let everybody in."""
    rust = os.environ.get("VLLM_USE_RUST_FRONTEND", "0").lower() not in ("", "0", "false")
    if rust or any(word == "--grpc" or word.startswith("--grpc=") for word in sys.argv):
        raise UserError(
            "the identity file has no effect on vLLM's gRPC server or Rust front end; serve without them"
        )


def _plan_refuses() -> bool:
    installed = adapter.active()
    return installed is not None and any(
        _REFUSING & set(chosen.patch.seams) for chosen in installed.plan.patches
    )


def _plan_has(patch: str) -> bool:
    installed = adapter.active()
    return installed is not None and patch in installed.plan.names


def _with_front(stock: Any, access: Access | None, record: Events, watches: bool) -> Any:
    @functools.wraps(stock)
    def init_entrypoints_middleware(args: Any, app: Any, *more: Any, **named: Any) -> None:
        stock(args, app, *more, **named)
        if watches:
            from patches.front.cache_page import CachePage

            # What is told of tenants is for everybody only where no caller has a key.
            app.add_middleware(CachePage, open_metrics=access is None)
        # Added last, it is the outermost: vLLM's own key check comes after it.
        app.add_middleware(
            Front,
            access,
            record,
            takes_priority=_takes_priority,
            operator_keys=_operator_keys,
            paced=_plan_has("admission"),
        )

    return init_entrypoints_middleware


def _takes_priority(scope: Any) -> bool:
    """Whether a priority has a meaning: to vLLM's own policy, or to patches, which order by it under any."""
    config = getattr(scope["app"].state, "vllm_config", None)
    return adapter.active() is not None or (
        config is not None and config.scheduler_config.policy == "priority"
    )


def _operator_keys(scope: Any) -> Iterable[str]:
    """As vLLM takes them itself: those of the command line, else the environment's."""
    return scope["app"].state.args.api_key or [os.environ.get("VLLM_API_KEY") or ""]


def _raising(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`AsyncLLM.generate` that ends with an error where a patch ended the request.

    Without it, a completion that ended before its first token would look like an empty answer.
    """
    from vllm.exceptions import RetryableRequestError

    class EndedByPatch(RetryableRequestError):
        """Of a kind that vLLM answers without printing a stack."""

        def __init__(self, reason: str, status: int) -> None:
            super().__init__(reason)
            self.status_code = HTTPStatus(status)

    @functools.wraps(stock)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        # Closed at once when the caller leaves, as the plain generator is.
        async with aclosing(stock(self, *args, **kwargs)) as outputs:
            async for output in outputs:
                for one in output.outputs:
                    if one.finish_reason == "abort" and (ending := endings.parse(one.stop_reason)):
                        raise EndedByPatch(one.stop_reason, ending.http_status)
                yield output

    return generate

"""Sends every request at its time, whatever became of the ones before."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from yarl import URL

from harness.engines.live.client.observed import Observed
from harness.engines.live.client.sends import Send, body_of
from harness.engines.live.client.stream import Stream
from harness.engines.live.client.target import Options, Target
from harness.engines.live.client.watch import LoopSamples, Watch, queued

# No compression: its blocks would gather tokens. No cookies, no proxies of the environment.
_HEADERS = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "User-Agent": "vllm-patchbench"}
PROGRESS_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one process has come."""

    sent: int
    ended: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """One process's share, in the order of its sends.

    `cpu_s` is the processor time of the whole process while it drove, `wall_s` the time that took, `queued_s` how
    long it could have run and got no core (None where the kernel does not tell).
    """

    observed: tuple[Observed, ...]
    loop: LoopSamples
    cpu_s: float
    wall_s: float
    queued_s: float | None


def run_loop(
    sends: Sequence[Send],
    target: Target,
    options: Options,
    epoch_ns: int,
    progress: Callable[[Progress], None] | None = None,
    attach: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], None] | None = None,
) -> Replayed:
    """`replay` on an event loop of its own, with the collector off.

    `attach(loop, stop)` may hang watchers on the loop before it starts; `stop()` ends the replay early.
    """

    async def main(watch: Watch) -> tuple[Observed, ...]:
        task = asyncio.ensure_future(replay(sends, target, options, epoch_ns, watch, progress))
        if attach is not None:
            attach(asyncio.get_running_loop(), lambda: _cancel(task))
        return await task

    with Watch() as watch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cpu_s, wall_s, queued_s = time.process_time(), time.monotonic(), queued()
        observed = runner.run(main(watch))
        return Replayed(
            observed,
            LoopSamples.of(watch),
            cpu_s=time.process_time() - cpu_s,
            wall_s=time.monotonic() - wall_s,
            queued_s=None if queued_s is None else (queued() or 0.0) - queued_s,
        )


async def replay(
    sends: Sequence[Send],
    target: Target,
    options: Options,
    epoch_ns: int,
    watch: Watch,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Observed, ...]:
    """Send each request at `epoch_ns` + its time and wait until the last has ended.

    Args:
        sends: in order of their times.
        epoch_ns: the run's start on CLOCK_MONOTONIC; all times of the result count from it.
        watch: takes the loop's samples.
        progress: called once a second.

    Returns:
        What was seen of each, in the order of `sends`.
    """
    streams = [Stream(send, epoch_ns, options.keep_token_ids) for send in sends]
    tasks: set[asyncio.Task[None]] = set()
    ended = 0

    def settle(task: asyncio.Task[None]) -> None:
        nonlocal ended
        ended += 1
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # nothing that a server does raises here, so this is a fault of ours: it must not pass unseen
            faults.append(error)

    async def report() -> None:
        while progress is not None:
            await asyncio.sleep(PROGRESS_EVERY_S)
            progress(Progress(sent, ended, sum(stream.tokens for stream in streams)))

    faults: list[BaseException] = []
    sent = 0
    url = URL(target.completions_url)
    helpers = [asyncio.create_task(watch.sample(epoch_ns)), asyncio.create_task(report())]
    try:
        async with _session(options) as session:
            for send, stream in zip(sends, streams, strict=True):
                # built ahead of its time, so that a long prompt does not delay its own sending
                body = body_of(send, target.model, options)
                await _until(epoch_ns + send.intended_ns)
                task = asyncio.create_task(stream.run(session, target, url, body, options))
                tasks.add(task)
                task.add_done_callback(settle)
                sent += 1
            while tasks:
                await asyncio.wait(tasks)
    finally:
        for unfinished in (*helpers, *tasks):
            unfinished.cancel()
        await asyncio.gather(*helpers, *tasks, return_exceptions=True)
    if faults:
        raise faults[0]
    return tuple(stream.observed for stream in streams)


async def _until(due_ns: int) -> None:
    """Wait for a moment of CLOCK_MONOTONIC; never early, and late by what the loop is late."""
    while (rest_ns := due_ns - time.monotonic_ns()) > 0:
        # timers are good to a millisecond and may fire early: the rest is spent in turns of the loop
        await asyncio.sleep(rest_ns / 1e9)


def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()


@contextlib.asynccontextmanager
async def _session(options: Options) -> AsyncIterator[aiohttp.ClientSession]:
    if options.keep_alive_s > 0:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=options.keep_alive_s)
    else:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_timeout_s),
        headers=_HEADERS,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    ) as session:
        yield session

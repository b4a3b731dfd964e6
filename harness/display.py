"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from harness.engines.virtual.account import LABELS

_PLAIN_EVERY_S = 10.0


class Display(Protocol):
    """Takes the runner's events."""

    def on(self, event: Mapping[str, Any]) -> None:
        """Show one event."""


def _task(event: Mapping[str, Any]) -> str:
    return f"{event['arm']} seed {event['seed']}"


class _Spending:
    """Adds up where the real time of finished runs went."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Take a finished run's account, if it has one."""
        for part, seconds in event.get("spent", {}).items():
            self._spent[part] = self._spent.get(part, 0.0) + seconds

    def line(self) -> str:
        """Shares of the whole, in words; "" before the first run ended."""
        whole = sum(self._spent.values())
        if not whole:
            return ""
        shares = [
            f"{LABELS.get(part, part)} {100 * seconds / whole:.0f}%"
            for part, seconds in self._spent.items()
            if seconds
        ]
        return f"real time of the engines: {', '.join(shares)}"


def _result(event: Mapping[str, Any]) -> str:
    """What a finished run has to say of itself; a virtual one says how fast it was."""
    if "text" in event:
        return str(event["text"])
    ratio = event["wall_s"] / event["upstream_s"] if event["upstream_s"] else float("nan")
    return (
        f"{event['virtual_s']:.0f} s of virtual time in {event['wall_s']:.1f} s, {ratio:.2f} times"
        f" the {event['upstream_s']:.1f} s inside vLLM's schedule and update"
    )


class PlainDisplay(AbstractContextManager["PlainDisplay"]):
    """A line for what begins and ends, and one now and then in between."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._total, self._done = console, total, done
        self._last = time.monotonic()
        self._spending = _Spending()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and (spending := self._spending.line()):
            self._line(spending)

    def on(self, event: Mapping[str, Any]) -> None:
        """Print it, unless it is progress and the last line is fresh."""
        name = event["event"]
        now = time.monotonic()
        if name == "loading":
            self._line("loading vLLM")
        elif name == "started":
            self._line(f"{_task(event)}: started, {event['requests']} requests")
        elif name == "finished":
            self._done += 1
            self._spending.add(event)
            self._line(f"[{self._done}/{self._total}] {_task(event)}: {_result(event)}")
        elif name == "failed":
            self._line(f"{_task(event)}: FAILED: {event['error']}")
        elif name == "note":
            if now - self._last >= _PLAIN_EVERY_S:
                self._line(f"{_task(event)}: {event['text']}")
        elif now - self._last >= _PLAIN_EVERY_S:
            self._line(f"{_task(event)}: at {event['virtual_s']:.0f} s, {event['ended']} requests ended")

    def _line(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A bar for the whole run and one for each arm and seed at work."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self._whole = Progress(
            TextColumn("all runs"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        from rich.console import Group
        from rich.live import Live

        self._live = Live(
            Group(self._bars, self._whole), console=console, refresh_per_second=5, transient=True
        )
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        # Finer than whole runs, so that the estimate of what is left moves.
        self._all = self._whole.add_task("all", total=total, completed=done)
        self._share: dict[str, float] = {}
        self._done = done
        self._spending = _Spending()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if error is None and (spending := self._spending.line()):
            self._console.print(spending, highlight=False, markup=False, soft_wrap=True)

    def on(self, event: Mapping[str, Any]) -> None:
        """Move the bars."""
        name = event["event"]
        if name == "loading":
            self._console.print("loading vLLM", highlight=False)
            return
        task = _task(event)
        if name == "started":
            self._tasks[task] = self._bars.add_task(task, total=event["virtual_s"], note="")
        elif name == "progress":
            bar = self._tasks[task]
            note = f"{event['virtual_s']:.0f} s, {event['ended']} ended"
            self._bars.update(bar, completed=event["virtual_s"], note=note)
            total = self._bars.tasks[self._bars.task_ids.index(bar)].total or 1.0
            self._share[task] = min(0.99, event["virtual_s"] / total)
        elif name == "note":
            self._bars.update(self._tasks[task], note=event["text"])
        else:
            self._bars.remove_task(self._tasks.pop(task))
            self._share.pop(task, None)
            self._done += 1
            self._spending.add(event)
            text = _result(event) if name == "finished" else f"FAILED: {event['error']}"
            self._console.print(f"{task}: {text}", highlight=False, markup=False, soft_wrap=True)
        self._whole.update(self._all, completed=self._done + sum(self._share.values()))


def display(console: Console, total: int, done: int) -> PlainDisplay | LiveDisplay:
    """Bars if a person watches, lines otherwise."""
    if console.is_terminal:
        return LiveDisplay(console, total, done)
    return PlainDisplay(console, total, done)

"""Where the real time of a virtual run goes: vLLM, the patches, or this project's own parts.

Each border between two parts is one reading of the clock, so the parts add up to the whole. Hooks of
patches are too many and too short for that; a timer interrupts the process a few hundred times a
second of its CPU time and looks who was at work. What the account says never reaches a result.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import patches

# The parts, as indices.
SCHEDULER, ENGINE, EXECUTOR, RECORDING, FRONT_END, LOOP = range(6)

_SAMPLE_EVERY_S = 0.002
_PATCHES = str(Path(patches.__file__).parent)
# Its functions stand around vLLM's own and call them, and hooks.
_WRAPPERS = str(Path(patches.__file__).parent / "seam" / "wrappers.py")


# What a person reads, in the order of `Spent`.
LABELS = {
    "scheduler_s": "vLLM's schedule and update",
    "patches_s": "patches",
    "engine_s": "vLLM around them",
    "executor_s": "executor",
    "recording_s": "recording",
    "front_end_s": "arrivals",
    "loop_s": "clock and loop",
}


@dataclass(frozen=True, slots=True)
class Spent:
    """Real seconds of a run, by who spent them.

    Attributes:
        scheduler_s: vLLM's schedule and update_from_output.
        patches_s: hooks of patches and the adapter around them, within vLLM (sampled; 0 without patches).
        engine_s: the rest of vLLM: EngineCore's step around the scheduler, building and hashing requests.
        executor_s: the step's time from the profile, and its output.
        recording_s: tokens to their clients, and all tables.
        front_end_s: arrivals, admission, cancellations.
        loop_s: what is left: the clock and the loop itself.
    """

    scheduler_s: float = 0.0
    patches_s: float = 0.0
    engine_s: float = 0.0
    executor_s: float = 0.0
    recording_s: float = 0.0
    front_end_s: float = 0.0
    loop_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """All of it."""
        return sum(self.to_json().values())

    @property
    def vllm_s(self) -> float:
        """vLLM's own part, without patches."""
        return self.scheduler_s + self.engine_s

    @property
    def own_s(self) -> float:
        """What is neither vLLM's nor the patches'."""
        return self.executor_s + self.recording_s + self.front_end_s + self.loop_s

    def to_json(self) -> dict[str, float]:
        """By name, seconds."""
        return asdict(self)


class Account:
    """Real time by part. One part is always at work; `enter` says which from now on."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._ns = [0] * 6
        self._part = LOOP
        self._since = clock_ns()
        # By part: samples taken, and those of them in a patch.
        self._samples = [[0, 0] for _ in range(6)]

    def enter(self, part: int) -> int:
        """The part that is at work from now on; returns the one that was."""
        now = self._clock_ns()
        before = self._part
        self._ns[before] += now - self._since
        self._part, self._since = part, now
        return before

    def within(self, part: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time counted as this part's."""
        enter = self.enter

        def counted(*args: Any) -> Any:
            before = enter(part)
            try:
                return call(*args)
            finally:
                enter(before)

        return counted

    @contextmanager
    def watching(self, scheduler: Any) -> Iterator[None]:
        """Count this scheduler's passes and updates as SCHEDULER meanwhile."""
        before = {name: vars(scheduler).get(name) for name in ("schedule", "update_from_output")}
        for name in before:
            setattr(scheduler, name, self.within(SCHEDULER, getattr(scheduler, name)))
        try:
            yield
        finally:
            for name, own in before.items():
                delattr(scheduler, name)
                if own is not None:
                    setattr(scheduler, name, own)

    def spent(self) -> Spent:
        """The account until now."""
        self.enter(self._part)
        ns, patches_ns = list(self._ns), 0
        for part in (SCHEDULER, ENGINE):
            samples, in_patches = self._samples[part]
            share = ns[part] * in_patches // samples if samples else 0
            ns[part] -= share
            patches_ns += share
        seconds = [value / 1e9 for value in ns]
        return Spent(seconds[SCHEDULER], patches_ns / 1e9, *seconds[ENGINE:])

    @property
    def scheduler_and_patches_s(self) -> float:
        """schedule and update_from_output, with whatever patches hang on them."""
        return self._ns[SCHEDULER] / 1e9

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Look who is at work, now and then; does nothing where the process cannot be interrupted."""
        possible = (
            hasattr(signal, "setitimer")
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
        )
        if not possible:
            yield
            return
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _SAMPLE_EVERY_S, _SAMPLE_EVERY_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        counts = self._samples[self._part]
        counts[0] += 1
        counts[1] += in_patch(frame)


def in_patch(frame: FrameType | None) -> bool:
    """Whether a patch or the adapter is at work in this frame, be it through a function that it called."""
    called = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _WRAPPERS:
            # It called vLLM's own function, or a hook (which may lie anywhere), or is itself at work.
            return not called.startswith(_vllm_folder())
        if file.startswith(_PATCHES):
            return True
        called = file
        frame = frame.f_back
    return False


@cache
def _vllm_folder() -> str:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent)

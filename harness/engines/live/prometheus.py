"""The server's own counters, read from `/metrics` before, during and after a run.

They are a second witness: what vLLM counted is compared with what the client and the engine's telemetry say
(`reconcile`). A counter that fell, or a process that started anew, spoils every difference that spans it, so both are
found first (`Metrics.faults`).

The server answers a scrape in the event loop that also serves the requests, so each one costs them a few milliseconds:
scrape seldom while the clock runs. Answers are kept as they came and read afterwards, for reading one takes longer.
"""

from __future__ import annotations

import itertools
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq
from prometheus_client.parser import text_string_to_metric_families

from harness.errors import UserError

COUNTER_RESET, SERVER_RESTART = "counter_reset", "server_restart"
EVERY_S = 10.0
_TIMEOUT_S = 5.0
_START_TIME = "process_start_time_seconds"
_CREATED = "_created"
# Samples that only grow, by the type of their family; a histogram's other sample, `_created`, is a time.
_GROWING = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}

Series = tuple[str, tuple[tuple[str, str], ...]]

_SCHEMA = pa.schema(
    [
        pa.field("t_ns", pa.int64(), False, {"unit": "ns", "meaning": "when the answer was there"}),
        pa.field(
            "took_us", pa.float64(), False, {"unit": "us", "meaning": "from asking to the whole answer"}
        ),
        pa.field(
            "error", pa.string(), False, {"meaning": "why there is no answer; empty where there is one"}
        ),
        pa.field("text", pa.string(), False, {"meaning": "the answer as it came"}),
    ]
)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One answer; `t_ns` counts from the run's start, `error` says why there is none."""

    t_ns: int
    took_us: float
    text: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that spoils the differences that span it.

    Attributes:
        code: counter_reset or server_restart.
        t_ns: of the scrape that showed it.
        detail: which series fell from what to what, or which process started anew.
    """

    code: str
    t_ns: int
    detail: str


@dataclass(frozen=True, slots=True)
class Point:
    """All samples of one scrape; `growing` names the series that may not fall."""

    t_ns: int
    values: Mapping[Series, float]
    growing: frozenset[Series]


def scrape(base_url: str, epoch_ns: int, api_key: str = "", timeout_s: float = _TIMEOUT_S) -> Scrape:
    """Read `<base_url>/metrics` once; a failure is kept, not raised."""
    request = urllib.request.Request(f"{base_url.rstrip('/').removesuffix('/v1')}/metrics")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    # Nothing of the environment's proxies: the server is on this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    began_ns = time.monotonic_ns()
    text = error = ""
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (OSError, ValueError) as problem:
        error = str(problem) or type(problem).__name__
    now_ns = time.monotonic_ns()
    return Scrape(now_ns - epoch_ns, (now_ns - began_ns) / 1000, text, error)


class Scraper:
    """Scrapes on entering, every so often in a thread, and on leaving.

    `with Scraper(url, epoch_ns) as scraper: ...`, then `scraper.scrapes`. With `every_s` None only before and after.
    """

    def __init__(
        self, base_url: str, epoch_ns: int, every_s: float | None = EVERY_S, api_key: str = ""
    ) -> None:
        if every_s is not None and not every_s > 0:
            raise UserError(f"metrics cannot be read every {every_s} s: give a positive number of seconds")
        self._url, self._epoch_ns, self._every_s, self._key = base_url, epoch_ns, every_s, api_key
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.scrapes: list[Scrape] = []

    def __enter__(self) -> Scraper:
        self._take()
        if self._every_s is not None:
            self._thread = threading.Thread(target=self._loop, name="metrics", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._take()

    def _take(self) -> None:
        self.scrapes.append(scrape(self._url, self._epoch_ns, self._key))

    def _loop(self) -> None:
        assert self._every_s is not None
        due_s = time.monotonic() + self._every_s
        while not self._over.wait(max(0.0, due_s - time.monotonic())):
            self._take()
            due_s += self._every_s


class Metrics:
    """What a series of scrapes says, read once.

    Attributes:
        points: the scrapes that were answered, in order.
        errors: those that were not.
        faults: resets and restarts, in order.
        whole: whether the first and the last scrape were answered, so that differences span all that was to be seen.
    """

    def __init__(self, scrapes: Sequence[Scrape]) -> None:
        self.points: list[Point] = []
        self.errors: list[str] = []
        for one in scrapes:
            try:
                if one.error:
                    raise ValueError(one.error)
                self.points.append(_read(one))
            except ValueError as error:
                self.errors.append(f"at {one.t_ns / 1e9:.1f} s: {error}")
        self.faults = list(_faults(self.points))
        ends = [point.t_ns for point in (*self.points[:1], *self.points[-1:])]
        self.whole = len(scrapes) > 1 and ends == [scrapes[0].t_ns, scrapes[-1].t_ns]

    def increase(self, name: str, **labels: str) -> float | None:
        """How much a counter grew from the first scrape to the last, summed over its series.

        Args:
            name: with or without `_total`, as `vllm:generation_tokens`.
            labels: only series with these.

        Returns:
            None where no scrape shows it. A series that appears later began at 0, and one that fell began anew at 0,
            so that only what it had gained since the scrape before is lost.
        """
        found = False
        total = 0.0
        last: dict[Series, float] = {}
        for number, point in enumerate(self.points):
            for series, value in point.values.items():
                if series not in point.growing or not _called(series, name, labels):
                    continue
                found = True
                before = last.get(series, value if number == 0 else 0.0)
                total += value - before if value >= before else value
                last[series] = value
        return total if found else None

    def level(self, name: str, **labels: str) -> list[tuple[int, float]]:
        """(t_ns, value) of a gauge at each scrape that shows it, summed over its series."""
        out = []
        for point in self.points:
            values = [v for series, v in point.values.items() if _called(series, name, labels)]
            if values:
                out.append((point.t_ns, sum(values)))
        return out


def write_scrapes(path: Path, scrapes: Sequence[Scrape]) -> None:
    """Keep the answers as Parquet; they are near-equal texts and shrink well."""
    rows = [{"t_ns": s.t_ns, "took_us": s.took_us, "error": s.error, "text": s.text} for s in scrapes]
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), path, compression="zstd")


def read_scrapes(path: Path) -> list[Scrape]:
    """What `write_scrapes` wrote."""
    return [Scrape(**row) for row in pq.read_table(path, memory_map=False).to_pylist()]


def _read(one: Scrape) -> Point:
    values: dict[Series, float] = {}
    growing: set[Series] = set()
    for family in text_string_to_metric_families(one.text):
        endings = _GROWING.get(family.type, ())
        for sample in family.samples:
            series: Series = (sample.name, tuple(sorted(sample.labels.items())))
            values[series] = float(sample.value)
            if endings and sample.name.endswith(endings):
                growing.add(series)
    if not values:
        raise ValueError("the answer holds no metrics")
    return Point(one.t_ns, values, frozenset(growing))


def _called(series: Series, name: str, labels: Mapping[str, str]) -> bool:
    return series[0] in (name, f"{name}_total") and labels.items() <= dict(series[1]).items()


def _faults(points: Sequence[Point]) -> Iterator[Fault]:
    for before, after in itertools.pairwise(points):
        restarts = _changed(before, after, lambda name: name == _START_TIME)
        # A counter may have passed its old value since it began anew; the time at which it was made gives it away.
        anew = _changed(before, after, lambda name: name.endswith(_CREATED))
        fallen = [
            f"{_text(series)} fell from {before.values[series]:g} to {after.values[series]:g}"
            for series in sorted(before.growing & after.growing)
            if after.values[series] < before.values[series]
        ]
        gone = [f"{_text(series)} is gone" for series in sorted(before.growing - after.growing)]
        if restarts:
            detail = f"the server's process started anew ({restarts[0]}); {len(fallen)} counters fell"
            yield Fault(SERVER_RESTART, after.t_ns, detail)
        elif found := fallen or anew or gone:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            yield Fault(COUNTER_RESET, after.t_ns, f"{found[0]}{more}")


def _changed(before: Point, after: Point, wanted: Callable[[str], bool]) -> list[str]:
    return [
        f"{_text(series)} changed from {value:.3f} to {after.values[series]:.3f}"
        for series, value in sorted(before.values.items())
        if wanted(series[0]) and after.values.get(series, value) != value
    ]


def _text(series: Series) -> str:
    name, labels = series
    inside = ",".join(f'{key}="{value}"' for key, value in labels)
    return f"{name}{{{inside}}}" if inside else name

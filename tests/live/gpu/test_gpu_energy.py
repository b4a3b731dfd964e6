"""Guards the integral over a window and every reason for which there is none. Samples are written by hand here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.live.gpu import (
    Gpu,
    GpuSamples,
    figures_of,
    integrate,
    joules_between,
    joules_per_token,
)
from harness.engines.live.gpu.samples import Track
from harness.schema import arrow_schema

S = 1_000_000_000
MS = 1_000_000


def row(uuid: str, t_ns: int, **fields: Any) -> dict[str, Any]:
    base = dict.fromkeys(arrow_schema("gpu").names)
    return base | {"t_ns": t_ns, "due_ns": t_ns, "read_us": 0.0, "gpu": 0, "uuid": uuid, "error": ""} | fields


def samples_of(*tracks: Sequence[dict[str, Any]], gpus: Sequence[Gpu] | None = None) -> GpuSamples:
    rows = [one for track in tracks for one in track]
    named = gpus or [Gpu(uuid, i, "x") for i, uuid in enumerate(dict.fromkeys(r["uuid"] for r in rows))]
    return GpuSamples.of(pa.Table.from_pylist(rows, schema=arrow_schema("gpu")), named)


def steady(
    uuid: str = "GPU-a",
    until_s: float = 14,
    watts: Callable[[float], float] = lambda _: 100.0,
    *,
    counter: bool = True,
    power: bool = True,
) -> list[dict[str, Any]]:
    """Ten samples a second from 0 on; the counter is exact for power that is constant between samples."""
    rows, joules = [], 123_456.0
    for tick in range(round(until_s * 10) + 1):
        now = watts(tick / 10)
        fields = {"power_w": now if power else None, "energy_mj": round(joules * 1000) if counter else None}
        rows.append(row(uuid, tick * 100 * MS, **fields))
        joules += now * 0.1
    return rows


def step(t_s: float) -> float:
    return 500.0 if 2 <= t_s <= 12 else 100.0


@pytest.mark.parametrize(("counter", "method"), [(True, "counter"), (False, "power")])
def test_only_the_window_counts(counter: bool, method: str) -> None:
    # case 10 of the list: 100 W before, 500 W during 10 s
    energy = integrate(samples_of(steady(watts=step, counter=counter)), 2 * S, 12 * S)
    assert energy.valid
    assert energy.method == method
    assert energy.joules == pytest.approx(5000, abs=1e-6)


def test_both_methods_and_their_disagreement() -> None:
    rows = steady()
    for one in rows:
        one["power_w"] *= 1.1
    energy = integrate(samples_of(rows), 2 * S, 12 * S)
    assert energy.counter_j == pytest.approx(1000)
    assert energy.power_j == pytest.approx(1100)
    assert energy.joules == energy.counter_j
    assert energy.disagreement == pytest.approx(0.1)


def test_ends_between_samples_are_interpolated_and_bounded() -> None:
    energy = integrate(samples_of(steady(watts=step)), 2 * S + 50 * MS, 3 * S + 25 * MS)
    assert energy.joules == pytest.approx(500 * 0.975)
    one = energy.by_gpu[0]
    # what the samples inside and around prove
    assert [one.low_j, one.high_j] == pytest.approx([450, 550])


def cut(rows: list[dict[str, Any]], begin: float, end: float) -> list[dict[str, Any]]:
    return [one for one in rows if not begin * S < one["t_ns"] < end * S]


def blank(rows: list[dict[str, Any]], name: str, begin: float, end: float) -> list[dict[str, Any]]:
    return [one | {name: None} if begin * S < one["t_ns"] < end * S else one for one in rows]


def test_a_gap_of_three_seconds_is_bearable_and_a_longer_one_is_not() -> None:
    assert integrate(samples_of(cut(steady(), 4, 7)), 2 * S, 12 * S).joules == pytest.approx(1000)
    energy = integrate(samples_of(cut(steady(), 4, 7.1)), 2 * S, 12 * S)
    assert energy.joules is None
    assert not energy.valid
    assert energy.reason == "GPU-a: it was not sampled for 3.1 s"
    # outside the window it does not matter, at its edge it does
    assert integrate(samples_of(cut(steady(), 4, 7.1)), 8 * S, 12 * S).valid
    assert not integrate(samples_of(cut(steady(), 4, 7.1)), 7 * S, 12 * S).valid


def test_a_slow_answer_is_a_gap_too() -> None:
    # one call from 4.0 s to 8.0 s, in whose middle it is put down, is 2 s from its neighbours
    rows = cut(steady(), 4, 8)
    rows.insert(41, row("GPU-a", 6 * S, read_us=4e6, power_w=100.0, energy_mj=10**9))
    assert integrate(samples_of(rows), 2 * S, 12 * S).reason == "GPU-a: it was not sampled for 4.0 s"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (steady(until_s=11), "its last sample is 1.00 s before the window's end"),
        (steady()[25:], "its first sample is 0.50 s after the window's start"),
        ([row("GPU-a", 0)], "its last sample is 12.00 s before the window's end"),
        (steady(counter=False, power=False), "it has no energy counter, and it has no power reading"),
        (
            blank(blank(steady(), "power_w", 3, 9), "energy_mj", 3, 9),
            "its energy counter is missing for 6.0 s, and its power reading is missing for 6.0 s",
        ),
        (
            [*steady(until_s=5), row("GPU-a", 51 * S // 10, error="GPU is lost"), *steady()[55:]],
            "it did not answer at 5.1 s (GPU is lost)",
        ),
    ],
)
def test_no_energy_and_why(rows: list[dict[str, Any]], said: str) -> None:
    energy = integrate(samples_of(rows), 2 * S, 12 * S)
    assert (energy.joules, energy.valid, energy.method) == (None, False, None)
    assert energy.reason == f"GPU-a: {said}"


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (Gpu("GPU-b", 1, "x"), "it gave no samples"),
        (Gpu("GPU-b", 1, "", fault="GPU is lost"), "it could not be opened (GPU is lost)"),
        (Gpu("GPU-b", 1, "x", mig=True), "it is split into slices (MIG)"),
        (Gpu("GPU-b", 1, "x", sure=False), "set CUDA_DEVICE_ORDER=PCI_BUS_ID"),
    ],
)
def test_one_gpu_without_energy_leaves_the_run_without(gpu: Gpu, said: str) -> None:
    energy = integrate(samples_of(steady(), gpus=[Gpu("GPU-a", 0, "x"), gpu]), 2 * S, 12 * S)
    assert energy.joules is None
    assert energy.reason.startswith("GPU-b: ")
    assert said in energy.reason
    assert energy.by_gpu[0].joules == pytest.approx(1000)


def test_no_gpu_is_no_energy() -> None:
    assert integrate(GpuSamples((), {}), 0, S).reason == "there is no GPU"


def test_a_counter_that_falls_is_not_believed() -> None:
    rows = steady()
    for one in rows[60:]:
        one["energy_mj"] -= rows[60]["energy_mj"]
    energy = integrate(samples_of(rows), 2 * S, 12 * S)
    assert energy.method == "power"
    assert energy.joules == pytest.approx(1000)
    assert energy.by_gpu[0].counter_reason == "its energy counter was reset"
    assert energy.by_gpu[0].resets == 1
    # a reset outside the window is no matter
    assert integrate(samples_of(rows), 7 * S, 12 * S).method == "counter"
    without_power = [one | {"power_w": None} for one in rows]
    assert "was reset, and it has no power" in integrate(samples_of(without_power), 2 * S, 12 * S).reason


def test_a_counter_that_stands_still_is_not_believed() -> None:
    energy = integrate(samples_of([one | {"energy_mj": 7} for one in steady()]), 2 * S, 12 * S)
    assert energy.method == "power"
    assert energy.joules == pytest.approx(1000)
    assert "stood still" in energy.by_gpu[0].counter_reason


def test_a_field_that_comes_and_goes_is_bridged() -> None:
    rows = blank(blank(steady(watts=step), "energy_mj", 2.5, 4.5), "energy_mj", 6, 8.9)
    assert integrate(samples_of(rows), 2 * S, 12 * S).joules == pytest.approx(5000)


def test_the_counter_may_be_missing_on_one_gpu_only() -> None:
    energy = integrate(samples_of(steady(), steady("GPU-b", counter=False)), 2 * S, 12 * S)
    assert energy.method == "mixed"
    assert energy.counter_j is None
    assert [energy.joules, energy.power_j] == pytest.approx([2000, 2000])


def test_an_empty_window_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="does not ascend"):
        integrate(samples_of(steady()), S, S)


def test_per_token() -> None:
    energy = integrate(samples_of(steady(watts=step)), 2 * S, 12 * S)
    assert joules_per_token(energy, 2500).joules == pytest.approx(2.0)
    assert joules_per_token(energy, 0).reason == "no output token was received in this window"
    lost = joules_per_token(integrate(samples_of(steady(until_s=3)), 2 * S, 12 * S), 2500)
    assert lost.joules is None
    assert "before the window's end" in lost.reason


def test_figures_of_a_window_with_nulls_in_it() -> None:
    rows = [one | {"sm_clock_mhz": 1000 + i, "gpu_util": 0.5} for i, one in enumerate(steady(watts=step))]
    rows = blank(rows, "gpu_util", 4, 9)
    figures = figures_of(samples_of(rows), 2 * S, 12 * S, 5000)
    gpu = figures["gpus"][0]
    assert (gpu["samples"], gpu["gpu_util"], gpu["power_w"]) == (101, 0.5, 500.0)
    assert (gpu["sm_clock_min_mhz"], gpu["sm_clock_mhz"], gpu["memory_clock_mhz"]) == (1020, 1070, None)
    assert figures["joules_per_output_token"] == pytest.approx(1.0)


# What must hold of any samples at all.

FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None)

_tracks = st.lists(
    st.tuples(st.integers(1, 3000), st.floats(0, 1000), st.integers(0, 10**6)), min_size=2, max_size=30
)


def _samples(drawn: list[list[tuple[int, float, int]]], *, counter: bool) -> tuple[GpuSamples, int, int]:
    """Tracks from (gap in ms, watts, counter's growth in mJ), and the times that all of them cover."""
    tracks = {}
    for number, track in enumerate(drawn):
        gaps, watts, growths = zip(*track, strict=True)
        columns = {"power_w": np.array(watts)}
        if counter:
            columns["energy_mj"] = 1e12 + np.cumsum(growths, dtype=np.float64)
        t_ns = np.cumsum(gaps, dtype=np.int64) * MS
        tracks[f"GPU-{number}"] = Track(t_ns, ("",) * len(track), columns)
    times = [track.t_ns for track in tracks.values()]
    gpus = tuple(Gpu(uuid, i, "x") for i, uuid in enumerate(tracks))
    return GpuSamples(gpus, tracks), max(int(t[0]) for t in times), min(int(t[-1]) for t in times)


def _edges(data: st.DataObject, begin: int, end: int, least: int) -> list[int]:
    return sorted(data.draw(st.sets(st.integers(begin, end), min_size=least, max_size=6)))


@FAST
@given(_tracks, st.booleans(), st.data())
def test_adjoining_windows_add_up(
    track: list[tuple[int, float, int]], counter: bool, data: st.DataObject
) -> None:
    samples, begin, end = _samples([track], counter=counter)
    edges = _edges(data, begin, end, 3)
    whole, parts = joules_between(samples, edges)
    assert whole == integrate(samples, edges[0], edges[-1])
    assert parts is not None
    assert whole.joules is not None
    assert np.sum(parts) == pytest.approx(whole.joules, abs=1e-6)
    assert bool((parts >= -1e-9).all())
    for begin, end, part in zip(edges, edges[1:], parts, strict=False):
        alone = integrate(samples, begin, end).by_gpu[0]
        assert (alone.counter_j if whole.method == "counter" else alone.power_j) in (
            None,
            pytest.approx(part, abs=1e-6),
        )


@FAST
@given(_tracks, st.data())
def test_power_between_its_least_and_its_most(
    track: list[tuple[int, float, int]], data: st.DataObject
) -> None:
    samples, begin, end = _samples([track], counter=False)
    edges = _edges(data, begin, end, 2)
    joules = integrate(samples, edges[0], edges[-1]).joules
    watts = [one[1] for one in track]
    seconds = (edges[-1] - edges[0]) / S
    assert joules is not None
    assert min(watts) * seconds - 1e-6 <= joules <= max(watts) * seconds + 1e-6


@FAST
@given(_tracks, st.data())
def test_the_counter_stays_within_what_it_proves(
    track: list[tuple[int, float, int]], data: st.DataObject
) -> None:
    samples, begin, end = _samples([track], counter=True)
    edges = _edges(data, begin, end, 2)
    one = integrate(samples, edges[0], edges[-1]).by_gpu[0]
    if one.method == "counter":
        assert one.joules is not None
        assert one.low_j is not None
        assert one.high_j is not None
        assert one.low_j - 1e-6 <= one.joules <= one.high_j + 1e-6


@FAST
@given(st.lists(st.integers(1, 3000), min_size=2, max_size=30), st.floats(0, 1000), st.data())
def test_constant_power_is_power_times_time(gaps: list[int], watts: float, data: st.DataObject) -> None:
    samples, begin, end = _samples([[(gap, watts, 0) for gap in gaps]], counter=False)
    edges = _edges(data, begin, end, 2)
    assert integrate(samples, edges[0], edges[-1]).joules == pytest.approx(
        watts * (edges[-1] - edges[0]) / S, abs=1e-6
    )


@FAST
@given(st.lists(_tracks, min_size=2, max_size=4), st.data())
def test_the_order_of_gpus_changes_nothing(
    drawn: list[list[tuple[int, float, int]]], data: st.DataObject
) -> None:
    samples, begin, end = _samples(drawn, counter=True)
    if end <= begin:
        return
    turned = GpuSamples(tuple(data.draw(st.permutations(samples.gpus))), samples.tracks)
    a, b = integrate(samples, begin, end), integrate(turned, begin, end)
    assert (a.joules, a.method, a.counter_j, a.power_j) == (b.joules, b.method, b.counter_j, b.power_j)

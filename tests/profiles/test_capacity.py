"""The capacity search: it must find a planted capacity, and write rates where the loader finds them.

Guards the search and the file; a real probe on the real engine is in the last test.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import capacity
from harness.capacity import Capacity, Probe, find
from harness.errors import RunFailed
from harness.profiles import Profile, load_profile

NAME = "rtx4090-24g/llama-3.1-8b"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile(NAME)


@settings(max_examples=25, deadline=None)
@given(planted=st.floats(0.001, 50.0))
def test_a_planted_capacity_is_found_within_the_resolution(planted: float) -> None:
    def probing(_: Profile, phase: int, scale: float, __: int) -> Probe:
        return Probe(phase, scale, 10 * scale, 0 if scale <= planted else 1000, 1000)

    found = find(load_profile(NAME), 1, 1000, probing)
    assert found.scale <= planted < 1.03 * found.scale
    assert found.rate_scale == pytest.approx(0.6 * found.scale)


def test_a_mix_that_never_keeps_up_is_a_failure(profile: Profile) -> None:
    with pytest.raises(RunFailed, match="phase 4: the backlog grows at any rate"):
        find(profile, 4, 1000, lambda _, phase, scale, __: Probe(phase, scale, 1.0, 100, 100))


def test_written_rates_are_read_again_and_the_rest_of_the_file_is_kept(
    profile: Profile, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(profile.path, folder)
    found = [Capacity(p, 0.1 * p, 1.0, load) for p, load in enumerate(capacity.LOADS, start=1)]
    before = (folder / "profile.toml").read_text(encoding="utf-8")
    capacity.write(profile, found, 1.75, folder)
    again = load_profile(str(folder))
    assert again.five_phase.rate_scale == [0.06, 0.12, 0.315, 0.52, 0.85]
    assert again.five_phase.slo_factor == 1.75
    assert again.sized
    after = (folder / "profile.toml").read_text(encoding="utf-8")
    kept = [
        line for line in before.splitlines() if not line.startswith(("rate_scale", "slo_factor", "comment"))
    ]
    assert [line for line in after.splitlines() if line in kept] == [
        line for line in before.splitlines() if line in kept
    ]
    assert capacity.write(profile, found, 1.75, folder).read_text(encoding="utf-8") == after


def test_a_real_probe_tells_light_load_from_overload(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "_REQUESTS", 60)
    monkeypatch.setattr(capacity, "_STRETCH", 0.5)
    assert capacity.probe(profile, 1, 0.02, 1000).keeps_up
    assert not capacity.probe(profile, 1, 1.0, 1000).keeps_up

"""Guards which GPUs a run is taken to have, by the rules for CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest

from harness.engines.live.gpu.visible import Card, select

CARDS = [Card(0, "GPU-aa11", "H"), Card(1, "GPU-aa22", "H"), Card(2, "GPU-bb33", "H")]


@pytest.mark.parametrize(
    ("visible", "picks"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("1,1", [1]),
        ("GPU-bb33,0", [2, 0]),
        ("gpu-bb", [2]),
        ("GPU-aa", []),
        ("GPU-aa2,GPU-zz,0", [1]),
    ],
)
def test_what_is_seen(visible: str | None, picks: list[int]) -> None:
    found = select(CARDS, visible)
    assert found.picks == tuple(CARDS[i] for i in picks)
    assert found.sure


def test_slices_are_taken_by_their_name() -> None:
    assert select(CARDS, "MIG-1234").picks == ("MIG-1234",)


@pytest.mark.parametrize(
    ("visible", "order", "sure"),
    [
        ("1", None, False),
        ("1", "FASTEST_FIRST", False),
        ("1", "PCI_BUS_ID", True),
        ("GPU-aa22", None, True),
        ("1,0", None, True),
        (None, None, True),
    ],
)
def test_numbers_are_doubtful_where_gpus_differ(visible: str | None, order: str | None, sure: bool) -> None:
    cards = [Card(0, "GPU-aa11", "Small"), Card(1, "GPU-aa22", "Large")]
    assert select(cards, visible, order).sure is sure

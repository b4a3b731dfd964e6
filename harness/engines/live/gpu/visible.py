"""Which of a machine's GPUs CUDA shows to a process, by the rules for CUDA_VISIBLE_DEVICES.

Source: the CUDA programming guide, "CUDA Environment Variables".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PCI_ORDER = "PCI_BUS_ID"


@dataclass(frozen=True, slots=True)
class Card:
    """A physical GPU as the driver lists it."""

    index: int
    uuid: str
    name: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What CUDA shows, in CUDA's order: cards, and UUIDs of MIG slices.

    `sure` is false where a number may mean another card than the driver's number does.
    """

    picks: tuple[Card | str, ...]
    sure: bool = True


def select(cards: Sequence[Card], visible: str | None, order: str | None = None) -> Selection:
    """The cards that a process sees.

    Args:
        cards: all cards, in the driver's order (by PCI bus).
        visible: CUDA_VISIBLE_DEVICES; None where it is not set, which means all.
        order: CUDA_DEVICE_ORDER.

    An entry that names no card, or more than one, hides itself and all that follow, as in CUDA.
    """
    if visible is None:
        return Selection(tuple(cards))
    picks: list[Card | str] = []
    by_number = False
    for entry in (part.strip() for part in visible.split(",")):
        if entry.upper().startswith("MIG-"):
            found: Card | str | None = entry
        elif entry.isdecimal():
            by_number = True
            found = next((card for card in cards if card.index == int(entry)), None)
        elif entry.upper().startswith("GPU-"):
            matching = [card for card in cards if card.uuid.lower().startswith(entry.lower())]
            found = matching[0] if len(matching) == 1 else None
        else:
            found = None
        if found is None:
            break
        if found not in picks:
            picks.append(found)
    # Where all cards are alike, or all are shown, no order of counting changes what is measured.
    alike = len({card.name for card in cards}) <= 1 or len(picks) == len(cards)
    return Selection(tuple(picks), sure=alike or not by_number or order == PCI_ORDER)

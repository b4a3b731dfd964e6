"""Undo for changes to classes and modules: raw entries, last in first out, exactly restored."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class LedgerError(RuntimeError):
    """Someone else changed what this ledger changed; nothing was undone."""


def _raw(owner: Any, name: str) -> Any:
    """The entry as stored, without binding (a staticmethod stays a staticmethod)."""
    return vars(owner).get(name, _ABSENT)


class Ledger:
    """Records each entry before it is replaced."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` (a class or a module) and remember the raw entry that was there, or that none was."""
        before = _raw(owner, name)
        setattr(owner, name, value)
        self._entries.append((owner, name, before, value))

    def undo(self) -> None:
        """Restore every entry.

        Raises:
            LedgerError: an entry is no longer ours; then nothing is changed at all.
        """
        latest: dict[tuple[int, str], Any] = {}
        for owner, name, _, value in self._entries:
            latest[id(owner), name] = (owner, value)
        for (_, name), (owner, value) in latest.items():
            if _raw(owner, name) is not value:
                label = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
                raise LedgerError(
                    f"{label}.{name} was changed by someone else after the patches were installed"
                )
        while self._entries:
            owner, name, before, _ = self._entries.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __len__(self) -> int:
        return len(self._entries)

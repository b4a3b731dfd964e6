"""Qwen on Alibaba's Bailian: JSON lines with times in seconds, chats and an id for each 16 prompt tokens.

An id is a hash of one block's content alone, so a prefix is known by all its ids. `parent_chat_id` is -1 for
the first turn of a chat. Source: README of alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0).
"""

from __future__ import annotations

from typing import Any

from workloads.traces.formats.json_lengths import LENGTHS, JsonLengths
from workloads.traces.reader import UNKNOWN_PARENT
from workloads.traces.records import Sample
from workloads.traces.values import NS_PER_S, shown

BLOCK_TOKENS = 16
_ROOT = -1


class Bailian(JsonLengths):
    """A session is a chat with all its turns."""

    name = "bailian"
    title = "Qwen-Bailian"
    clock = "seconds"
    unit_ns = NS_PER_S

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self.block_tokens = BLOCK_TOKENS
        # First turn of the chat that a later turn belongs to.
        self._roots: dict[int, int] = {}

    @classmethod
    def _known(cls) -> tuple[str, ...]:
        return (*LENGTHS, "chat_id", "parent_chat_id")

    @classmethod
    def matches(cls, sample: Sample) -> bool:
        return sample.kind == "json" and set(sample.header) >= {"chat_id", "input_length"}

    def _session(self, line: int, fields: dict[str, Any]) -> str:
        chat = self.new_id(line, "chat_id", fields.get("chat_id"))
        parent = fields.get("parent_chat_id", _ROOT)
        if type(parent) is not int or parent < _ROOT:
            raise self.fault(line, f"parent_chat_id is {shown(parent)}; expected an id, or -1 for none")
        if parent == _ROOT:
            return f"chat-{chat}"
        if parent not in self._ids or parent == chat:
            self.tally[UNKNOWN_PARENT] += 1
        self._roots[chat] = root = self._roots.get(parent, parent)
        return f"chat-{root}"

"""Server-sent events from bytes, however the network cut them.

Follows the event stream format of the WHATWG HTML standard (section 9.2, server-sent events): lines end with LF,
CR or CRLF, a blank line ends an event, several `data` lines are joined by LF, a line that begins with a colon is a
comment, a byte order mark at the very start is dropped, and an event without its blank line is never delivered.
Bytes are not decoded here, so a character that two reads share is no special case.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"
# An event holds at most the prompt's token ids once; a peer that sends more without a blank line is broken.
MAX_EVENT_BYTES = 8 << 20


class EventTooLong(ValueError):
    """The peer sent more than `MAX_EVENT_BYTES` without ending an event."""


class EventSplitter:
    """Collects reads and gives back the data of the events that they complete.

    The events do not depend on where the stream was cut into reads.
    """

    __slots__ = ("_begun", "_limit", "_rest", "_skip_lf")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._rest = b""
        self._begun = False
        self._skip_lf = False
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ends in this read, in order.

        Raises:
            EventTooLong: the event that the reads before left unfinished is over the limit.
        """
        if len(self._rest) > self._limit:
            raise EventTooLong(f"an event is longer than {self._limit} bytes")
        if not self._begun:
            data = self._without_bom(data)
        if self._skip_lf or b"\r" in data:
            data = self._with_lf_only(data)
        old = len(self._rest)
        buffer = self._rest + data if old else data
        events: list[bytes] = []
        start = 0
        # the blank line may straddle two reads by one byte
        end = buffer.find(b"\n\n", old - 1 if old else 0)
        while end >= 0:
            if buffer.startswith(b"data: ", start) and buffer.find(b"\n", start, end) < 0:
                events.append(buffer[start + 6 : end])
            else:
                _append_event(events, buffer[start:end])
            start = end + 2
            end = buffer.find(b"\n\n", start)
        self._rest = buffer[start:] if start else buffer
        return events

    @property
    def unfinished(self) -> bool:
        """True while bytes of an event that has not ended are held back."""
        return bool(self._rest.strip(b"\n"))

    def _without_bom(self, data: bytes) -> bytes:
        head = self._rest + data
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self._rest = head
            return b""
        self._rest = b""
        self._begun = True
        return head.removeprefix(_BOM)

    def _with_lf_only(self, data: bytes) -> bytes:
        if not data:
            return data
        if self._skip_lf and data[0] == 0x0A:
            data = data[1:]
            self._skip_lf = False
            if not data:
                return data
        # a CR ends its line at once; the LF of a CRLF may come with the next read
        self._skip_lf = data[-1] == 0x0D
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _append_event(events: list[bytes], block: bytes) -> None:
    """Add the data of one block of lines; a block of comments and other fields has none."""
    found: list[bytes] = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            found.append(value.removeprefix(b" "))
    if found:
        events.append(b"\n".join(found))

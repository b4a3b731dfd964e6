"""Which of the engine's requests is which of the client's.

The client sends its id as X-Request-Id. vLLM 0.32.0 makes of it, for prompt number i of a completion, the id
`cmpl-<id>-<i>`, and the front end adds `-` and eight hex digits (`InputProcessor.assign_request_id`); with n > 1 each
sample has its number and `_` in front (`ParentRequest.get_child_info`). For a chat it is `chatcmpl-<id>`, with no number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from harness.engines.live.telemetry.collect import Telemetry
from harness.engines.live.telemetry.tables import ENGINE_REQUESTS, events_from

_ID = re.compile(r"(?:\d+_)?(?:cmpl-(?P<completion>.+)-\d+|chatcmpl-(?P<chat>.+?))-[0-9a-f]{8}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Joined:
    """The engine's side of each request of a client.

    Attributes:
        requests: `tables.ENGINE_REQUESTS`, one row for each id of the client, in its order; a row is all null where
            the engine never saw it.
        events: the table `events`, `request` being the row in `requests`; events of strangers are left out.
        unseen: ids that the engine never saw, as they were rejected or cancelled before, or lost.
        repeated: ids that the engine saw more than once: sent again, or more than one sample or prompt; the first is
            in `requests`.
        strangers: engine ids that are no request of this client: probes, warm-up, other clients.
    """

    requests: pa.Table
    events: pa.Table
    unseen: tuple[str, ...]
    repeated: tuple[str, ...]
    strangers: tuple[str, ...]


def client_id(engine_id: str) -> str | None:
    """The X-Request-Id behind an engine's id; None where it has none of the forms above."""
    match = _ID.fullmatch(engine_id)
    return match and (match["completion"] or match["chat"])


def join(telemetry: Telemetry, client_ids: Sequence[str]) -> Joined:
    """Find the engine's row of each of the client's requests.

    Args:
        telemetry: of the run.
        client_ids: what was sent as X-Request-Id, all different, in the order of the client's table.
    """
    number = {name: row for row, name in enumerate(client_ids)}
    found: dict[int, int] = {}
    row_of: dict[int, int] = {}
    repeated, strangers = [], []
    for at, engine_id in enumerate(telemetry.requests["engine_id"].to_pylist()):
        name = client_id(engine_id)
        # An engine without its API server in front keeps the id as it is.
        row = number.get(engine_id if name is None else name)
        if row is None:
            strangers.append(engine_id)
            continue
        if row in found:
            repeated.append(client_ids[row])
        else:
            found[row] = at
        row_of[at] = row
    events = [
        (event["t_ns"], event["kind"], row_of.get(event["request"]), event["value"], event["detail"])
        for event in telemetry.events.to_pylist()
        if event["request"] is None or event["request"] in row_of
    ]
    take = pa.array([found.get(row) for row in range(len(client_ids))], pa.int64())
    nullable = pa.schema([field.with_nullable(True) for field in ENGINE_REQUESTS])
    return Joined(
        requests=telemetry.requests.cast(nullable).take(take),
        events=events_from(events),
        unseen=tuple(name for row, name in enumerate(client_ids) if row not in found),
        repeated=tuple(dict.fromkeys(repeated)),
        strangers=tuple(strangers),
    )

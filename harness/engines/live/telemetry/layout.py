"""The bytes of a tape, written once for the writer and the reader.

A tape is a header and records of any length. Its file is longer than what was written; the header says how far the
records go, and is moved on after each record, so whatever kills the writer leaves a whole one last.
"""

from __future__ import annotations

import struct

MAGIC = b"PBTAPE01"
SUFFIX = ".tape"
# magic, end of the last whole record, length of the JSON text that follows
HEADER = struct.Struct("<8sQI")
COMMITTED = struct.Struct("<Q")
COMMITTED_AT = 8

STEP, ARRIVE, ADMIT, FIRST, FINISH, EVENT = range(1, 7)
# kind, length of the whole record in bytes
PREFIX = struct.Struct("<BI")

# Fields of a step, in order; times in ns of CLOCK_MONOTONIC, durations in ns.
STEP_INTS = (
    "t_ns",
    "start_ns",
    "end_ns",
    "schedule_ns",
    "update_ns",
    "telemetry_ns",
    "running",
    "waiting",
    "held",
    "scheduled",
    "prefill_tokens",
    "decode_tokens",
    "preempted",
    "evicted",
    "drafted",
    "accepted",
    "context_tokens",
    "hit_tokens",
)
# ... kv_usage, and how many pairs (new tokens, tokens before them) of prefill chunks follow
STEP_BODY = struct.Struct(f"<BI{len(STEP_INTS)}qdI")
CHUNK = struct.Struct("<ii")

# request's number, t_ns, when the engine's process received it (-1: not seen), prompt tokens; then its id
ARRIVE_BODY = struct.Struct("<BIIqqi")
# request's number, t_ns, tokens found in the prefix cache
ADMIT_BODY = struct.Struct("<BIIqi")
# request's number, t_ns
FIRST_BODY = struct.Struct("<BIIq")
# request's number, t_ns, output tokens; then the reason
FINISH_BODY = struct.Struct("<BIIqi")
# request's number or NO_REQUEST, t_ns, value; then the kind
EVENT_BODY = struct.Struct("<BIIqd")
NO_REQUEST = 0xFFFFFFFF

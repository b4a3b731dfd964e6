"""The columns of every record, written once: name, Arrow type, unit and meaning.

One directory holds one arm and one seed: `requests.parquet`, `tokens.parquet`, `steps.parquet`,
`events.parquet`, `manifest.json` and `receipt.json`; a live run on a GPU has `gpu.parquet` too, a virtual
run with patches `gauges.parquet`. All times are integer nanoseconds on one monotonic clock that starts at 0 when the run does.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a record table."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    nullable: bool = False


_i64, _i32, _f64, _str, _bool = pa.int64(), pa.int32(), pa.float64(), pa.string(), pa.bool_()

REQUESTS: tuple[Column, ...] = (
    Column("request_id", _str, "", "unique id of the request within the workload"),
    Column("tenant", _str, "", "tenant that sent it"),
    Column("tier", _str, "", "gold, silver or bronze"),
    Column("kind", _str, "", "chat, completion or rag"),
    Column("phase", _i32, "", "number of the phase in which it was sent"),
    Column("short", _bool, "", "a short request, as the workload labels it"),
    Column("measured", _bool, "", "false for phases replayed only to build up state"),
    Column("weight", _i32, "", "the tenant's fair share"),
    Column("slo_ttft_ms", _f64, "ms", "the TTFT that its tenant was promised"),
    Column("intended_ns", _i64, "ns", "when it was to be sent; all latency counts from here"),
    Column("sent_ns", _i64, "ns", "when it was sent", nullable=True),
    Column("scheduled_ns", _i64, "ns", "when the scheduler first gave it tokens", nullable=True),
    Column("first_token_ns", _i64, "ns", "first generated token, reasoning included", nullable=True),
    Column("first_output_ns", _i64, "ns", "first token of visible output", nullable=True),
    Column("last_token_ns", _i64, "ns", "last token received", nullable=True),
    Column("end_ns", _i64, "ns", "when it ended, however it ended", nullable=True),
    Column("cancel_ns", _i64, "ns", "when the client would close the stream", nullable=True),
    Column("first_chunk_tokens", _i32, "tokens", "tokens that came with the first chunk"),
    Column("prompt_tokens", _i32, "tokens", "prompt length as planned"),
    Column("prompt_tokens_counted", _i32, "tokens", "prompt length as the server counted it", nullable=True),
    Column(
        "cached_tokens",
        _i32,
        "tokens",
        "prompt tokens found in the prefix cache at first admission",
        nullable=True,
    ),
    Column("output_tokens_planned", _i32, "tokens", "length of the true output"),
    Column("output_tokens", _i32, "tokens", "tokens received"),
    Column("preemptions", _i32, "count", "times it was preempted"),
    Column("recomputed_tokens", _i32, "tokens", "tokens computed again after preemptions"),
    Column("status", _str, "", "ok, rejected, expired, cancelled or failed"),
    Column(
        "reason",
        _str,
        "",
        "why, where the status is not ok: upstream's reason or a patch's code for a refusal (queue_depth, kv_red, "
        "predicted_late, overload), deadline_expired for an expired one; empty otherwise",
    ),
    Column(
        "retry_after_s",
        _i32,
        "s",
        "after how long a refused request was told to come again; null where it was told nothing",
        nullable=True,
    ),
)

TOKENS: tuple[Column, ...] = (
    Column("request", _i32, "", "row number in requests"),
    Column("index", _i32, "", "0 for the first output token"),
    Column("t_ns", _i64, "ns", "when it was received; tokens of one request with one time are one chunk"),
)

STEPS: tuple[Column, ...] = (
    Column("t_ns", _i64, "ns", "when the step was scheduled"),
    Column("start_ns", _i64, "ns", "when the GPU began it"),
    Column("end_ns", _i64, "ns", "when the GPU ended it"),
    Column("running", _i32, "requests", "requests in the running list after scheduling"),
    Column("waiting", _i32, "requests", "requests waiting after scheduling, held ones excluded"),
    Column("held", _i32, "requests", "requests that a gate keeps back"),
    Column("scheduled", _i32, "requests", "requests with tokens in this step"),
    Column("prefill_tokens", _i32, "tokens", "prompt (and recomputed) tokens in this step"),
    Column("decode_tokens", _i32, "tokens", "decode tokens in this step"),
    Column("kv_usage", _f64, "ratio", "share of KV blocks that are referenced"),
    Column("preempted", _i32, "requests", "requests preempted when this step was scheduled"),
    Column("evicted", _i32, "blocks", "cached blocks evicted since the step before"),
    Column("drafted", _i32, "tokens", "draft tokens verified in this step"),
    Column("accepted", _i32, "tokens", "draft tokens accepted in this step"),
)

EVENTS: tuple[Column, ...] = (
    Column("t_ns", _i64, "ns", "when it happened"),
    Column("kind", _str, "", "preempt, resume, reject, cancel, expire, and what patches report"),
    Column("request", _i32, "", "row number in requests", nullable=True),
    Column("value", _f64, "", "a number that belongs to the event", nullable=True),
    Column("detail", _str, "", "a short text that belongs to the event"),
)

GPU: tuple[Column, ...] = (
    Column("t_ns", _i64, "ns", "when energy and power were read (the middle of the two calls)"),
    Column("due_ns", _i64, "ns", "when this sample was due; t_ns less this is how late it was"),
    Column("read_us", _f64, "us", "how long these two calls took; t_ns may be off by half of it"),
    Column("gpu", _i32, "", "number of the physical GPU in the driver's order"),
    Column("uuid", _str, "", "UUID of the GPU, or of the MIG slice"),
    Column("error", _str, "", "why the GPU did not answer at all; empty where it did"),
    Column(
        "gpu_util", _f64, "ratio", "share of the driver's last period with a kernel running", nullable=True
    ),
    Column(
        "memory_util", _f64, "ratio", "share of that period with memory being read or written", nullable=True
    ),
    Column("memory_used_bytes", _i64, "bytes", "device memory in use, by any process", nullable=True),
    Column(
        "power_w",
        _f64,
        "W",
        "power drawn; from Ampere on (but for GA100) the mean of the second before",
        nullable=True,
    ),
    Column("energy_mj", _i64, "mJ", "energy taken since the driver was loaded", nullable=True),
    Column("sm_clock_mhz", _i32, "MHz", "clock of the multiprocessors", nullable=True),
    Column("memory_clock_mhz", _i32, "MHz", "clock of the memory", nullable=True),
    Column("temperature_c", _i32, "C", "temperature of the chip", nullable=True),
    Column("throttle_mask", _i64, "", "why clocks are not higher, the driver's bit mask", nullable=True),
    Column("throttle", _str, "", "the names of these reasons, comma-separated", nullable=True),
)

# Before the reason, in the name of a gauge that says how many requests a patch's gate holds for it.
HELD = "held: "
GAUGES: tuple[Column, ...] = (
    Column("t_ns", _i64, "ns", "when the step was scheduled after which it first had this value"),
    Column("patch", _str, "", "patch whose gauge it is"),
    Column(
        "gauge",
        _str,
        "",
        "name of the gauge, as in the receipt; `held: ` and a reason is the number of requests that the patch's "
        "gate holds for that reason",
    ),
    Column(
        "value", _f64, "", "its value until the gauge's next row; null if not a finite number", nullable=True
    ),
)

TRANSFERS: tuple[Column, ...] = (
    Column("begin_ns", _i64, "ns", "when it began; transfers on one link follow each other"),
    Column("end_ns", _i64, "ns", "when all of it was there"),
    Column("link", _str, "", "d2h (GPU to host memory), h2d, disk write or disk read"),
    Column("size_bytes", _i64, "bytes", "KV blocks that it moved, in bytes"),
)

CACHE: tuple[Column, ...] = (
    Column("t_ns", _i64, "ns", "end of the window in which it was counted"),
    Column(
        "measure",
        _str,
        "",
        "what was counted: requests, asked_blocks (whole prompt blocks looked for at first admissions), found_blocks, "
        "missed_blocks, evicted_blocks, dead_protected_blocks (found before, then evicted unused long after LRU would "
        "have), reuse_blocks (asked for again), recomputed_tokens, preemptions; of the most asked prefixes "
        "prefix_requests, prefix_asked_blocks and prefix_found_blocks, of the whole run, in its last window",
    ),
    Column(
        "tenant",
        _str,
        "",
        "whose requests asked; of evicted blocks, who had asked for them last (empty: nobody)",
    ),
    Column(
        "kind",
        _str,
        "",
        "of found_blocks the tier (device, below); of missed_blocks the cause (never, evicted, cut: behind an evicted one, "
        "unlanded: asked for and not computed yet, other_salt); of evicted_blocks whether the block was ever found "
        "(used, unused, unasked); of reuse_blocks a power of two above the number of different blocks asked for in between; of "
        "recomputed_tokens what they were lost by (eviction, preemption); of a prefix, the start of its first block's hash",
    ),
    Column(
        "by", _str, "", "whose request got the block's place; empty where that is not known, or no matter"
    ),
    Column("value", _i64, "", "how many"),
)

# What every arm and seed has.
TABLES: dict[str, tuple[Column, ...]] = {
    "requests": REQUESTS,
    "tokens": TOKENS,
    "steps": STEPS,
    "events": EVENTS,
}
# What only some have: `gpu` is there where a live run found a GPU, `gauges` where patches ran on the virtual engine.
EXTRA_TABLES: dict[str, tuple[Column, ...]] = {
    "gpu": GPU,
    "gauges": GAUGES,
    "transfers": TRANSFERS,
    "cache": CACHE,
}

STATUSES = ("ok", "rejected", "expired", "cancelled", "failed")


def arrow_schema(table: str) -> pa.Schema:
    """The Arrow schema of one table; units and meanings travel as field metadata."""
    columns = TABLES[table] if table in TABLES else EXTRA_TABLES[table]
    return pa.schema(
        [pa.field(c.name, c.type, c.nullable, {"unit": c.unit, "meaning": c.meaning}) for c in columns]
    )

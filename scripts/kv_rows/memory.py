"""What preemption costs, and the tiers below the device's memory."""

from __future__ import annotations

from scripts.kv_rows.run import Row, Run, below, versus


def preemption(run: Run) -> list[Row]:
    shield, tiered = run.named("shield"), run.named("shield", "tiering")
    alone = run.named("tiering")
    metric, limit = "recomputed_tokens", 50 * run.slo_factor
    out = [
        versus(run, "shield: tokens recomputed after preemption", "-60%", shield, metric, lambda v: v <= -60),
        versus(run, "shield+tiering: the same", "-90%", tiered, metric, lambda v: v <= -90),
        versus(run, "tiering: the same", "-90%", alone, metric, lambda v: v <= -90),
    ]
    beside = run.named("tiering", "prefillbudget")
    for label, name in (("shield+tiering", tiered), ("tiering", alone), ("tiering+prefillbudget", beside)):
        what = f"{label}: recovery beyond queueing, p99"
        row = below(run, what, f"< {limit:.0f} ms", name, "preempt_restore_ms_p99", lambda v: v < limit)
        own, load, whole = (_told(run, name, part) for part in ("own", "restore", "recovery"))
        if own is not None and load is not None and whole is not None:
            # Its load and the pass that it then runs in; the pass that the GPU had before is a queue of one.
            found = f"{own:.0f} ms ({load:.0f} load), {whole:.0f} with the pass before"
            row = Row(what, row.asked, found, row.interval, own < limit)
        out.append(row)
    return out


def _told(run: Run, arm: str | None, part: str) -> float | None:
    """A part of a recovery (`patches.kv.tiers.recovery`), p99 in ms, mean of the seeds."""
    return None if arm is None else run.gauge(arm, "tiering", f"{part}_ms_p99")


def tiers(run: Run) -> list[Row]:
    name, base = run.named("tiering"), run.named(name="tuned-offload")
    what = "tiering against tuned-offload"
    return [
        versus(run, f"{what}: bytes moved", "lower", name, "tier_bytes_moved", lambda v: v < 0, base=base),
        versus(run, f"{what}: hit rate", "no lower", name, "prefix_hit_rate", lambda v: v >= 0, base=base),
    ]

"""From a run's records to summary.json, schema 1. Reads only the run's directory.

Two equal runs give equal summaries, `run_facts` aside: figures are rounded to six significant digits,
and the bootstrap draws the same blocks every time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import failures
from harness.atomic import write_json
from harness.cache_limits import pooled
from harness.errors import RunFailed, UserError
from harness.failures import Failure
from harness.metrics.registry import METRICS
from harness.metrics.scope import Scope, phases_text
from harness.metrics.validity import Reason, hits
from harness.papers import Json
from harness.records import HTTP_PATH, SUMMARY, ArmRecord, RunRecord, load_run, read_plan
from harness.stats.bootstrap import Estimate
from reports import live, sensitivity, unmeasured
from reports.comparisons import compare_arms
from reports.evaluated import EvaluatedArm, evaluated
from reports.fingerprint import inputs_digest, is_current, stamped
from reports.noise import cap as cap_by_noise
from reports.noise import noise

SIGNIFICANT_DIGITS = 6


def write_summary(run_dir: Path) -> Json:
    """Build the summary of a run and write it into the run's directory, in one move."""
    summary = build_summary(run_dir)
    write_json(run_dir / SUMMARY, summary)
    return summary


def current_summary(run_dir: Path) -> Json:
    """The summary in the run's folder where it is what `build_summary` would give now; else a new one.

    Raises:
        UserError: as `build_summary`.
    """
    path = run_dir / SUMMARY
    read_plan(run_dir)
    if path.is_file():
        blob = path.read_bytes()
        if is_current(blob, inputs_digest(run_dir)):
            known: Json = json.loads(blob)
            return known
    return build_summary(run_dir)


def raise_if_invalid(summary: Json) -> None:
    """RunFailed, in one line, where the figures of a summary may not be believed."""
    if summary["valid"]:
        return
    reasons = [str(reason["text"]) for reason in summary["reasons"] if reason["code"] != "invalid_arms"]
    # an arm's fatal reasons come first
    reasons += [f"{arm['name']}: {arm['reasons'][0]['text']}" for arm in summary["arms"] if not arm["valid"]]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    raise RunFailed(f"run {summary['run']} is INVALID: {reasons[0]}{more}")


def build_summary(run_dir: Path) -> Json:
    """The summary of a run, as far as it has got; what is missing makes it invalid, with the reason.

    Raises:
        UserError: no arm is finished, or a record is damaged.
    """
    read_plan(run_dir)
    # from before the records are read: what changes meanwhile must show
    inputs = inputs_digest(run_dir)
    run = load_run(run_dir)
    if not any(run.arms.values()):
        raise UserError(f"{run_dir} holds no finished arm yet: run the same `bench run` command again")
    missing: dict[str, dict[int, Failure | None]] = {}
    for arm, seed in run.missing:
        missing.setdefault(arm, {})[seed] = failures.read(run_dir, arm, seed)
    arms = [
        evaluated(name, plan, run.arms[name], missing.get(name, {}))
        for name, plan in zip(run.arms, run.plan["arms"], strict=True)
    ]
    reasons = _run_reasons(run, arms)
    again = str(run.plan.get("live", {}).get("again", ""))
    judged = [arm for arm in arms if arm.name != again]
    rows = unmeasured.cap(compare_arms(judged), {arm.name: arm.worst_shares("unmeasured") for arm in arms})
    if again:
        rows = cap_by_noise(rows, arms, again, str(run.plan["live"].get("again_of", "")))
    rows, recomputed = sensitivity.judge(run_dir, arms, rows)
    summary = {
        "schema": 1,
        "run": run.plan["run"],
        "valid": all(arm.valid for arm in arms) and not reasons,
        "reasons": [reason.json() for reason in reasons],
        "arms": [_arm_json(arm) for arm in arms],
        "comparisons": rows,
        "profile": _profile(run),
        **_live(run, arms),
        **({} if recomputed is None else {"sensitivity": recomputed}),
        "run_facts": _run_facts(run),
    }
    return stamped(_rounded(summary), inputs)


def _live(run: RunRecord, arms: Sequence[EvaluatedArm]) -> Json:
    """Of a live run: who served, how it was conducted, and its noise."""
    if "live" not in run.plan:
        return {}
    again, of = (str(run.plan["live"].get(key, "")) for key in ("again", "again_of"))
    records = [record for arm in run.arms.values() for record in arm]
    facts = {**live.facts_of(records), "vllm": records[0].manifest["versions"].get("vllm", "")}
    path = run.path / HTTP_PATH
    compared = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.is_file() else []
    return {
        "live": {**facts, "noise": noise(arms, again, of) if again else None, "http_path": compared},
    }


def _run_reasons(run: RunRecord, arms: Sequence[EvaluatedArm]) -> list[Reason]:
    reasons: list[Reason] = []
    by_seed: dict[int, set[str]] = {}
    for arm in arms:
        for record in arm.records:
            by_seed.setdefault(record.seed, set()).add(str(record.manifest["workload"]["sha256"]))
    for seed, traces in sorted(by_seed.items()):
        if len(traces) > 1:
            text = f"seed {seed}: the arms replayed different traces, so they cannot be compared"
            reasons.append(Reason("trace_mismatch", text, True))
    cores = {arm.name: n for arm in arms for record in arm.records if (n := _compute_cores(record))}
    if len(set(cores.values())) > 1:
        each = ", ".join(f"{name}: {n}" for name, n in cores.items())
        text = f"the arms' models were computed on different numbers of cores ({each}), so they cannot be compared"
        reasons.append(Reason("unlike_cores", text, True))
    wrong = [arm.name for arm in arms if not arm.valid]
    if wrong:
        reasons.append(Reason("invalid_arms", f"not to be believed: {', '.join(wrong)}", True))
    return reasons


def _compute_cores(record: ArmRecord) -> int | None:
    """Of a live run on a CPU; None where vLLM did not say."""
    found: int | None = record.manifest.get("server", {}).get("compute_cores")
    return found


def _arm_json(arm: EvaluatedArm) -> Json:
    by_scope = {
        str(scope): {name: _value_json(name, value) for name, value in values.items()}
        for scope, values in arm.estimates.items()
    }
    overall = {**_mechanisms(arm), **by_scope.pop("all", {})}
    out: Json = {
        "name": arm.name,
        "base": arm.plan.get("base", ""),
        "patches": arm.plan["patches"],
        "knobs": arm.plan["knobs"],
        "engine_flags": arm.plan.get("engine_flags", {}),
        "seeds": [record.seed for record in arm.records],
        "valid": arm.valid,
        "reasons": [reason.json() for reason in arm.reasons],
        "schedule_digest": {str(r.seed): r.manifest.get("schedule_digest") for r in arm.records},
        "hooks": {patch: {"hits": hits(arm.records, patch)} for patch in arm.plan["patches"]},
        "extrapolated": arm.worst_shares("extrapolated"),
        "unmeasured": arm.worst_shares("unmeasured"),
        **_cache_bounds(arm),
        "metrics": overall,
        "by_phase": {},
        "by_tenant": {},
        "by_tenant_phase": {},
        "by_scope": {},
    }
    for scope in arm.estimates:
        values = by_scope.get(str(scope))
        if values is not None:
            _place(out, scope, values)
    return out


def _cache_bounds(arm: EvaluatedArm) -> Json:
    """How many hits were to be had, where the records tell."""
    told = [r.manifest["cache_bounds"] for r in arm.records if r.manifest.get("cache_bounds")]
    found = pooled(told)
    return {} if found is None else {"cache_bounds": found}


def _place(out: Json, scope: Scope, values: Json) -> None:
    phase = None if scope.phases is None else phases_text(scope.phases)
    if scope.tier is not None:
        out["by_scope"][str(scope)] = values
    elif scope.tenant is not None and phase is not None:
        out["by_tenant_phase"].setdefault(scope.tenant, {})[phase] = values
    elif scope.tenant is not None:
        out["by_tenant"][scope.tenant] = values
    elif phase is not None:
        out["by_phase"][phase] = values


def _value_json(name: str, value: Estimate) -> Json:
    out: Json = {"value": value.value, "ci95": value.ci95, "unit": METRICS[name].unit, "n": value.n}
    if value.few_samples:
        out["few_samples"] = True
    if value.value is None:
        out["reason"] = value.reason
    return out


def _mechanisms(arm: EvaluatedArm) -> Json:
    """What the patches themselves counted, averaged over the seeds."""
    found: dict[str, list[float]] = {}
    for record in arm.records:
        for values in record.receipt.get("metrics", {}).values():
            for name, value in values.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    found.setdefault(name, []).append(float(value))
    return {
        name: {"value": sum(values) / len(values), "ci95": None, "unit": unit_of(name), "n": len(values)}
        for name, values in sorted(found.items())
    }


def unit_of(name: str) -> str:
    """The unit of a patch's own metric, from its name."""
    for part, unit in (("_ms", "ms"), ("_us", "us"), ("_tokens", "tokens"), ("_bytes", "bytes")):
        if name.endswith(part) or f"{part}_" in name:
            return unit
    return "ratio" if name.endswith(("_rate", "_share", "_ratio", "_index")) else "count"


def _profile(run: RunRecord) -> Json:
    """What the manifests say of the profile: name, hash, source, what is measured and its known error."""
    records = [record for arm in run.arms.values() for record in arm]
    return dict(records[0].manifest.get("profile", {}))


def _run_facts(run: RunRecord) -> Json:
    records = [record for arm in run.arms.values() for record in arm]
    facts: list[Mapping[str, Any]] = [record.manifest.get("run_facts", {}) for record in records]
    started = sorted(str(fact["started"]) for fact in facts if fact.get("started"))
    hosts = sorted({str(fact["host"]) for fact in facts if fact.get("host")})
    return {
        "wall_s": sum(float(fact.get("wall_s", 0.0)) for fact in facts),
        "upstream_s": sum(float(fact.get("upstream_s", 0.0)) for fact in facts),
        "virtual_s": sum(float(record.manifest.get("virtual_s", 0.0)) for record in records),
        "host": ", ".join(hosts),
        "started": started[0] if started else None,
    }


def _rounded(value: Any) -> Any:
    """Floats to six significant digits, whole ones among counts left as they are; NaN is refused."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a figure of the summary is not finite")
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value

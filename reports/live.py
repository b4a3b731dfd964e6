"""What the report says of a run on a real server beside its figures: who served, how the run was conducted, its noise.

Of an emulated run also what its way over HTTP costs beside the virtual engine (`harness.http_path`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.papers import Json
from harness.records import ArmRecord
from reports.view import RunView
from reports.wording import MISSING, change, change_interval, metric_label, scope_label

STATUS = (
    "Live figures vary from run to run, unlike those of the virtual engine: the intervals hold the variation within "
    "this run, and the A/A pair shows what remains between two servers that are alike. A verdict on a change no larger "
    "than theirs is undetermined"
)
# As many of the A/A pair's figures as a reader takes in.
_SHOWN = 6


def facts_of(records: Sequence[ArmRecord]) -> Json:
    """The summary's part on who served and how the run went; the worst of each figure over its records."""
    manifests = [record.manifest for record in records]
    first = manifests[0]
    late = [m["emulation"]["late_ms"]["p99"] for m in manifests if m.get("emulation", {}).get("late_ms")]
    return {
        "emulated": bool(first["live"].get("emulated")),
        "engine_late_ms_p99_max": max(late, default=None),
        "model": first["live"]["model_name"],
        "host": {name: first["host"][name] for name in ("cpu", "cores", "memory_bytes", "kernel")},
        "load_before_max": max(m["host"]["load_before"][0] for m in manifests),
        "start_s_max": max(m["server"]["start_s"] for m in manifests),
        "send_delay_ms_p99_max": max(m["client"]["send_delay_ms_p99"] for m in manifests),
        "read_delay_ms_p99_max": max(m["client"]["read_delay_ms_p99"] for m in manifests),
        "telemetry_overhead_max": max((m["telemetry"]["overhead"] or 0.0) for m in manifests),
        "gpu_absent": (first["gpu"].get("absent") or {}).get("text", ""),
        "gpus": [str(one["name"]) for one in first["gpu"].get("gpus", ())],
    }


def is_live(view: RunView) -> bool:
    """Whether a real server made these figures."""
    return bool(view.summary.get("live"))


def is_emulated(view: RunView) -> bool:
    """Whether that server's device was emulated, with a profile's step times."""
    return bool(view.summary.get("live", {}).get("emulated"))


def lines(view: RunView) -> list[str]:
    """Who served, how the run was conducted, and its noise; a line each."""
    live: Mapping[str, Any] = view.summary["live"]
    host = live["host"]
    gpus = ", ".join(live["gpus"])
    where = f"{gpus}; {host['cpu']}" if gpus else f"{host['cpu']}, {host['cores']} cores"
    what = (
        f"engine emulated: the real server of vLLM {_version(view)} without a model, its steps as long as the profile's, "
        f"on {host['cpu']}, {host['cores']} cores"
        if live["emulated"]
        else f"engine live: a real server of vLLM {_version(view)} with {live['model']} on {where}"
    )
    out = [
        f"{what}; a fresh one for each arm and seed, ready after {live['start_s_max']:.0f} s at most, one at a time, "
        "arms in turns",
        f"{STATUS}.",
        f"client: p99 of the send delay {live['send_delay_ms_p99_max']:.1f} ms, of the delay in reading first tokens "
        f"{live['read_delay_ms_p99_max']:.1f} ms (worst run); the engine's telemetry took "
        f"{live['telemetry_overhead_max']:.2%} of step time; load of the machine before a run at most "
        f"{live['load_before_max']:.1f}",
    ]
    if live["emulated"]:
        late = live["engine_late_ms_p99_max"]
        out.append(f"emulated steps ended late by {late:.1f} ms at most (p99, worst run)" if late else "")
        out += path_lines(view)
    elif live["gpu_absent"]:
        out.append(f"no GPU telemetry, so no energy: {live['gpu_absent']}")
    return [*filter(None, out), *noise_lines(view)]


def path_lines(view: RunView) -> list[str]:
    """What HTTP, the API server and the exchange between processes cost each arm: emulated beside virtual."""
    entries = view.summary["live"].get("http_path", ())
    if not entries:
        return ["not set beside the virtual engine yet: what the way over HTTP costs is not known"]
    said = []
    for one in entries:
        figures = ", ".join(
            f"{row['name']} {row['virtual_ms']:.1f} to {row['emulated_ms']:.1f} ms"
            f" ({change(100 * (row['emulated_ms'] / row['virtual_ms'] - 1)) if row['virtual_ms'] else MISSING})"
            for row in one["figures"]
        )
        most = sorted(one["ways"], key=lambda row: row["virtual_ms"] - row["emulated_ms"])[:3]
        where = ", ".join(f"{row['name']} {row['emulated_ms'] - row['virtual_ms']:+.1f} ms" for row in most)
        said.append(
            f"over HTTP, {one['arm']} seed {one['seed']} (means of {one['requests']} requests, virtual to emulated): "
            f"{figures}; most of it: {where}"
        )
    return said


def status(view: RunView) -> str:
    """One sentence beside the verdicts of an arm."""
    rows = _rows(view)
    if not rows:
        return "Live, without an A/A pair: how far two servers that are alike differ is not known."
    said = ", ".join(f"{_label(row)} {change(row['visible_pct']).lstrip('+')}" for row in rows[:2])
    return f"Live; by the A/A pair, smaller changes than these could not be told from noise: {said}."


def noise_lines(view: RunView) -> list[str]:
    """The A/A pair: what differed between two servers with the same flags, and what could have been seen."""
    noise = view.summary["live"].get("noise")
    if not noise:
        return ["no A/A pair was run (--no-aa): how far two servers that are alike differ is not known"]
    rows = _rows(view)
    if not rows:
        return [f"A/A: {noise['again']} against {noise['of']} gave no figures that can be compared"]
    return [
        f"A/A, {noise['again']} against {noise['of']} (same flags): {_label(row)} {change(row['delta_pct'])} "
        f"{change_interval(*row['ci95'])}"
        f"; a change under {row['visible_pct']:.1f}% could not be told from noise"
        for row in rows[:_SHOWN]
    ]


def _rows(view: RunView) -> list[Mapping[str, Any]]:
    noise = view.summary["live"].get("noise") or {}
    return list(noise.get("rows", ()))


def _label(row: Mapping[str, Any]) -> str:
    where = "" if row["scope"] == "all" else f", {scope_label(row['scope'])}"
    return f"{metric_label(row['metric'])}{where}"


def _version(view: RunView) -> str:
    return str(view.manifest.get("versions", {}).get("vllm", view.summary["live"].get("vllm", "")))

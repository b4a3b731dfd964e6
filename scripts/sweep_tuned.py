"""The small sweep that chooses `tuned`: upstream's own best flags on a profile, and the page that says so.

Two stages on one seed that no run uses. First the sizes of a step (token budget, requests), under the
priority policy; then, on the best of these, what guards it (watermark, cap on long prefills, queue
limit). The best is the arm with the highest SLO attainment over all offered requests; among those
within half a point of it, the one with the lowest short TTFT p99. Out are arms that lose more than 3% of
the best output throughput, and arms whose steps may be larger than what the profile's tables cover: a
verdict against a baseline must not rest on extrapolated step times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import run as runs
from harness.arms import Arm, baseline, patched
from harness.atomic import write_text
from harness.commands.profile_options import DEFAULT_PROFILE
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles import Profile, load_profile
from reports.summary import write_summary

SEED = 1000
TIE = 0.005
KEPT_THROUGHPUT = 0.97

SIZES: list[dict[str, Any]] = [
    {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "scheduling_policy": "priority"}
    for tokens in (512, 1024, 2048, 8192)
    for seqs in (64, 128, 256)
]
GUARDS: list[dict[str, Any]] = [
    {"watermark": 0.02},
    {"watermark": 0.05},
    {"watermark": 0.1},
    {"long_prefill_token_threshold": 256},
    {"long_prefill_token_threshold": 512},
    {"long_prefill_token_threshold": 1024},
    {"long_prefill_token_threshold": 256, "watermark": 0.05},
    {"long_prefill_token_threshold": 512, "watermark": 0.05},
    {
        "long_prefill_token_threshold": 256,
        "long_prefill_token_threshold_adaptive": True,
        "watermark": 0.05,
    },
    {"max_num_queued_tokens": 200_000},
    {"long_prefill_token_threshold": 256, "watermark": 0.05, "max_num_queued_tokens": 200_000},
    {"long_prefill_token_threshold": 256, "watermark": 0.05, "max_num_queued_reqs": 400},
]


def main() -> None:
    """Run both stages and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    parser.add_argument("--out", type=Path, default=Path("results/sweep-tuned"))
    parser.add_argument("--page", type=Path, default=Path("docs/TUNED.md"))
    args = parser.parse_args()
    profile, console = load_profile(args.profile), Console()
    sizes = _stage(profile, SIZES, {}, args.out / "sizes", console)
    best_size = _best(sizes, profile)
    guards = _stage(profile, [{}, *GUARDS], best_size["flags"], args.out / "guards", console)
    best = _best(guards, profile)
    write_text(args.page, _page(profile, sizes, guards, best))
    console.print(f"best: {json.dumps(best['flags'], sort_keys=True)}; see {args.page}", highlight=False)


def _stage(
    profile: Profile, variants: list[dict[str, Any]], under: dict[str, Any], out: Path, console: Console
) -> list[dict[str, Any]]:
    flags_of = {_name(variant): {**under, **variant} for variant in variants}
    arms: list[Arm] = [baseline(profile, "stock")]
    arms += [patched(profile, [], {}, base="stock", name=name, flags=f) for name, f in flags_of.items()]
    plan = RunPlan(WorkloadChoice(), profile, (SEED,), tuple(arms))
    runs.execute(plan, out, runs.default_jobs(), ["scripts/sweep_tuned.py"], console)
    rows = []
    for arm in write_summary(out)["arms"]:
        metrics, phases = arm["metrics"], arm["by_phase"]
        rows.append(
            {
                "name": arm["name"],
                "flags": flags_of.get(arm["name"], {}),
                "attainment": metrics["slo_attainment"]["value"],
                "short_ttft_ms_p99": metrics["short_ttft_ms_p99"]["value"],
                "overload_ms": [phases[p]["short_ttft_ms_p99"]["value"] for p in ("3", "4", "5")],
                "output_tok_per_s": metrics["output_tok_per_s"]["value"],
                "preemptions": metrics["preemptions"]["value"],
                "rejected": metrics["rejected"]["value"],
            }
        )
    return rows


def _name(variant: dict[str, Any]) -> str:
    short = {
        "max_num_batched_tokens": "tokens",
        "max_num_seqs": "seqs",
        "scheduling_policy": "",
        "long_prefill_token_threshold": "long",
        "long_prefill_token_threshold_adaptive": "adaptive",
        "watermark": "watermark",
        "max_num_queued_tokens": "queued-tokens",
        "max_num_queued_reqs": "queued-reqs",
    }
    words = [f"{short[k]}{'' if v is True else v}" if short[k] else str(v) for k, v in variant.items()]
    return "-".join(words) or "no-guards"


def _best(rows: list[dict[str, Any]], profile: Profile) -> dict[str, Any]:
    domain = profile.domain
    candidates = [
        row
        for row in rows
        if row["flags"]
        and row["flags"]["max_num_batched_tokens"] <= domain.max_tokens
        and row["flags"]["max_num_seqs"] <= domain.max_sequences
    ]
    floor = KEPT_THROUGHPUT * max(row["output_tok_per_s"] for row in candidates)
    kept = [row for row in candidates if row["output_tok_per_s"] >= floor]
    top = max(row["attainment"] for row in kept)
    return min(
        (row for row in kept if row["attainment"] >= top - TIE), key=lambda row: row["short_ttft_ms_p99"]
    )


def _page(
    profile: Profile, sizes: list[dict[str, Any]], guards: list[dict[str, Any]], best: dict[str, Any]
) -> str:
    head = (
        "| arm | SLO attainment | short TTFT p99 ms: all, phases 3 / 4 / 5 | output tok/s | preemptions | rejected |\n"
        "|---|---|---|---|---|---|\n"
    )
    flags = "\n".join(f"- `{name} = {json.dumps(value)}`" for name, value in sorted(best["flags"].items()))
    return (
        "# How `tuned` was chosen\n\n"
        f"Made by `scripts/sweep_tuned.py --profile {profile.name}`: five phases, seed {SEED}, which no run uses.\n"
        "The best arm has the highest SLO attainment over all offered requests (a rejected request is a miss); among\n"
        "those within half a point, the lowest short TTFT p99. Out are arms that lose more than 3% of output throughput, and\n"
        f"those with steps beyond the {profile.domain.max_tokens:,} tokens or {profile.domain.max_sequences} requests that "
        "the profile's tables cover: no verdict\nshould rest on extrapolated step times. They are listed all the same.\n\n"
        f"## Sizes of a step\n\n{head}{''.join(map(_row, sizes))}\n"
        f"## Guards, on the best size\n\n{head}{''.join(map(_row, guards))}\n"
        f"## Chosen\n\n{flags}\n"
    )


def _row(row: dict[str, Any]) -> str:
    phases = " / ".join("-" if v is None else f"{v:,.0f}" for v in row["overload_ms"])
    overall = "-" if row["short_ttft_ms_p99"] is None else f"{row['short_ttft_ms_p99']:,.0f}"
    return (
        f"| {row['name']} | {row['attainment']:.3f} | {overall}, {phases} | {row['output_tok_per_s']:,.0f} "
        f"| {row['preemptions']:,.0f} | {row['rejected']:,.0f} |\n"
    )


if __name__ == "__main__":
    main()

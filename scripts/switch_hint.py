"""How soon `version` brings hits back when the sender says that the prompt has changed, beside finding it out by itself.

    .venv/bin/python scripts/switch_hint.py --profile tight --seeds 0,1,2,3,4

Phases 1 and 2 on the virtual engine, twice for each seed: as they are, and with `prompt_switched` in each request of the
tenant from the middle of phase 2 on, when all of its conversations have the new prompt. No run is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness import vllm_env  # noqa: E402
from harness.arms import patched  # noqa: E402
from harness.errors import UserError, told  # noqa: E402
from harness.metrics.switch import Return, returns  # noqa: E402
from harness.plan import RunPlan, WorkloadChoice  # noqa: E402
from harness.profiles import load_profile  # noqa: E402
from harness.worker import build_workload, run_virtual  # noqa: E402
from patches.fixes.version import HINT  # noqa: E402
from workloads.five_phase.chat import SWITCHING_TENANT  # noqa: E402
from workloads.request import Tenant, Workload  # noqa: E402

_HINTING = f"{SWITCHING_TENANT} with a hint"


class _Hinting(Tenant):
    """The tenant, saying with each of its requests that its prompt has changed."""

    @property
    def identity(self) -> dict[str, str | int | float]:
        return {**super().identity, "tenant": SWITCHING_TENANT, HINT: True}


def hinting(workload: Workload) -> Workload:
    """The same requests, the tenant's from the middle of the last phase on with the hint, under another tenant's name."""
    one = workload.tenant(SWITCHING_TENANT)
    other = _Hinting(**{f.name: getattr(one, f.name) for f in fields(one)} | {"name": _HINTING})
    last = workload.phases[-1]
    middle_ns = (last.start_ns + last.end_ns) // 2
    requests = (
        replace(each, tenant=_HINTING)
        if each.tenant == SWITCHING_TENANT and each.intended_ns >= middle_ns
        else each
        for each in workload.requests
    )
    return replace(workload, tenants=(*workload.tenants, other), requests=tuple(requests))


def after_switch(profile_name: str, seeds: Sequence[int]) -> tuple[Return, Return]:
    """How the tenant's hits come back after the switch of all, without the hint and with it; seeds pooled."""
    vllm_env.prepare()
    profile = load_profile(profile_name)
    arm = patched(profile, ["version"], {})
    plan = RunPlan(WorkloadChoice(phases="1,2"), profile, tuple(seeds), (arm,))
    found: tuple[list[pd.DataFrame], list[pd.DataFrame]] = ([], [])
    workloads = [build_workload(plan, seed) for seed in seeds]
    for workload in workloads:
        for frames, served in zip(found, (workload, hinting(workload)), strict=True):
            requests = run_virtual(profile, arm, served)[0].tables["requests"].to_pandas()
            frames.append(requests.assign(tenant=requests["tenant"].replace(_HINTING, SWITCHING_TENANT)))
    one, two = (phase for phase in workloads[0].phases)
    start, end = two.start_ns / 1e9, two.end_ns / 1e9
    without, told_so = (
        returns(frames, SWITCHING_TENANT, one.start_ns / 1e9, [start, (start + end) / 2], end)[1]
        for frames in found
    )
    return without, told_so


def main() -> None:
    """Print both times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="tight")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="numbers joined by commas")
    options = parser.parse_args()
    with told("switch_hint"):
        try:
            seeds = [int(part) for part in options.seeds.split(",")]
        except ValueError:
            raise UserError(
                f"--seeds must be numbers joined by commas, as in 0,1, not {options.seeds!r}"
            ) from None
        for what, one in zip(
            ("by itself", "with the hint"), after_switch(options.profile, seeds), strict=True
        ):
            back = f"after {one.back_s:.2f} s" if one.back else "never"
            print(f"{what}: 95% of {one.before:.3f} {back}")


if __name__ == "__main__":
    main()

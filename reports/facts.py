"""What a report explains beside the numbers: patches, definitions, how verdicts are made, the manifest."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError
from harness.metrics.registry import METRICS
from harness.stats.compare import ALPHA, MARGIN_PCT
from patches.seam.patch import Patch
from patches.seam.registry import find
from reports.view import RunView, reason_text

MARGIN = f"{MARGIN_PCT:g}%"

VERDICT_RULES: tuple[str, ...] = (
    "Every arm of a seed replays the same trace, so differences are taken pair by pair: arm minus baseline, in "
    "percent of the baseline.",
    "Intervals come from a block bootstrap over time blocks and seeds. Requests that are near in time share their "
    "queue, so resampling single requests would give intervals that are too narrow.",
    "Many comparisons are made at once. Holm's step-down correction over all those of a report widens their "
    f"intervals so that the chance of even one false verdict stays at {100 * ALPHA:g}%; the interval of a single "
    "value, shown when you hold the pointer over it, is a plain 95% one. An interval of a figure that is never negative "
    "ends at −100%, where the method alone would go below.",
    f"Same: the whole interval lies within {MARGIN} of no change. Better or worse: the interval leaves out no change. "
    "Undetermined: it does not, or there is no interval. Latencies of two arms that served different shares of the "
    "offered load are not ranked: fewer requests served make the others faster.",
    "Percentiles are nearest rank over the pooled seeds. A p99 from fewer than 459 samples is marked † and not "
    "judged; the p90 is shown beside it.",
)

NOT_ON_A_VIRTUAL_CLOCK: tuple[str, ...] = (
    "Host time: work of the CPU never reaches the virtual clock, so what a patch costs there is measured on its "
    "own (bench perf), not here.",
    "HTTP, tokenizer and network: zero, unless the profile says otherwise.",
)
NOT_MODELLED: tuple[str, ...] = (
    "Warm-up, clock and thermal changes of a GPU, and other work on it.",
    "Step times outside the profile's measured range are extrapolated.",
)


NOT_TOLD_LIVE: tuple[str, ...] = (
    "What another machine, another model or other lengths would show: rates and targets were fitted to this machine.",
    "The network: client and server share a host, over loopback.",
    "The text of the answers: a request ends at its planned length, whatever the model writes.",
    "What only a GPU shows, where the server ran on a CPU: steps there are longer, are scheduled one after another, and "
    '"GPU time" is the time in which the engine computed them.',
)


@dataclass(frozen=True, slots=True)
class PatchFacts:
    """What the report says of one patch; empty texts where its module cannot be read."""

    name: str
    number: str = ""
    area: str = ""
    summary: str = ""
    why: str = ""
    how: str = ""
    mechanism: str = ""
    alone: str = ""
    together: str = ""


def patch_facts(view: RunView) -> list[PatchFacts]:
    """One entry a patch that any arm has, in plan order."""
    names = dict.fromkeys(p for arm in view.arms for p in arm.patches)
    found = []
    for name in names:
        having = [arm for arm in view.candidates if name in arm.patches]
        alone = next((a.name for a in having if a.patches == (name,)), "")
        together = max(having, key=lambda a: len(a.patches)).name if having else ""
        patch = _declared(_source(view, name))
        found.append(
            PatchFacts(
                name,
                alone=alone,
                together=together,
                **{
                    key: _sentence(getattr(patch, key, ""), capital=key == "summary")
                    for key in ("number", "area", "summary", "why", "how", "mechanism")
                },
            )
        )
    return found


def _sentence(raw: object, *, capital: bool) -> str:
    text = str(raw)
    return text[:1].upper() + text[1:] if capital else text


def _source(view: RunView, name: str) -> str:
    """Where the plan says that a patch was loaded from; its name for one of the catalogue."""
    for arm in view.plan.get("arms", ()):
        if name in arm.get("patches", ()) and arm.get("patch_plan"):
            chosen = json.loads(arm["patch_plan"]).get("patches", ())
            sources = dict(zip(arm["patches"], chosen, strict=False))
            return str(sources.get(name, {}).get("source", name))
    return name


def _declared(source: str) -> Patch | None:
    """The patch's declaration; None where it is not to be found here (the report must still render)."""
    try:
        return find(source)
    except UserError:
        return None


def better_way(metric: str) -> str:
    """ "lower is better", "higher is better", or nothing for a figure without a good direction."""
    known = METRICS.get(metric)
    return f"{known.better} is better" if known and known.better != "neither" else ""


def mechanisms(view: RunView, patches: Iterable[str]) -> list[str]:
    """The mechanism metrics of these patches."""
    wanted = set(patches)
    return [p.mechanism for p in patch_facts(view) if p.name in wanted and p.mechanism]


def manifest_facts(view: RunView) -> list[tuple[str, str]]:
    """(label, text) of what all arms share."""
    manifest, workload = view.manifest, view.manifest.get("workload", {})
    profile = manifest.get("profile", {}) or view.plan.get("profile", {})
    choice = view.plan.get("workload", {})
    run_facts = view.summary.get("run_facts", {})
    facts = [
        ("run", view.name),
        ("command", shlex.join(map(str, manifest.get("command", ())))),
        ("versions", _pairs(manifest.get("versions", {}))),
        ("profile", _pairs({key: value for key, value in profile.items() if key != "error"})),
        ("workload", _pairs(choice)),
        ("requests a seed", _spread(m.get("workload", {}).get("requests") for m in view.manifests.values())),
        ("trace sha256 by seed", _by_seed(view)),
        ("corpus sha256", str(workload.get("corpus_sha256", ""))),
        ("SLO factor", str(workload.get("slo_factor", ""))),
        ("seeds", ", ".join(map(str, view.plan.get("seeds", ())))),
        ("plan sha256", str(manifest.get("plan_sha256", ""))),
        ("virtual time", f"{run_facts['virtual_s']:,.0f} s" if run_facts.get("virtual_s") else ""),
        ("wall time", f"{run_facts['wall_s']:,.1f} s" if run_facts.get("wall_s") else ""),
        ("started", " on ".join(str(run_facts[k]) for k in ("started", "host") if run_facts.get(k))),
    ]
    return [(label, text) for label, text in facts if text]


def arm_facts(view: RunView) -> list[dict[str, Any]]:
    """Per arm: knobs and engine flags as `name=value` lines, and the schedule digest of each seed.

    Flags of other arms are given as far as they differ from stock's.
    """
    planned = {str(a.get("name")): a for a in view.plan.get("arms", ())}
    flags = {
        arm.name: dict(arm.raw.get("engine_flags") or planned.get(arm.name, {}).get("engine_flags") or {})
        for arm in view.arms
    }
    stock = flags.get("stock", {})
    found = []
    for arm in view.arms:
        knobs = arm.raw.get("knobs") or planned.get(arm.name, {}).get("knobs") or {}
        lines = [p for p in arm.patches if not knobs.get(p)]
        lines += [f"{p}.{k}={_text(v)}" for p, values in knobs.items() for k, v in dict(values).items()]
        own = {k: v for k, v in flags[arm.name].items() if arm.name == "stock" or stock.get(k) != v}
        digests = sorted((str(k), str(v)) for k, v in arm.raw.get("schedule_digest", {}).items())
        found.append(
            {
                "name": arm.name,
                "knobs": lines,
                "flags": [f"{k}={_text(v)}" for k, v in own.items() if v is not None or arm.name != "stock"],
                "beside_stock": arm.name != "stock" and bool(stock),
                "digests": digests,
            }
        )
    return found


def run_reasons(view: RunView) -> list[str]:
    """The summary's own reasons, less those that an arm states already."""
    said = {reason for arm in view.arms for reason in arm.reasons}
    return [text for text in map(reason_text, view.summary.get("reasons", ())) if text not in said]


def not_modelled(view: RunView) -> list[str]:
    """What the step times leave out: the profile's own list if the manifest carries one, then the common one.

    Of a live run, what its figures do not tell.
    """
    engine = str(view.manifest.get("engine", "virtual"))
    if engine == "live":
        return list(NOT_TOLD_LIVE)
    own = view.manifest.get("profile", {}).get("not_modelled", ())
    own = [own] if isinstance(own, str) else list(own)
    rest = NOT_ON_A_VIRTUAL_CLOCK if engine == "virtual" else NOT_TOLD_LIVE[1:3]
    return [*map(str, own), *rest, *NOT_MODELLED]


def title(view: RunView) -> str:
    """The report's title."""
    named = [arm.name for arm in view.candidates]
    profile = profile_name(view)
    what = " and ".join(named) if 0 < len(named) <= 2 else f"{len(named)} arms" if named else "the baselines"
    return f"What {what} did" + (f" on {profile}" if profile else "")


def profile_name(view: RunView) -> str:
    """GPU and model, as one name."""
    for raw in (view.manifest.get("profile", {}), view.plan.get("profile", {})):
        if raw.get("name"):
            return str(raw["name"])
        if raw.get("gpu"):
            return "/".join(str(raw[k]) for k in ("gpu", "model") if raw.get(k))
    return ""


def intro(view: RunView) -> str:
    """One paragraph: what was run, for a reader who did not run it."""
    workload = view.manifest.get("workload", {})
    phases = _ranges([int(p["number"]) for p in view.phases])
    requests = _spread(m.get("workload", {}).get("requests") for m in view.manifests.values())
    seeds = sorted({s for arm in view.arms for s in arm.seeds})
    parts = [
        f"The workload {workload.get('name') or view.plan.get('workload', {}).get('name', '')}",
        f"({len(view.tenants)} tenants, phases {phases}"
        + (f", {requests} requests a seed)" if requests else ")"),
        f"was replayed through the real scheduler and KV cache manager of vLLM {_version(view)} on a virtual clock, "
        f"without a GPU; step times come from the profile {profile_name(view)}."
        if _virtual(view)
        else f"was sent to a real server of vLLM {_version(view)}, open loop over HTTP, on {profile_name(view)}.",
        f"Every arm saw the same trace, once for each of {len(seeds)} seed{'s' * (len(seeds) != 1)}.",
    ]
    judged = [arm.name for arm in view.candidates]
    if judged:
        parts.append(
            f"{', '.join(judged)} {'is' if len(judged) == 1 else 'are'} compared with stock (vLLM's defaults on "
            f"that {'GPU' if _virtual(view) else 'machine'}) and with tuned (upstream's own best flags for this traffic)."
        )
    return " ".join(parts)


def _version(view: RunView) -> str:
    return str(view.manifest.get("versions", {}).get("vllm", ""))


def _virtual(view: RunView) -> bool:
    return str(view.manifest.get("engine", "virtual")) == "virtual"


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 5 as "1–3, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in parts)


def _by_seed(view: RunView) -> str:
    found = {seed: str(m.get("workload", {}).get("sha256", "")) for (_, seed), m in view.manifests.items()}
    return ", ".join(f"{seed}: {digest}" for seed, digest in sorted(found.items()) if digest)


def _spread(values: Iterable[object]) -> str:
    numbers = sorted({int(v) for v in values if isinstance(v, (int, float))})
    if not numbers:
        return ""
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def _pairs(raw: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_text(value)}" for key, value in raw.items() if value not in (None, "", [], {}))


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)

"""A finished run as the renderers see it: its summary, plan, manifests, receipts and record tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import UserError
from harness.records import arm_dir, read_manifest, read_plan, read_receipt
from reports.wording import VERDICTS, Value, interval, number

BASELINES = ("tuned", "stock")


@dataclass(frozen=True, slots=True)
class Cell:
    """A verdict recomputed under one assumption, on a few seeds. Changes are in percent.

    Attributes:
        base_pct: the change on the same seeds under the profile itself.
        delta_pct: the change under the assumption.
        flips: the winner is the other one.
        reason: why the cell says nothing; empty where it does.
    """

    assumption: str
    base_pct: float | None
    delta_pct: float | None
    flips: bool
    reason: str = ""

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Cell:
        """From an entry of a comparison's `sensitivity`."""
        return cls(
            str(raw["assumption"]),
            number(raw.get("base_pct")),
            number(raw.get("delta_pct")),
            bool(raw.get("flips")),
            str(raw.get("reason") or ""),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One verdict: an arm against a baseline, in one scope, on one metric. Changes are in percent.

    `data_verdict` is what the data alone said, where something took that back; `reason` says what.
    """

    arm: str
    baseline: str
    scope: str
    metric: str
    delta_pct: float | None
    low: float | None
    high: float | None
    verdict: str
    reason: str = ""
    data_verdict: str = ""
    cells: tuple[Cell, ...] = ()

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Comparison:
        """From an entry of the summary's `comparisons`."""
        low, high = interval(raw.get("ci95"))
        verdict = str(raw.get("verdict", "undetermined"))
        return cls(
            str(raw["arm"]),
            str(raw["baseline"]),
            str(raw["scope"]),
            str(raw["metric"]),
            number(raw.get("delta_pct")),
            low,
            high,
            verdict if verdict in VERDICTS else "undetermined",
            str(raw.get("reason") or ""),
            str(raw.get("data_verdict") or ""),
            tuple(map(Cell.read, raw.get("sensitivity") or ())),
        )


@dataclass(frozen=True)
class Arm:
    """One arm of the summary."""

    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The arm's name."""
        return str(self.raw["name"])

    @property
    def patches(self) -> tuple[str, ...]:
        """Names of its patches, in plan order; empty for a baseline."""
        return tuple(str(p) for p in self.raw.get("patches", ()))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that it was run with."""
        return tuple(int(s) for s in self.raw.get("seeds", ()))

    @property
    def valid(self) -> bool:
        """Whether its numbers may be believed."""
        return bool(self.raw.get("valid", True))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is invalid, and what else a reader must know, a sentence each; `never_fired` apart."""
        raw = self.raw.get("reasons", ())
        return tuple(reason_text(r) for r in raw if not _is_code(r, "never_fired"))

    @property
    def never_fired(self) -> tuple[str, ...]:
        """Patches of this arm that the traffic never reached."""
        return tuple(p for p in self.patches if self.hits(p) == 0)

    def hits(self, patch: str) -> int | None:
        """How often the patch's hooks were called, summed over the seeds; None where not recorded."""
        entry = self.raw.get("hooks", {}).get(patch)
        return None if entry is None else int(entry.get("hits", 0))

    def value(self, metric: str, scope: str = "all") -> Value:
        """The metric in a scope; missing values are Values that say why."""
        return Value.read(metric, self._scope(scope).get(metric))

    def _scope(self, scope: str) -> Mapping[str, Any]:
        """The metrics of a scope, from whichever part of the summary holds it."""
        if scope == "all":
            place = ["metrics"]
        elif scope in self.raw.get("by_scope", {}):
            place = ["by_scope", scope]
        else:
            parts = dict(part.partition(":")[::2] for part in scope.split("/"))
            place = [
                "by_" + "_".join(sorted(parts, reverse=True)),
                *(parts[k] for k in sorted(parts, reverse=True)),
            ]
        found: Any = self.raw
        for key in place:
            found = found.get(key, {})
        return dict(found)


def _is_code(raw: object, code: str) -> bool:
    return isinstance(raw, Mapping) and raw.get("code") == code


def reason_text(raw: object) -> str:
    """A reason as text, whether the record holds a sentence or `{"code", "text"}`."""
    if isinstance(raw, Mapping):
        where = ", ".join(f"{k} {raw[k]}" for k in ("arm", "seed") if k in raw)
        text = str(raw.get("text") or raw.get("code") or "")
        code = str(raw.get("code") or "")
        return " ".join(
            part
            for part in (f"{code}:" if code and code != text else "", text, where and f"({where})")
            if part
        )
    return str(raw)


@dataclass(frozen=True)
class RunView:
    """Everything a report says about one run; record tables are read when a figure asks for them."""

    path: Path
    summary: Mapping[str, Any]
    plan: Mapping[str, Any]
    manifests: Mapping[tuple[str, int], Mapping[str, Any]]
    receipts: Mapping[tuple[str, int], Mapping[str, Any]]

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.summary.get("run", self.path.name))

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """All arms: stock and tuned first, then the plan's order."""
        arms = [Arm(raw) for raw in self.summary.get("arms", ())]
        rank = {"stock": 0, "tuned": 1}
        return tuple(sorted(arms, key=lambda a: rank.get(a.name, 2)))

    @property
    def candidates(self) -> tuple[Arm, ...]:
        """The arms that are judged: all but the two baselines, and a baseline's repetition."""
        return tuple(a for a in self.arms if a.name not in (*BASELINES, self._again))

    @property
    def _again(self) -> str:
        noise = (self.summary.get("live") or {}).get("noise") or {}
        return str(noise.get("again", ""))

    def arm(self, name: str) -> Arm | None:
        """The arm of that name, or None."""
        return next((a for a in self.arms if a.name == name), None)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every verdict of the summary, in its order."""
        return tuple(Comparison.read(raw) for raw in self.summary.get("comparisons", ()))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, str, str], Comparison]:
        return {(c.arm, c.baseline, c.scope, c.metric): c for c in self.comparisons}

    def comparison(self, arm: str, baseline: str, scope: str, metric: str) -> Comparison | None:
        """The verdict for exactly that, or None."""
        return self._by_key.get((arm, baseline, scope, metric))

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """The first manifest, for what all arms share: versions, profile, workload."""
        return next(iter(self.manifests.values()), {})

    @property
    def profile(self) -> Mapping[str, Any]:
        """What is known of the profile: its name, hash, source, what is measured, its error."""
        for raw in (self.summary.get("profile"), self.manifest.get("profile"), self.plan.get("profile")):
            if raw:
                return dict(raw)
        return {}

    @property
    def recomputed(self) -> Mapping[str, Any] | None:
        """What was recomputed under other assumptions; None where nothing was."""
        found = self.summary.get("sensitivity")
        return dict(found) if found else None

    @property
    def tenants(self) -> tuple[Mapping[str, Any], ...]:
        """The workload's tenants, as the manifest lists them."""
        listed = self.manifest.get("workload", {}).get("tenants")
        if listed:
            return tuple(listed)
        names = dict.fromkeys(t for a in self.arms for t in a.raw.get("by_tenant", {}))
        return tuple({"name": name, "tier": ""} for name in names)

    @property
    def phases(self) -> tuple[Mapping[str, Any], ...]:
        """The measured phases, in order."""
        listed = self.manifest.get("workload", {}).get("phases")
        if listed:
            return tuple(p for p in listed if p.get("measured", True))
        numbers = sorted({int(p) for a in self.arms for p in a.raw.get("by_phase", {})})
        return tuple({"number": n, "name": ""} for n in numbers)

    def table(self, arm: str, seed: int, table: str, columns: Sequence[str]) -> pd.DataFrame | None:
        """A record table, or None where this arm and seed has not been run.

        Raises:
            UserError: the file is truncated or not Parquet.
        """
        path = self.path / arm / f"seed-{seed}" / f"{table}.parquet"
        if not path.exists():
            return None
        try:
            return pd.read_parquet(path, columns=list(columns))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read ({str(error).splitlines()[0]}); delete {path.parent} and run the same "
                "`bench run` command again: only what is missing is run"
            ) from error


def view_of_summary(summary: Mapping[str, Any]) -> RunView:
    """A view without records: enough for what needs no figure."""
    return RunView(Path(), summary, {}, {}, {})


def load_view(run_dir: Path, summary: Mapping[str, Any]) -> RunView:
    """The view of a run directory whose summary has been built: the arms and seeds that its plan names.

    Raises:
        UserError: the plan, a manifest or a receipt is damaged.
    """
    plan = read_plan(run_dir)
    manifests, receipts = {}, {}
    for arm in sorted(str(arm["name"]) for arm in plan["arms"]):
        for seed in sorted(plan["seeds"]):
            place = arm_dir(run_dir, arm, seed)
            if place.is_dir():
                manifests[arm, seed] = read_manifest(place)
                receipts[arm, seed] = read_receipt(place)
    return RunView(run_dir, summary, plan, manifests, receipts)

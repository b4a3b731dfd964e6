"""How numbers, metrics, scopes and verdicts are worded, once for all three outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERDICTS = ("better", "worse", "same", "undetermined")
SYMBOLS: Mapping[str, str] = {"better": "▲", "worse": "▼", "same": "=", "undetermined": "?"}
FEW_SAMPLES = "†"
MISSING = "–"

_WORDS = {
    "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "slo": "SLO", "kv": "KV", "gpu": "GPU",
    "tok": "tokens", "jain": "Jain", "rps": "", "ms": "", "s": "seconds",
}  # fmt: skip
_LABELS = {
    "jain_index": "Jain's index",
    "goodput_rps": "goodput",
    "output_tok_per_s": "output throughput",
    "gpu_s_per_1k_tokens": "GPU time per 1,000 tokens",
    "gpu_busy_share": "GPU busy",
    "prefix_hit_rate": "prefix hit rate",
    "slo_attainment": "SLO attainment",
    "short_tpot_jitter_ms": "short TPOT jitter",
    "kv_usage_p99": "KV use p99",
}
_SHARES = re.compile(r"(attainment|hit_rate|share|usage|rate)(_|$)")


def metric_label(name: str) -> str:
    """A metric's name in words: `short_ttft_ms_p99` reads "short TTFT p99"."""
    if name in _LABELS:
        return _LABELS[name]
    words = [_WORDS.get(part, part) for part in name.split("_")]
    return " ".join(word for word in words if word)


def scope_label(scope: str) -> str:
    """A scope in words: `tenant:silver-0/phase:3` reads "silver-0, phase 3"."""
    return ", ".join(_scope_part(part) for part in scope.split("/"))


def _scope_part(part: str) -> str:
    kind, _, value = part.partition(":")
    if kind == "all":
        return "whole run"
    if kind == "phase":
        return f"phases {value.replace('-', '–')}" if "-" in value else f"phase {value}"
    if kind == "tier":
        return f"{value} tier"
    return value or part


@dataclass(frozen=True, slots=True)
class Value:
    """One metric of one arm in one scope, as the summary states it.

    `few` marks a p99 from too few samples; `reason` says why a value is null.
    """

    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    few: bool = False
    reason: str = ""

    @classmethod
    def read(cls, metric: str, raw: Mapping[str, Any] | None) -> Value:
        """From a summary entry `{"value", "ci95", "unit", ...}`; None gives a value that is missing."""
        if not raw:
            return cls(metric, None, reason="this arm does not record it")
        low, high = interval(raw.get("ci95"))
        return cls(
            metric,
            number(raw.get("value")),
            low,
            high,
            str(raw.get("unit", "")),
            bool(raw.get("few_samples", False)),
            str(raw.get("reason") or ""),
        )

    @property
    def text(self) -> str:
        """The value with its unit, marked where it rests on few samples."""
        return quantity(self.metric, self.value, self.unit) + (FEW_SAMPLES if self.few else "")

    @property
    def interval_text(self) -> str:
        """The 95% interval with its unit, or nothing where there is none."""
        if self.low is None or self.high is None:
            return ""
        low, high = (quantity(self.metric, x, self.unit) for x in (self.low, self.high))
        return f"{low} to {high}"


def number(raw: object) -> float | None:
    """A finite float, or None for null, text and not-a-number."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not math.isfinite(raw):
        return None
    return float(raw)


def interval(raw: object) -> tuple[float | None, float | None]:
    """The two ends of a `ci95` entry; (None, None) where it has none."""
    if not isinstance(raw, (list, tuple)) or len(raw) != 2:
        return None, None
    return number(raw[0]), number(raw[1])


def quantity(metric: str, value: float | None, unit: str) -> str:
    """A number as a reader wants it: shares in percent, long times in seconds, counts with commas."""
    if value is None:
        return MISSING
    if unit == "ratio":
        return f"{100 * value:.1f}%" if _SHARES.search(metric) else f"{value:.3f}"
    if unit == "ms":
        return _milliseconds(value)
    if unit == "count":
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return f"{_plain(value)} {unit}".strip()


def _milliseconds(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms"


def _plain(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def change(delta_pct: float | None) -> str:
    """A relative change with its sign, in percent; above tenfold it is given as a factor."""
    if delta_pct is None:
        return MISSING
    if delta_pct >= 900:
        return f"×{1 + delta_pct / 100:,.0f}"
    text = f"{delta_pct:+.1f}%" if abs(delta_pct) < 99.95 else f"{delta_pct:+.0f}%"
    return text.replace("-", "−")


def change_interval(low: float | None, high: float | None) -> str:
    """The interval of a change, as "[−41.0%, −22.3%]"; empty where there is none."""
    if low is None or high is None:
        return ""
    return f"[{change(low)}, {change(high)}]"

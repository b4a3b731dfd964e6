"""The report's section on the prefix cache: its numbers, beside bounds, and what a hostile name does to it (nothing)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.cache_limits import pooled
from harness.records import arm_dir, write_arm
from reports import cache, html, markdown
from reports.cache_figures import HIT_BINS, cache_figures
from reports.summary import build_summary
from reports.view import RunView, load_view
from tests.hand_records import S, papers, plan, request, tables_of
from tests.reports.hostile import EVIL_TENANT

Count = tuple[int, str, str, str, str, int]
COUNTS: list[Count] = [
    (10 * S, "requests", "gold-a", "", "", 4),
    (10 * S, "asked_blocks", "gold-a", "", "", 40),
    (10 * S, "found_blocks", "gold-a", "device", "", 20),
    (10 * S, "missed_blocks", "gold-a", "evicted", EVIL_TENANT, 12),
    (10 * S, "missed_blocks", "gold-a", "never", "", 8),
    (20 * S, "evicted_blocks", "gold-a", "used", EVIL_TENANT, 30),
    (20 * S, "evicted_blocks", "", "unasked", EVIL_TENANT, 9),
    (20 * S, "dead_protected_blocks", "gold-a", "", "", 3),
    (20 * S, "recomputed_tokens", "gold-a", "eviction", "", 192),
    (20 * S, "recomputed_tokens", "gold-a", "preemption", "", 55),
    (20 * S, "reuse_blocks", "gold-a", "8", "", 30),
    (20 * S, "reuse_blocks", "gold-a", "4096", "", 10),
    (20 * S, "prefix_requests", EVIL_TENANT, "00ff00ff", "", 4),
    (20 * S, "prefix_asked_blocks", EVIL_TENANT, "00ff00ff", "", 40),
    (20 * S, "prefix_found_blocks", EVIL_TENANT, "00ff00ff", "", 20),
]


def _sums(cached: int, clairvoyant: int) -> dict[str, int]:
    return {
        "prompt_tokens": 1000,
        "cached_tokens": cached,
        "infinite_tokens": 800,
        "whole_pool_tokens": 700,
        "clairvoyant_tokens": clairvoyant,
    }


def bounds(cached: int, clairvoyant: int, estimate: Sequence[str] = ()) -> dict[str, Any]:
    """A manifest's `cache_bounds`."""
    sums = _sums(cached, clairvoyant)
    return {
        "block_tokens": 16,
        "blocks": 2587,
        "estimate": list(estimate),
        "all": sums,
        "by_phase": {"1": sums},
        "by_tenant": {"gold-a": sums},
    }


def make(tmp_path: Path, *, told: bool = True) -> RunView:
    """A run of two arms; the second has cachedash."""
    run = plan(tmp_path / "run", {"tuned": [], "kv": ["cachedash"]})
    rows = [request(1000 * i, chunks=[(1000 * i + 50, 1)], cached_tokens=40) for i in range(50)]
    for arm, found in (("tuned", bounds(300, 400)), ("kv", bounds(450, 400, ["tiers <b>too</b>"]))):
        tables: dict[str, Any] = dict(tables_of(rows))
        if arm == "kv":
            tables["cache"] = pd.DataFrame(
                COUNTS, columns=["t_ns", "measure", "tenant", "kind", "by", "value"]
            )
        manifest, receipt = papers(arm, patches=[] if arm == "tuned" else ["cachedash"])
        if told:
            manifest["cache_bounds"] = found
        write_arm(arm_dir(run, arm, 0), tables, manifest, receipt)
    return load_view(run, build_summary(run))


def test_the_summary_has_rates_of_all_seeds_together() -> None:
    both = pooled([bounds(300, 400), bounds(100, 600, ["why"])])
    assert both is not None
    assert both["all"] == {"hit_rate": 0.2, "clairvoyant": 0.5, "whole_pool": 0.7, "infinite": 0.8}
    assert both["by_phase"]["1"] == both["by_tenant"]["gold-a"] == both["all"]
    assert both["estimate"] == ["why"]
    assert pooled([]) is None


def test_tables(tmp_path: Path) -> None:
    view = make(tmp_path)
    tuned, kv = cache.bounds(view)
    assert tuned.rates["all"] == (0.3, 0.4, 0.7, 0.8)
    assert tuned.reached() == pytest.approx(0.75) and not tuned.passed
    assert kv.passed and kv.estimate
    (seen,) = cache.watched(view)
    assert seen.arm == "kv"
    assert dict(seen.rows)["gold-a"] == (20, 0, 12, 0, 0, 0, 8) == dict(seen.rows)[""]
    assert dict(seen.culprits)["gold-a"] == ((EVIL_TENANT, 12),)
    assert seen.waste == {"eviction": 192, "preemption": 55, "dead": 3, "evicted": 39, "unused": 0}
    assert [(p.name, p.requests, p.asked, p.found) for p in seen.prefixes] == [("00ff00ff", 4, 40, 20)]


def test_figures(tmp_path: Path) -> None:
    made = cache_figures(make(tmp_path))
    assert set(made) == {"fig-hits-0", "fig-hits-1", "fig-lookups-1", "fig-reuse"}
    by_name = {trace["name"]: trace for trace in made["fig-hits-0"]["data"]}
    assert len(by_name["gold-a"]["y"]) == HIT_BINS
    assert {y for y in by_name["gold-a"]["y"] if y is not None} == {40.0}
    assert by_name["clairvoyant, as served"]["y"] == [40.0, 40.0, None]
    stacked = np.sum([trace["y"] for trace in made["fig-lookups-1"]["data"]], axis=0)
    assert sorted(set(stacked.tolist())) == [0.0, 100.0]
    (reuse,) = made["fig-reuse"]["data"]
    assert (reuse["x"], reuse["y"]) == ([8, 4096], [75.0, 100.0])


def test_the_page_escapes_what_the_records_say(tmp_path: Path) -> None:
    page = html.render(make(tmp_path))
    assert EVIL_TENANT not in page and "<b>too</b>" not in page
    assert "tiers &lt;b&gt;too&lt;/b&gt;" in page
    assert "&lt;img src=x onerror=" in page
    for text in ("30.0%", "40.0%", "75.0%", "192 prompt tokens", "55 tokens after preemptions"):
        assert text in page


def test_the_summary_text_shows_the_bounds(tmp_path: Path) -> None:
    text = markdown.render(make(tmp_path))
    assert "| `tuned` | 30.0% | 40.0% | 70.0% | 80.0% |  |" in text
    assert "tiers &lt;b&gt;too&lt;/b&gt;" in text and "<b>too</b>" not in text


def test_a_run_that_tells_nothing_has_no_such_tables(
    tmp_path: Path, altered: Callable[[Callable[[dict[str, Any]], None]], RunView]
) -> None:
    view = make(tmp_path, told=False)
    assert cache.bounds(view) == () and "cache_bounds" not in view.summary["arms"][0]
    assert "Hit rate beside its bounds" not in html.render(view)
    other = altered(lambda summary: None)
    assert cache.watched(other) == ()
    assert "beside its bounds" not in html.render(other)

"""report.html as text: what it holds, that it is safe and that it is the same each time. Not how it looks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from reports import html, tables
from reports.view import RunView
from tests.reports.hostile import ARM, EVIL_PHASE, EVIL_TENANT, arm_of

Alter = Callable[[Callable[[dict[str, Any]], None]], RunView]


class _Page(HTMLParser):
    """Elements with their attributes, and the text of everything but styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data


@pytest.fixture(scope="module")
def text(view: RunView) -> str:
    return html.render(view)


@pytest.fixture(scope="module")
def page(text: str) -> _Page:
    return _Page(text)


def test_sections_come_verdicts_first(page: _Page) -> None:
    found = [attrs["id"] for tag, attrs in page.elements if tag == "section"]
    assert found == [
        "verdicts",
        "validity",
        "sensitivity",
        "patches",
        "scopes",
        "timelines",
        "cdfs",
        "attainment",
        "tenants",
        "cache",
        "losses",
        "wins",
        "definitions",
        "manifest",
    ]
    links = [attrs["href"] for tag, attrs in page.elements if tag == "a"]
    assert {f"#{name}" for name in found} <= set(links)


def test_every_link_inside_the_page_has_its_target(page: _Page) -> None:
    ids = [attrs["id"] for _, attrs in page.elements if attrs.get("id")]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.elements:
        if tag == "a":
            assert str(attrs["href"]).removeprefix("#") in ids


def test_nothing_is_fetched_from_elsewhere(page: _Page) -> None:
    for tag, attrs in page.elements:
        for name in ("src", "href", "data", "action", "srcset", "poster"):
            value = attrs.get(name) or "#"
            assert value.startswith("#") or value == "data:,", (tag, name, value)
        assert "@import" not in (attrs.get("style") or "") and "url(" not in (attrs.get("style") or "")


def test_names_from_the_records_are_text_only(page: _Page, text: str) -> None:
    assert EVIL_TENANT not in text
    assert EVIL_PHASE not in text
    assert EVIL_TENANT in page.text  # shown as it is written
    assert EVIL_PHASE in page.text
    assert all(tag != "img" for tag, _ in page.elements)
    assert all(not name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert sum(tag == "script" for tag, _ in page.elements) == 3


def test_figure_data_cannot_leave_its_script_element() -> None:
    hostile = {"x": "</script><!-- &"}
    said = str(html.json_for_script(hostile))
    assert not set("<>&") & set(said)
    assert json.loads(said) == hostile


def test_plotly_is_inlined_once_and_holds_no_closing_tag(text: str) -> None:
    assert text.count("plotly.js v") == 1
    assert "</script" not in str(html._plotly()).lower()


def test_equal_records_give_equal_bytes_below_8_mb(view: RunView, text: str) -> None:
    assert html.render(view) == text
    assert len(text.encode()) < 8_000_000


def test_ids_of_figures_do_not_depend_on_names(view: RunView) -> None:
    by_arm = {f"{name}-{i}" for name in ("fig-ttft", "fig-fair", "fig-hits") for i in range(len(view.arms))}
    by_tier = {f"fig-slack-{i}" for i in range(3)}
    assert set(html.all_figures(view)) == {"fig-load", "fig-cdf", "fig-jain"} | by_arm | by_tier


def test_phase_one_is_always_shown(altered: Alter, page: _Page) -> None:
    assert page.text.count("Phase 1 must not get worse") == 2

    def no_phase_one(summary: dict[str, Any]) -> None:
        summary["comparisons"] = [c for c in summary["comparisons"] if "phase:1" not in c["scope"]]
        for arm in summary["arms"]:
            arm["by_phase"].pop("1")
            arm["by_scope"] = {k: v for k, v in arm["by_scope"].items() if "phase:1" not in k}

    without = altered(no_phase_one)
    arm = without.arm(ARM)
    assert arm is not None
    made = tables.guard_rows(without, arm, "tuned")
    assert [(r.scope, r.verdict) for r in made] == [("phase 1", "undetermined")]
    assert "Phase 1 must not get worse" in html.render(without)


def test_invalid_numbers_are_struck_through_with_the_reason(altered: Alter, text: str) -> None:
    def invalid(summary: dict[str, Any]) -> None:
        arm = arm_of(summary)
        arm["valid"] = summary["valid"] = False
        arm["reasons"] = [{"code": "client_stall", "text": "send delay p99 31 ms, above 10 ms"}]

    assert re.search(r"<s[ >]", text.partition('id="verdicts"')[2].partition("<script")[0]) is None
    said = html.render(altered(invalid))
    assert "This run is INVALID" in said
    assert "client_stall: send delay p99 31 ms, above 10 ms" in said
    body = said.partition('id="verdicts"')[2].partition('id="validity"')[0]
    numbers = re.findall(r'<td class="n">(.*?)</td>', body, re.DOTALL)
    assert numbers and all("<s" in n or "–" in n for n in numbers)


def test_a_patch_without_hits_never_fired(altered: Alter, text: str) -> None:
    def unreached(summary: dict[str, Any]) -> None:
        arm_of(summary)["hooks"]["slru"] = {"hits": 0}

    assert "never fired" not in text
    said = _Page(html.render(altered(unreached))).text
    assert "Patch slru never fired" in said
    assert "unknown, not nil" in said


def test_few_samples_are_marked_with_the_p90_beside(altered: Alter) -> None:
    def few(summary: dict[str, Any]) -> None:
        scope = arm_of(summary)["by_phase"]["3-5"]
        scope["short_ttft_ms_p99"].update(few_samples=True, value=777.0)
        scope["short_ttft_ms_p90"].update(value=555.0)

    said = html.render(altered(few))
    assert "777 ms†" in said
    assert "p90 555 ms" in said


def test_losses_have_the_same_table_as_wins(altered: Alter) -> None:
    def half(summary: dict[str, Any]) -> None:
        for i, c in enumerate(summary["comparisons"]):
            c["verdict"] = ("worse", "better")[i % 2]

    said = html.render(altered(half))
    sizes = []
    for verdict, section in (("worse", "losses"), ("better", "wins")):
        body = said.partition(f'id="{section}"')[2].partition("</section>")[0]
        sizes.append(body.count("<tr>") - 1)
        assert body.count(f'class="chip {verdict}"') == sizes[-1]
        assert "<details" not in body
    assert sizes[0] - sizes[1] in (0, 1)
    assert sizes[0] > 100


def test_every_metric_is_defined_once(page: _Page) -> None:
    from harness.metrics.registry import METRICS

    for metric in METRICS.values():
        assert page.text.count(metric.definition) == 1, metric.name


@pytest.mark.parametrize(
    ("delta", "place"),
    [(0.0, 50.0), (-100.0, 4.0), (-75.0, 4.0), (300.0, 96.0), (1e9, 96.0), (100.0, 73.0)],
)
def test_small_charts_stay_inside_their_frame(delta: float, place: float) -> None:
    assert html._bar_x(delta) == place

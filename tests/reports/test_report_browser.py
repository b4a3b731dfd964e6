"""report.html in a headless Chromium: no console error, no request but for the file, nothing that runs from names.

Whether it is beautiful is for a person to say: `scripts/report_picture.py` makes the picture.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from reports import html
from reports.browser import find_chromium, visit
from reports.view import RunView
from tests.reports.hostile import EVIL_TENANT

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium on PATH (apt-get install chromium)"
)

# Draws every figure as printing does, then says what stands there.
DRAW_ALL = """(async () => {
  dispatchEvent(new Event("beforeprint"));
  await new Promise((done) => setTimeout(done, 300));
  return {
    drawn: [...document.querySelectorAll(".plot")].map((e) => e.querySelectorAll(".trace").length > 0),
    legend: [...document.querySelectorAll(".legendtext")].map((e) => e.textContent),
    tenants: [...document.querySelectorAll(".heat tbody th")].map((e) => e.textContent),
    images: document.querySelectorAll("img").length,
    wide: document.documentElement.scrollWidth - innerWidth,
  };
})()"""


@pytest.fixture(scope="module")
def page(view: RunView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.render(view), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_draws_itself_quietly_and_offline(page: Path, width: int, dark: bool) -> None:
    seen = visit(page, width=width, dark=dark, script=DRAW_ALL, picture=True)
    assert seen.errors == []
    assert seen.requests == [page.as_uri()]
    assert seen.value["drawn"] and all(seen.value["drawn"])
    assert seen.value["wide"] <= 0  # wide tables scroll in their own frame
    assert seen.png.startswith(b"\x89PNG")
    # hostile names are words on the page, in tables and in figures
    assert EVIL_TENANT in seen.value["tenants"]
    assert EVIL_TENANT in seen.value["legend"]
    assert seen.value["images"] == 0


def test_the_watch_itself_sees_errors_requests_and_dialogs(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<script>console.error("broken")</script><img src="missing.png"><script>throw Error("x")</script>'
    )
    seen = visit(page)
    assert any("broken" in error for error in seen.errors)
    assert any("Error: x" in error for error in seen.errors)
    assert seen.requests == [page.as_uri(), (tmp_path / "missing.png").as_uri()]

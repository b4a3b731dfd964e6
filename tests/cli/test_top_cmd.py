"""`bench top` against a server of a few lines and a run made by hand: plain lines, errors of one line, names made harmless.

Not here: the live table on a terminal, but for its being built.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from rich.console import Console

from harness.cache_view import CacheView
from harness.cli import _run
from harness.commands.top_cmd import PAGE, _screen, _table
from harness.records import arm_dir, write_arm
from tests.hand_records import S, papers, plan, request, tables_of

EVIL = "a\x1b[2J\n<b>"


def answer(found: int = 3, missed: int = 7, evil: str = EVIL) -> dict[str, Any]:
    """A server's answer after so many blocks were found and missed."""
    return {
        "t_s": 2.0,
        "block_tokens": 16,
        "pool_blocks": 100,
        "usage": 0.5,
        "sums": [
            ["requests", evil, "", "", 2],
            ["asked_blocks", evil, "", "", found + missed],
            ["found_blocks", evil, "device", "", found],
            ["missed_blocks", evil, "never", "", missed],
        ],
        "prefixes": [["00ff", evil, 2, 10, found]],
    }


class Stand(BaseHTTPRequestHandler):
    """Serves what the test put into `says`: a status and a body."""

    says: tuple[int, bytes] = (200, b"{}")
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        """Answer."""
        self.seen.append((self.path, self.headers["Authorization"]))
        status, body = self.says
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Stand)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Stand.says, Stand.seen = (200, json.dumps(answer()).encode()), []
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_plain_lines_of_a_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["top", f"{url}/v1", "--times", "1", "--key", "secret"]) == 0
    assert Stand.seen == [(PAGE, "Bearer secret")]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "\x1b" not in "".join(lines)
    assert lines[0].startswith("t=2.0s since=start tenant=all requests=2 blocks=10 hit=0.3000 device=3")
    assert f"tenant={json.dumps(EVIL)}" in lines[1] and "never=7" in lines[1]


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"", "bench serve --enable cachedash"),
        (401, b"", "operator's key"),
        (302, b"", "302"),
        (500, b"", "500"),
        (200, b"not json", "cannot be read"),
        (200, b"[]", "another kind"),
        (200, b'{"sums": 3}', "another kind"),
    ],
)
def test_one_line_of_what_is_wrong(
    url: str, status: int, body: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Stand.says = (status, body)
    assert _run(["top", url, "--times", "1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and says in said[0] and url in said[0]


def test_nobody_there_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["top", "http://127.0.0.1:9", "--times", "1"]) == 2
    assert _run(["top", str(tmp_path / "nowhere")]) == 2
    assert _run(["top", "http://["]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_counts_between_two_looks() -> None:
    before, after = (CacheView.of_answer(answer(found)) for found in (3, 5))
    assert after.since(before).total("found_blocks") == 2
    # A server that began anew has counted less: all of it is new.
    assert before.since(after) is before


def test_the_screen_obeys_no_name() -> None:
    console = Console(record=True, force_terminal=True, color_system=None, width=120)
    console.print(_screen("http://x", CacheView.of_answer(answer()), answer()))
    text = console.export_text(styles=False)
    assert "\x1b[2J" not in text and "\\u001b" in text and "30.0%" in text


def test_a_terminal_of_80_characters_shows_it_whole() -> None:
    counts = {"device": 91_000, "below": 13_000, "evicted": 110_000, "never": 272_000, "unlanded": 3}
    rows = [
        ("requests", "", 5_325),
        ("asked_blocks", "", sum(counts.values())),
        ("recomputed_tokens", "", 1_098_293),
    ]
    rows += [
        ("found_blocks" if kind in ("device", "below") else "missed_blocks", kind, n)
        for kind, n in counts.items()
    ]
    frame = pd.DataFrame(
        [(S, measure, "bronze-0", kind, "", value) for measure, kind, value in rows],
        columns=["t_ns", "measure", "tenant", "kind", "by", "value"],
    )
    console = Console(record=True, color_system=None, width=80)
    console.print(_table(CacheView.of_frames([frame]), "kv: 5 seeds"))
    text = console.export_text()
    assert "\u2026" not in text and "bronze-0" in text and "486,003" in text and "unlanded" not in text


def test_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = plan(tmp_path / "run", {"stock": [], "kv": ["cachedash"]})
    rows = [
        ("requests", "", 2),
        ("asked_blocks", "", 10),
        ("found_blocks", "device", 4),
        ("missed_blocks", "never", 6),
    ]
    cache = pd.DataFrame(
        [(S, measure, "gold-a", kind, "", value) for measure, kind, value in rows],
        columns=["t_ns", "measure", "tenant", "kind", "by", "value"],
    )
    for arm in ("stock", "kv"):
        tables: dict[str, Any] = dict(tables_of([request()]))
        if arm == "kv":
            tables["cache"] = cache
        write_arm(arm_dir(run, arm, 0), tables, *papers(arm, 0))
    assert _run(["top", str(run)]) == 0
    out = capsys.readouterr().out
    assert "kv: 1 seed" in out and "40.0%" in out and "gold-a" in out and "stock" not in out
    (arm_dir(run, "kv", 0) / "cache.parquet").write_bytes(b"broken")
    assert _run(["top", str(run)]) == 2
    (arm_dir(run, "kv", 0) / "cache.parquet").unlink()
    assert _run(["top", str(run)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "cache.parquet" in said[0] and "--enable cachedash" in said[1]

"""Guards what is made of /metrics: increases, resets, restarts, and its contradictions with the other witnesses.

A small server of its own tells hand-written counters. Does not guard vLLM's own names (test_telemetry_process).
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from aiohttp import web

from harness.engines.live.prometheus import Metrics, Scrape, Scraper, read_scrapes, scrape, write_scrapes
from harness.engines.live.telemetry.collect import Telemetry
from harness.engines.live.telemetry.reader import ReadRequest, Tape
from harness.engines.live.telemetry.reconcile import reconcile
from harness.engines.live.telemetry.tables import event_table, request_table, step_tables
from harness.errors import UserError


def text(tokens: float, *, started: float = 100.0, created: float = 101.0, more: str = "") -> str:
    return (
        "# HELP vllm:generation_tokens_total Number of generation tokens processed.\n"
        "# TYPE vllm:generation_tokens_total counter\n"
        f'vllm:generation_tokens_total{{engine="0",model_name="a \\"b\\""}} {tokens}\n'
        "# TYPE vllm:generation_tokens_created gauge\n"
        f'vllm:generation_tokens_created{{engine="0",model_name="a \\"b\\""}} {created}\n'
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0"}} {tokens % 7}\n'
        "# TYPE vllm:e2e_request_latency_seconds histogram\n"
        f'vllm:e2e_request_latency_seconds_bucket{{le="+Inf"}} {tokens}\n'
        f"vllm:e2e_request_latency_seconds_count {tokens}\n"
        f"vllm:e2e_request_latency_seconds_sum {tokens / 2}\n"
        "# TYPE process_start_time_seconds gauge\n"
        f"process_start_time_seconds {started}\n"
        f"{more}"
    )


def metrics(*texts: str) -> Metrics:
    return Metrics([Scrape(i * 1_000_000_000, 1.0, one) for i, one in enumerate(texts)])


@contextmanager
def server(answers: Sequence[tuple[int, str]], seen: list[Any]) -> Iterator[str]:
    """Answers one after the other, the last one for ever; on a thread of its own."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        status, body = answers[min(len(seen), len(answers)) - 1]
        return web.Response(status=status, text=body)

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.get("/metrics", answer)])
    runner = web.AppRunner(app, access_log=None)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()


def test_before_during_after_and_to_disk_and_back(tmp_path: Path) -> None:
    seen: list[Any] = []
    answers = [(200, text(10)), (200, text(12)), (503, "busy"), (200, text(20))]
    with server(answers, seen) as url, Scraper(f"{url}/v1", epoch_ns=0, every_s=0.02, api_key="k") as scraper:
        while len(seen) < 4:
            time.sleep(0.005)
    assert seen[0]["Authorization"] == "Bearer k"
    times = [one.t_ns for one in scraper.scrapes]
    assert times == sorted(times) and all(one.took_us > 0 for one in scraper.scrapes)
    write_scrapes(tmp_path / "metrics.parquet", scraper.scrapes)
    read = read_scrapes(tmp_path / "metrics.parquet")
    assert read == scraper.scrapes
    found = Metrics(read)
    assert found.increase("vllm:generation_tokens") == 10 and found.whole
    assert len(found.points) == len(read) - 1 and found.faults == []
    (error,) = found.errors
    assert "503" in error


def test_only_before_and_after() -> None:
    seen: list[Any] = []
    with server([(200, text(1))], seen) as url, Scraper(url, 0, every_s=None) as scraper:
        assert len(scraper.scrapes) == 1
    assert len(scraper.scrapes) == len(seen) == 2
    with pytest.raises(UserError, match="positive"):
        Scraper(url, 0, every_s=0.0)


def test_nobody_there_is_an_error_that_is_kept() -> None:
    with server([], []) as url:
        pass
    one = scrape(url, 0)
    assert one.text == "" and "refused" in one.error
    found = Metrics([one, Scrape(1, 1.0, "<html>"), Scrape(2, 1.0, ""), Scrape(3, 1.0, text(1))])
    assert len(found.errors) == 3 and not found.whole and len(found.points) == 1
    assert found.increase("vllm:generation_tokens") == 0


def test_increase_by_series_and_label() -> None:
    def both(a: int, b: int | None) -> str:
        lines = f'# TYPE hits_total counter\nhits_total{{tier="a"}} {a}\n'
        return lines + (f'hits_total{{tier="b"}} {b}\n' if b is not None else "")

    found = metrics(both(5, None), both(7, 3), both(9, 4))
    assert found.increase("hits") == found.increase("hits_total") == 4 + 4
    assert found.increase("hits", tier="b") == 4
    assert found.increase("hits", tier="c") is None and found.increase("other") is None
    assert found.faults == []


def test_levels_are_read_at_each_scrape() -> None:
    assert metrics(text(3), text(8)).level("vllm:num_requests_running") == [(0, 3.0), (1_000_000_000, 1.0)]


def test_a_counter_that_fell_is_a_reset() -> None:
    found = metrics(text(10), text(4), text(6))
    (fault,) = found.faults
    assert fault.code == "counter_reset" and fault.t_ns == 1_000_000_000
    assert "fell from 10 to 4" in fault.detail and "(and" not in fault.detail
    # 4 and 2 since: what came between 10 and the reset is lost
    assert found.increase("vllm:generation_tokens") == 6


def test_a_gauge_may_fall() -> None:
    found = metrics(text(6), text(7))
    assert found.level("vllm:num_requests_running")[1][1] == 0
    assert found.faults == []


def test_a_counter_that_began_anew_and_passed_its_old_value_is_a_reset() -> None:
    (fault,) = metrics(text(10), text(15, created=200.0)).faults
    assert fault.code == "counter_reset" and "created" in fault.detail


def test_a_counter_that_is_gone_is_a_reset() -> None:
    (fault,) = metrics(text(10, more="# TYPE x_total counter\nx_total 1\n"), text(10)).faults
    assert fault.code == "counter_reset" and fault.detail == "x_total is gone"


@pytest.mark.parametrize("after", [2, 50])
def test_another_process_is_a_restart_and_not_a_reset_too(after: int) -> None:
    (fault,) = metrics(text(10), text(after, started=900.0, created=901.0)).faults
    assert fault.code == "server_restart" and "100.000 to 900.000" in fault.detail


# the three witnesses

S = 1_000_000_000


def engine(*rows: tuple[str, int, str | None, int]) -> Telemetry:
    """(id, output tokens, reason, preemptions) of each request; prompts of 10 tokens of which 4 hit."""
    tape = Tape({"created_ns": 0})
    for number, (name, tokens, reason, preemptions) in enumerate(rows):
        one = ReadRequest(f"cmpl-{name}-0-0123abcd", None, S // 2 + number, 10)
        one.scheduled_ns, one.cached_tokens, one.first_token_ns = S // 2, 4, S // 2
        one.output_tokens, one.finish_reason, one.preemptions = tokens, reason, preemptions
        tape.requests.append(one)
    steps, batches = step_tables([tape], [0])
    return Telemetry(steps, batches, request_table([tape], [0]), event_table([tape], [0]), ({},), ())


def client(*rows: tuple[str, str, int]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["request_id", "status", "output_tokens"])
    frame["prompt_tokens_counted"] = 10.0
    return frame


def counters(tokens: int, prompts: int, hits: int, preemptions: int, done: int, **reasons: int) -> str:
    out = ""
    for name, value in (
        ("generation_tokens", tokens),
        ("prompt_tokens", prompts),
        ("prefix_cache_hits", hits),
        ("num_preemptions", preemptions),
    ):
        out += f"# TYPE vllm:{name}_total counter\nvllm:{name}_total {value}\n"
    out += "# TYPE vllm:request_success_total counter\n"
    for reason, value in {"length": done, "stop": 0, "abort": 0, **reasons}.items():
        out += f'vllm:request_success_total{{finished_reason="{reason}"}} {value}\n'
    return out


NOTHING = counters(0, 0, 0, 0, 0)
PLAIN = engine(("a", 5, "length", 0), ("b", 7, "stop", 1))
SERVED = client(("a", "ok", 5), ("b", "ok", 7))


def whats(*args: Any, **kwargs: Any) -> list[str]:
    return [one.what for one in reconcile(*args, **kwargs)]


def test_witnesses_that_agree() -> None:
    counted = metrics(NOTHING, counters(12, 20, 8, 1, 1, stop=1))
    assert reconcile(PLAIN, SERVED, counted) == []
    assert reconcile(PLAIN) == reconcile(PLAIN, SERVED) == reconcile(PLAIN, metrics=counted) == []


@pytest.mark.parametrize(
    ("counted", "what"),
    [
        ((11, 20, 8, 1, 2), "output_tokens"),
        ((12, 21, 8, 1, 2), "prompt_tokens"),
        ((12, 20, 9, 1, 2), "prefix_hits"),
        ((12, 20, 8, 2, 2), "preemptions"),
        ((12, 20, 8, 1, 3), "finished"),
    ],
)
def test_each_total_is_compared(counted: tuple[int, int, int, int, int], what: str) -> None:
    assert whats(PLAIN, metrics=metrics(NOTHING, counters(*counted))) == [what]


def test_what_a_connector_brought_is_a_hit_as_well() -> None:
    external = (
        "# TYPE vllm:external_prefix_cache_hits_total counter\nvllm:external_prefix_cache_hits_total {}\n"
    )
    for brought, what in ((3, []), (4, ["prefix_hits"])):
        counted = metrics(
            NOTHING + external.format(0), counters(12, 20, 5, 1, 1, stop=1) + external.format(brought)
        )
        assert whats(PLAIN, metrics=counted) == what


def test_what_was_given_up_may_or_may_not_have_been_counted() -> None:
    telemetry = engine(("a", 5, "length", 0), ("b", 7, "abort", 2), ("c", 3, "length", 0))
    # c ended just as its client left
    table = client(("a", "ok", 5), ("b", "cancelled", 6), ("c", "cancelled", 2))
    for counted in ((5, 10, 12, 0, 1), (15, 30, 12, 2, 2), (9, 20, 12, 1, 1)):
        assert reconcile(telemetry, table, metrics(NOTHING, counters(*counted))) == []
    assert whats(telemetry, table, metrics(NOTHING, counters(16, 30, 12, 3, 3))) == [
        "output_tokens",
        "preemptions",
        "finished",
    ]


def test_each_request_is_compared_with_the_clients() -> None:
    (one,) = reconcile(PLAIN, client(("a", "ok", 5), ("b", "ok", 6)))
    assert one.what == "output_tokens" and one.detail.startswith("b: the client counted 6, the engine 7")
    assert whats(PLAIN, client(("a", "failed", 6), ("b", "failed", 1))) == ["output_tokens"]
    assert whats(PLAIN, client(("a", "ok", 5), ("b", "ok", 7), ("c", "ok", 1))) == ["unseen"]
    assert whats(PLAIN, client(("a", "ok", 5), ("b", "rejected", 0))) == ["unseen"]
    longer = SERVED.assign(prompt_tokens_counted=[10.0, 11.0])
    assert whats(PLAIN, longer) == ["prompt_tokens"]
    assert whats(PLAIN, SERVED.assign(prompt_tokens_counted=math.nan)) == []


def test_what_cannot_be_compared_is_said() -> None:
    running = engine(("a", 0, None, 0))
    assert "unended" in whats(running, metrics=metrics(NOTHING, counters(3, 10, 4, 0, 0)))
    assert whats(PLAIN, metrics=metrics(NOTHING)) == ["metrics"]
    failed = Metrics([Scrape(0, 1.0, NOTHING), Scrape(S, 1.0, "", "refused")])
    (one,) = reconcile(PLAIN, metrics=failed)
    assert one.what == "metrics" and "refused" in one.detail
    # a server that shows nothing of this, but for its tokens, of which one is too few
    assert whats(PLAIN, metrics=metrics(text(1), text(2))) == ["output_tokens", *["metrics"] * 4]
    # a reset is a fault of its own, and no comparison spans it
    fallen = metrics(counters(9, 0, 0, 0, 0), counters(1, 20, 8, 1, 2))
    assert fallen.faults and reconcile(PLAIN, metrics=fallen) == []

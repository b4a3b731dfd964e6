"""Guards what the API server tells of the prefix cache: to whom, escaped, and without harm to vLLM's own metrics.

A function stands for the engine; that EngineCore really has the method, and a server the page: tests/live/test_emulated.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from patches.front.cache_page import METRICS, PAGE, CachePage, metrics_text, together
from tests.front.driven import GOLD, OPERATOR, Recorder, call, front, identity_file, part, start

EVIL = 'a"} 1\nvllm:fake{x="\\'
ANSWER = {
    "schema": 1,
    "t_s": 3.5,
    "block_tokens": 16,
    "pool_blocks": 100,
    "usage": 0.25,
    "remembered_blocks": 1024,
    "sums": [
        ["requests", EVIL, "", "", 3],
        ["asked_blocks", EVIL, "", "", 30],
        ["found_blocks", EVIL, "device", "", 12],
        ["missed_blocks", EVIL, "evicted", "bronze-0", 8],
        ["missed_blocks", EVIL, "never", "", 10],
        ["recomputed_tokens", EVIL, "eviction", "", 128],
        ["reuse_blocks", EVIL, "8", "", 4],
        ["reuse_blocks", EVIL, "64", "", 12],
    ],
    "prefixes": [["0011223344556677", EVIL, 3, 30, 12]],
}
UPSTREAM = b"# TYPE vllm:x counter\nvllm:x_total 1.0\n"


def plain(kind: bytes = b"text/plain; version=0.0.4; charset=utf-8") -> Recorder:
    """Upstream's `/metrics`, in two parts."""
    return Recorder(start(200, kind), part(UPSTREAM[:9], more=True), part(UPSTREAM[9:], more=False))


class Engine:
    """Answers as the engines of a server do, and counts how often it is asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [answer if isinstance(answer, str) else json.dumps(answer) for answer in answers]
        self.asked: list[str] = []

    async def __call__(self, scope: Any, asked: str) -> list[str]:
        """The answers."""
        self.asked.append(asked)
        return self.answers


class Dead:
    """An engine that is gone."""

    async def __call__(self, scope: Any, asked: str) -> list[str]:
        """Never answers."""
        raise ConnectionError("gone")


def get(app: Any, path: str, key: str | None = None) -> Any:
    """A GET of this path."""
    return call(app, [b""], key=key, method="GET", path=path)


def values(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples of a page, as Prometheus reads them."""
    families = text_string_to_metric_families(text.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_the_page_is_the_engines_answer_and_it_is_kept_a_while() -> None:
    engine = Engine(ANSWER)
    page = CachePage(Recorder(), open_metrics=True, ask=engine)
    answered = get(page, PAGE)
    assert answered.status == 200 and json.loads(answered.body) == ANSWER
    assert get(page, PAGE).status == get(page, METRICS).status == 200
    assert engine.asked == [""]


def test_labels_are_escaped() -> None:
    found = values(metrics_text(ANSWER))
    name = "patchbench_cache_missed_blocks_total"
    labels = {"tenant": EVIL, "cause": "evicted", "by": "bronze-0"}
    assert found[name, frozenset(labels.items())] == 8
    assert not any(name.startswith("vllm") for name, _ in found)
    bucket = "patchbench_cache_reuse_distance_blocks_bucket"
    by_end = {dict(labels)["le"]: value for (name, labels), value in found.items() if name == bucket}
    assert by_end == {"8.0": 4, "64.0": 16, "+Inf": 16}
    assert found["patchbench_cache_pool_blocks", frozenset()] == 100


def test_upstreams_metrics_are_kept_and_added_to() -> None:
    answered = get(CachePage(plain(), open_metrics=True, ask=Engine(ANSWER)), "/metrics")
    assert answered.body.startswith(UPSTREAM)
    found = values(answered.body)
    assert found["vllm:x_total", frozenset()] == 1
    assert found["patchbench_cache_requests_total", frozenset({("tenant", EVIL)})] == 3
    assert answered.headers["content-length"] == str(len(answered.body))


@pytest.mark.parametrize("case", ["keys", "dead", "openmetrics", "nobody"])
def test_upstreams_metrics_are_left_alone(case: str) -> None:
    """Where callers have keys, where the engine is gone or has no such patch, and in a format that has an end mark."""
    app = plain(b"application/openmetrics-text; version=1.0.0") if case == "openmetrics" else plain()
    ask: Any = Dead() if case == "dead" else Engine("") if case == "nobody" else Engine(ANSWER)
    answered = get(CachePage(app, open_metrics=case != "keys", ask=ask), "/metrics")
    assert answered.status == 200 and answered.body == UPSTREAM


def test_an_engine_that_is_gone_is_said() -> None:
    for ask in (Dead(), Engine("")):
        answered = get(CachePage(Recorder(), open_metrics=True, ask=ask), PAGE)
        assert answered.status == 503 and "does not answer" in answered.error["message"]


def test_with_an_identity_file_only_the_operator_reads_it(tmp_path: Path) -> None:
    file = identity_file(tmp_path)
    for path in (PAGE, METRICS):
        for key, status in ((None, 401), (GOLD, 403), (OPERATOR, 200)):
            app = CachePage(Recorder(), open_metrics=False, ask=Engine(ANSWER))
            assert get(front(app, file), path, key).status == status


def test_other_requests_pass() -> None:
    app = Recorder()
    page = CachePage(app, open_metrics=True, ask=Dead())
    assert call(page, [b"{}"], path=PAGE).body == b"{}"
    assert get(page, "/v1/models").status == 200
    assert len(app.scopes) == 2


def test_engines_are_added_up() -> None:
    both = together([ANSWER, {**ANSWER, "pool_blocks": 300, "usage": 0.75}])
    assert both["pool_blocks"] == 400 and both["usage"] == pytest.approx(0.625)
    assert ["found_blocks", EVIL, "device", "", 24] in both["sums"]
    assert len(both["prefixes"]) == 2
    assert asyncio.run(Engine(ANSWER)(None, "")) == [json.dumps(ANSWER)]

"""Guards a real server from start to end: patches in each process, exact tokens, a crash seen at once, nothing left.

Two servers are started, one after the other, and one more that does not get far. What the patches do to a
schedule is for the engine tests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.arms import Arm
from harness.cli import _run
from harness.engines.flags import EngineFlags
from harness.engines.live import cache_table, processes, receipt_check
from harness.engines.live.server import Server, launch
from harness.engines.live.server_errors import ServerFailed
from patches.seam.plan import resolve
from tests.live import served_model

ENABLE = "qos,mlfq,slru,cachedash"
FLAGS = EngineFlags(
    max_model_len=1024,
    max_num_batched_tokens=256,
    max_num_seqs=8,
    max_num_queued_reqs=50,
    watermark=0.05,
    long_prefill_token_threshold=128,
    block_size=32,
)
KV_CACHE_BYTES = 2**28
KEY = "Authorization"


pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.make_small_llama(tmp_path_factory.mktemp("small-llama") / "small-llama")


@pytest.fixture(scope="class")
def server(tmp_path_factory: pytest.TempPathFactory, small_llama: Path) -> Iterator[Server]:
    """Three patches under an arm's flags; the real small model where it is in the cache."""
    folder = tmp_path_factory.mktemp("server")
    arm = Arm("patched", "tuned", FLAGS, resolve(ENABLE))
    with served_model.alone():
        model = served_model.cached_smollm2() or small_llama
        with launch(
            arm,
            model,
            log_path=folder / "server.log",
            receipts_dir=folder / "receipts",
            kv_cache_bytes=KV_CACHE_BYTES,
        ) as running:
            yield running


def streamed(server: Server, prompt: list[int], max_tokens: int) -> Iterator[dict[str, Any]]:
    """The events of one streamed completion."""
    place = urlsplit(server.base_url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
    body = {
        "model": server.model_name,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", KEY: f"Bearer {server.api_key}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])


class TestOneServer:
    """What one server is asked, up to its end."""

    def test_each_process_runs_under_the_plan(self, server: Server) -> None:
        plan = resolve(ENABLE)
        roles = {one.role: one.pid for one in server.processes}
        assert {"APIServer", "EngineCore"} <= set(roles)
        found = server.receipts()
        assert {roles["APIServer"], roles["EngineCore"]} <= set(found)
        assert {receipt["plan_sha256"] for receipt in found.values()} == {plan.sha256()}
        # The completion that found it ready went through the patched queue.
        assert found[roles["EngineCore"]]["hooks"]["qos"]["hits"] > 0
        assert server.alive()

    def test_the_arms_flags_are_in_force(self, server: Server) -> None:
        config = server.resolved_config()
        resolved = config["scheduler_config"] | config["cache_config"] | config["model_config"]
        for name, value in FLAGS.model_dump().items():
            # On the CPU vLLM schedules synchronously, whatever it is told.
            if name in resolved and name != "async_scheduling":
                assert resolved[name] == value, name
        assert resolved["dtype"].endswith("float32")

    def test_tokens_come_with_their_ids(self, server: Server) -> None:
        events = list(streamed(server, list(range(10, 50)), 12))
        ids = [
            token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()
        ]
        usage = events[-1]["usage"]
        assert (len(ids), usage["completion_tokens"], usage["prompt_tokens"]) == (12, 12, 40)

    def test_only_who_has_the_key_is_served(self, server: Server) -> None:
        stranger = type(server.endpoint)(server.base_url, "wrong")
        assert stranger.call("GET", "/v1/models")[0] == 401
        assert json.loads(server.endpoint.call("GET", "/v1/models")[1])["data"][0]["id"] == server.model_name
        assert server.api_key not in server.log_path.read_text()
        assert server.api_key not in " ".join(server.command)

    def test_the_prefix_cache_is_told_of_by_the_engine(
        self, server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        prompt = list(range(300, 400))
        for _ in range(2):
            list(streamed(server, prompt, 1))
        # An answer is kept for a second.
        time.sleep(1.1)
        status, body = server.endpoint.call("GET", "/patchbench/cache")
        assert status == 200
        told = json.loads(body)
        sums = {tuple(names): value for *names, value in told["sums"]}
        assert told["block_tokens"] == 32 and sums["found_blocks", "", "device", ""] >= 3
        status, body = server.endpoint.call("GET", "/metrics")
        text = body.decode() if isinstance(body, bytes) else body
        assert status == 200 and "vllm:prompt_tokens_total" in text
        assert f'patchbench_cache_requests_total{{tenant=""}} {sums["requests", "", "", ""]}.0' in text
        table, problem = cache_table.fetch(server.base_url, server.api_key, 0)
        assert problem == "" and table is not None and table.num_rows > 3
        assert _run(["top", server.base_url, "--times", "1", "--key", server.api_key]) == 0
        assert "tenant=all" in capsys.readouterr().out

    def test_the_prefix_cache_can_be_emptied(self, server: Server) -> None:
        prompt = list(range(100, 200))

        def cached() -> int:
            usage = list(streamed(server, prompt, 1))[-1]["usage"]
            return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

        cached()
        assert cached() == 96
        server.reset_prefix_cache()
        assert cached() == 0

    def test_a_crash_is_seen_at_once_and_leaves_nothing(self, server: Server) -> None:
        """Last of those that share the server: it does not survive."""
        engine = next(one for one in server.processes if one.role == "EngineCore")
        events = streamed(server, list(range(10, 50)), 500)
        next(events)
        os.kill(engine.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while server.alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ServerFailed) as caught:
            server.check()
        assert caught.value.code == "server_crashed"
        assert f"EngineCore (pid {engine.pid}) ended" in str(caught.value)
        assert str(server.log_path) in str(caught.value) and caught.value.log_tail
        rest = list(events)
        assert sum(len(event.get("choices", ())) for event in rest) < 499
        assert "error" in rest[-1]
        ended = server.shutdown()
        assert ended.left == ()
        assert not [one for one in server.processes if one.is_alive()]
        assert not server.temporary.exists()
        assert not [name for name in server._shared if (processes.SHM / name).exists()]
        assert server.exit_reason() == "it was shut down"


# bench serve


def bench(root: Path, *words: str) -> subprocess.Popen[str]:
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from harness.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "serve", *words],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


def test_a_person_serves_and_stops(root: Path, small_llama: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["--enable", "qos", "--set", "qos.short_prompt_tokens=64", "--model", str(small_llama)]
    words += ["--receipts", str(tmp_path / "receipts")]
    flags = ["--max-num-seqs=4", f"--kv-cache-memory-bytes={KV_CACHE_BYTES}"]
    with served_model.alone(), bench(root, *words, "--port", port, "--", *flags) as serving:
        assert serving.stdout is not None and serving.stderr is not None
        lines = []
        for line in serving.stdout:
            lines.append(line)
            if line.startswith("Ctrl-C"):
                break
        said = "".join(lines)
        assert f"serving small-llama at http://127.0.0.1:{port}/v1" in said, said + serving.stderr.read()
        assert re.search(r"patches: qos, in force in APIServer \d+, EngineCore \d+", said)
        pids = [int(pid) for pid in re.findall(r"(?:APIServer|EngineCore|Worker) (\d+)", said)]
        log = Path(re.findall(r"^log: (.+)$", said, re.MULTILINE)[0])

        # A second server on its port does not start, and does not disturb it.
        second = bench(root, "--model", str(small_llama), "--port", port)
        out, err = second.communicate(timeout=60)
        assert second.returncode == 2 and out == ""
        assert f"port {port} is in use already, by" in err and f"(pid {pids[0]})" in err

        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        with contextlib.closing(connection):
            for _ in range(3):
                body = {"model": "small-llama", "prompt": "w5 w6 w7", "max_tokens": 4, "ignore_eos": True}
                connection.request(
                    "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                assert response.status == 200
                assert json.loads(response.read())["usage"]["completion_tokens"] == 4

        serving.send_signal(signal.SIGINT)
        out, err = serving.communicate(timeout=60)
    assert (serving.returncode, err) == (130, "")
    assert "stopped" in out
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    # Written by the engine when it ended in good order: all requests, the first one included, are in it.
    assert not log.exists()
    found = receipt_check.read(tmp_path / "receipts")
    assert found[pids[1]]["hooks"]["qos"]["by_hook"]["request_key"] >= 4


def test_a_flag_that_vllm_does_not_know(root: Path, small_llama: Path) -> None:
    with (
        served_model.alone(),
        bench(root, "--model", str(small_llama), "--port", "0", "--", "--no-such") as asked,
    ):
        _, err = asked.communicate(timeout=120)
    assert asked.returncode == 2
    assert "unrecognized arguments: --no-such" in err and len(err.strip().splitlines()) == 1

"""Guards identity and refusals on vLLM's whole server, its device emulated: one server, a few requests.

What each part does in every case is for tests/front; what the patches decide is for theirs. A toy patch refuses and
expires by tenant, so that what it does shows whose the engine took a request to be.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.arms import Arm
from harness.engines.emulated.launch import server_for
from harness.engines.flags import EngineFlags
from harness.engines.live.client import Drive, Options, make_target
from harness.engines.live.server import Server, launch
from harness.profiles import load_profile
from harness.tenant_keys import issue
from patches.seam.plan import resolve
from patches.seam.plugin import EVENTS_ENV
from tests.live.served_model import alone
from tests.live.small_workload import TENANT, ask, workload
from workloads.request import Workload

PROFILE = load_profile("rtx4090-24g")
TOY = "tests.seam.toys.ending"
TENANTS = tuple(replace(TENANT, name=name) for name in ("gold-a", "refused", "expired"))

pytestmark = [pytest.mark.slow, pytest.mark.live]


@dataclass(frozen=True, slots=True)
class Running:
    """A server, the keys of its tenants, and where it notes events."""

    server: Server
    keys: dict[str, str]
    events: Path


def work() -> Workload:
    """One request of each tenant."""
    asked = [
        replace(ask(name, 100.0 * i, tokens=8), tenant=name) for i, name in enumerate(t.name for t in TENANTS)
    ]
    return replace(
        workload(*asked), tenants=TENANTS, requests=tuple(replace(r, index=i) for i, r in enumerate(asked))
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("identity")
    keys = issue(TENANTS, folder / "identity.toml")
    arm = Arm("toy", "stock", EngineFlags(**PROFILE.stock), resolve(TOY))
    arguments = server_for(PROFILE, work(), folder / "scratch")
    arguments["env"][EVENTS_ENV] = str(folder / "events.jsonl")
    with (
        alone(),
        launch(
            arm,
            log_path=folder / "server.log",
            receipts_dir=folder / "receipts",
            identity=folder / "identity.toml",
            **arguments,
        ) as server,
    ):
        yield Running(server, keys, folder / "events.jsonl")


def connect(server: Server) -> http.client.HTTPConnection:
    place = urlsplit(server.base_url)
    return http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)


def ask_server(server: Server, key: str, prompt: int = 20, **more: Any) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of a completion."""
    body = {
        "model": server.model_name,
        "prompt": list(range(3, 3 + prompt)),
        "max_tokens": 8,
        "ignore_eos": True,
    }
    connection = connect(server)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body | more), headers)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read().decode()
    finally:
        connection.close()


def counter(server: Server, name: str) -> float:
    """Sum of a metric's samples."""
    status, text = server.endpoint.call("GET", "/metrics")
    assert status == 200
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_is_a_503_with_retry_after(running: Running, stream: bool) -> None:
    status, headers, text = ask_server(running.server, running.keys["refused"], stream=stream)
    assert status == 503, text
    assert headers["retry-after"] == "3" and headers["content-type"] == "application/json"
    error = json.loads(text)["error"]
    assert (error["code"], error["reason"], error["retry_after_s"]) == (503, "queue_depth", 3)


def test_an_expiry_is_a_408_before_the_first_byte_and_an_event_after_it(running: Running) -> None:
    # The prompt takes more passes than the toy gives it.
    status, _, text = ask_server(running.server, running.keys["expired"], prompt=7000, stream=True)
    assert status == 408 and json.loads(text)["error"]["reason"] == "deadline_expired"
    status, _, text = ask_server(running.server, running.keys["expired"], stream=True, max_tokens=64)
    assert status == 200
    first, *_, error, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert json.loads(first)["choices"] and done == "[DONE]"
    assert (
        json.loads(error)["error"]["reason"] == "deadline_expired"
        and json.loads(error)["error"]["code"] == 408
    )
    status, _, text = ask_server(running.server, running.keys["expired"], max_tokens=64)
    assert status == 408 and json.loads(text)["error"]["code"] == 408


def test_the_key_decides_whose_a_request_is(running: Running) -> None:
    other: dict[str, Any] = {"vllm_xargs": {"tenant": "refused", "tier": "gold"}, "priority": -9}
    status, _, text = ask_server(running.server, running.keys["gold-a"], **other)
    assert status == 200, text
    assert json.loads(text)["usage"]["completion_tokens"] == 8
    status, _, _ = ask_server(running.server, running.keys["refused"], vllm_xargs={"tenant": "gold-a"})
    assert status == 503
    # The operator's key, which is vLLM's own, makes nobody a tenant.
    status, _, _ = ask_server(running.server, running.server.api_key, vllm_xargs={"tenant": "refused"})
    assert status == 200
    lines = [json.loads(line) for line in running.events.read_text().splitlines()]
    claims = {(line["event"], line["tenant"]) for line in lines if line["event"].startswith("claimed")}
    assert {
        ("claimed_tenant", "gold-a"),
        ("claimed_priority", "gold-a"),
        ("claimed_tenant", "refused"),
    } <= claims
    assert not any(key in running.events.read_text() for key in running.keys.values())
    assert counter(running.server, 'patchbench_front_events_total{event="claimed_tenant"') >= 3


def test_who_has_no_key_gets_nothing(running: Running) -> None:
    before = counter(running.server, "vllm:request_success_total")
    status, headers, text = ask_server(running.server, "pb-unknown")
    assert (
        status == 401 and headers["www-authenticate"] == "Bearer" and json.loads(text)["error"]["code"] == 401
    )
    assert counter(running.server, "vllm:request_success_total") == before
    # Bad JSON is vLLM's own to refuse.
    connection = connect(running.server)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {running.keys['gold-a']}"}
    connection.request("POST", "/v1/completions", b'{"prompt": ', headers)
    response = connection.getresponse()
    assert response.status == 400 and "JSON" in response.read().decode()
    connection.close()


def test_a_caller_that_leaves_ends_its_request(running: Running) -> None:
    for tokens in (0, 1):
        body = {
            "model": running.server.model_name,
            "prompt": [3] * 900,
            "max_tokens": 3000,
            "ignore_eos": True,
        }
        connection = connect(running.server)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {running.keys['gold-a']}"}
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        if tokens:
            connection.getresponse().read(1)
        else:
            time.sleep(0.005)
        connection.close()
        deadline = time.monotonic() + 10
        # Left alone, it would run for a minute.
        while counter(running.server, "vllm:num_requests_running") and time.monotonic() < deadline:
            time.sleep(0.2)
        assert counter(running.server, "vllm:num_requests_running") == 0


def test_the_client_shows_each_tenants_key_and_records_what_came_back(running: Running) -> None:
    server = running.server
    target = make_target(server.base_url, server.model_name, server.api_key, running.keys)
    with Drive(work(), target, Options(send_priority=True), workers=1) as ready:
        report = ready.run()
    found = {one.request_id: one for one in report.requests}
    assert found["gold-a"].status == "ok" and found["gold-a"].output_tokens == 8
    assert (found["refused"].status, found["refused"].http_status) == ("rejected", 503)
    assert (found["refused"].reason, found["refused"].retry_after_s) == ("queue_depth", 3.0)
    assert (found["expired"].status, found["expired"].reason) == ("expired", "deadline_expired")
    lines = [json.loads(line) for line in running.events.read_text().splitlines()]
    # Saying what one is anyway is no claim.
    assert not [line for line in lines if line.get("request_id") in found]

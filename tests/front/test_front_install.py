"""Guards that the front is put before vLLM's real application, that endings leave AsyncLLM as errors, and undo.

vLLM's API server is imported in a process of its own; no server is started (tests/live/test_identity_live.py has one).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.engines.live.client.reading import Reading
from patches.seam.plan import resolve
from tests.front.driven import identity_file

TOY = "tests.seam.toys.ending"

IN_SERVER = """
import asyncio, os
from types import SimpleNamespace
import vllm.entrypoints.launchers.app as server
from vllm.v1.engine.async_llm import AsyncLLM
stock = server.init_entrypoints_middleware, vars(AsyncLLM)["generate"]
from patches.seam import plugin
plugin.register()
plugin.register()
from patches.front import install
from patches.front.middleware import Front
refuses = "PATCHBENCH_PLAN" in os.environ and "PATCHBENCH_OFF" not in os.environ
assert server.init_entrypoints_middleware is not stock[0]
assert (vars(AsyncLLM)["generate"] is not stock[1]) == refuses

from fastapi import FastAPI
args = SimpleNamespace(allowed_origins=["*"], allow_credentials=False, allowed_methods=["*"], allowed_headers=["*"],
                       api_key=["op"], enable_request_id_headers=True, middleware=[])
app = FastAPI()
server.init_entrypoints_middleware(args, app, ("generate",))
app.state.args = args
assert app.user_middleware[0].cls is Front and len(app.user_middleware) > 3
access = app.user_middleware[0].args[0]
assert (access is not None) == ("PATCHBENCH_IDENTITY" in os.environ)
scope = {"app": app}
assert list(install._operator_keys(scope)) == ["op"]
app.state.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs"))
assert install._takes_priority(scope) == refuses
app.state.vllm_config.scheduler_config.policy = "priority"
assert install._takes_priority(scope)

if refuses:
    class Outputs:
        closed = False
        async def generate(self, *reasons):
            try:
                for reason in reasons:
                    one = SimpleNamespace(finish_reason=reason and "abort", stop_reason=reason)
                    yield SimpleNamespace(outputs=[one])
            finally:
                self.closed = True

    async def read(*reasons, limit=9):
        fake, got = Outputs(), []
        stream = install._raising(Outputs.generate)(fake, *reasons)
        try:
            async for output in stream:
                got.append(output)
                if len(got) == limit:
                    await stream.aclose()
        except Exception as error:
            got.append((type(error).__mro__[1].__name__, str(error), int(error.status_code)))
        return got, fake.closed

    got, closed = asyncio.run(read(None, "refused:kv_red:7", None))
    assert got[1:] == [("RetryableRequestError", "refused:kv_red:7", 503)] and closed
    got, closed = asyncio.run(read("deadline_expired"))
    assert got == [("RetryableRequestError", "deadline_expired", 408)] and closed
    got, closed = asyncio.run(read(None, "somebody's own reason"))
    assert len(got) == 2 and closed
    got, closed = asyncio.run(read(None, None, None, limit=1))
    assert len(got) == 1 and closed

install.undo()
assert (server.init_entrypoints_middleware, vars(AsyncLLM)["generate"]) == stock
assert install.in_server(None) == refuses
"""

ELSEWHERE = """
import sys
from patches.seam import plugin
plugin.register()
assert not [name for name in sys.modules if name.startswith("patches.front")]
"""


def run(root: Path, code: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter at the project's root."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHBENCH_", "VLLM_API"))}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=root,
        env=clean | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", ["both", "off"])
def test_in_an_api_server(root: Path, tmp_path: Path, case: str) -> None:
    env = {"PATCHBENCH_IDENTITY": str(identity_file(tmp_path)), "PATCHBENCH_PLAN": resolve(TOY).to_json()}
    if case == "off":
        # The kill switch takes the patches out; it does not open the server.
        env["PATCHBENCH_OFF"] = "1"
    done = run(root, IN_SERVER, **env)
    assert done.returncode == 0, done.stderr[-3000:]


def test_in_another_process_nothing_is_loaded(root: Path, tmp_path: Path) -> None:
    done = run(root, ELSEWHERE, PATCHBENCH_IDENTITY=str(identity_file(tmp_path)))
    assert done.returncode == 0, done.stderr[-3000:]


FAKE = """
import sys, types
sys.modules["vllm.entrypoints.launchers.app"] = types.ModuleType("app")
from patches.seam import plugin
plugin.register()
"""


@pytest.mark.parametrize(
    ("text", "words", "env", "said"),
    [
        ("[a]\nweight = -1\n", [], {}, "weight"),
        (None, ["--grpc"], {}, "has no effect on vLLM's gRPC server"),
        (None, [], {"VLLM_USE_RUST_FRONTEND": "1"}, "has no effect"),
    ],
)
def test_a_server_that_it_could_not_guard_does_not_start(
    root: Path, tmp_path: Path, text: str | None, words: list[str], env: dict[str, str], said: str
) -> None:
    file = identity_file(tmp_path) if text is None else identity_file(tmp_path, text)
    done = run(root, FAKE, *words, PATCHBENCH_IDENTITY=str(file), **env)
    assert done.returncode != 0 and said in done.stderr.splitlines()[-1]


def test_the_client_reads_an_ending_without_the_front_too() -> None:
    for reason, status, told in (
        ("refused:kv_red:7", "rejected", "kv_red"),
        ("deadline_expired", "expired", "deadline_expired"),
    ):
        reading = Reading(keep_ids=False)
        event = f'{{"choices":[{{"text":"","finish_reason":"abort","stop_reason":"{reason}"}}]}}'
        reading.feed(1, f"data: {event}\n\ndata: [DONE]\n\n".encode())
        assert (reading.status, reading.reason) == (status, told)

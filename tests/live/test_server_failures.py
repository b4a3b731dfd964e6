"""Guards the reasons with which a server is not measured, on a stand-in for vLLM: it misbehaves without the wait."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import HTTPServer
from pathlib import Path

import pytest

from harness.engines.live.command import ServeSpec
from harness.engines.live.server import Server, serve
from harness.engines.live.server_errors import ServerFailed
from patches.seam.plan import resolve
from tests.live.stand_in import Handler

Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def begin(
        mode: str, *, enable: str = "", port: int = 0, seconds: float = 60
    ) -> AbstractContextManager[Server]:
        spec = ServeSpec(
            str(tmp_path / "model"),
            plan=resolve(enable),
            port=port,
            env={"STAND_IN": mode},
            module="tests.live.stand_in",
        )
        log = tmp_path / "server.log"
        return serve(spec, log_path=log, receipts_dir=tmp_path / "receipts", start_timeout_s=seconds)

    return begin


def failure(context: AbstractContextManager[Server]) -> ServerFailed:
    with pytest.raises(ServerFailed) as caught, context:
        pass
    return caught.value


def test_it_dies_in_start_up(start: Start, tmp_path: Path) -> None:
    found = failure(start("dies"))
    assert found.code == "start_failed"
    assert "exit code 1" in str(found) and "ValueError: the weights are gone" in str(found)
    assert str(tmp_path / "server.log") in str(found)
    assert found.log_tail == ("(EngineCore pid=5) ValueError: the weights are gone",)


def test_it_never_gets_ready(start: Start) -> None:
    found = failure(start("silent", seconds=1.0))
    assert found.code == "start_timeout" and "within 1 s" in str(found)


def test_it_answers_without_its_patches(start: Start) -> None:
    found = failure(start("answers", enable="qos,slru"))
    assert found.code == "patch_not_loaded"
    assert "left no receipt" in str(found) and "nothing was measured" in str(found)


def test_a_stranger_takes_the_port_meanwhile(start: Start, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    strangers: list[HTTPServer] = []

    def move_in() -> None:
        # The log is there as soon as the port was found free.
        while not (tmp_path / "server.log").exists():
            time.sleep(0.01)
        strangers.append(HTTPServer(("127.0.0.1", port), Handler))
        strangers[0].serve_forever()

    thread = threading.Thread(target=move_in)
    thread.start()
    found = failure(start("silent", port=port))
    strangers[0].shutdown()
    strangers[0].server_close()
    thread.join()
    assert found.code == "foreign_server"
    assert f"(pid {os.getpid()})" in str(found)


@pytest.mark.parametrize("whom", ["server", "guard"])
def test_it_is_killed_while_it_runs(start: Start, whom: str) -> None:
    with start("answers") as server:
        assert server.alive()
        os.kill(server.guard.pid if whom == "guard" else server.pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while server.alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ServerFailed, match="the server crashed") as caught:
            server.check()
        assert caught.value.code == "server_crashed"
    assert server.ended is not None and server.ended.left == ()
    assert not [one for one in server.processes if one.is_alive()]


def test_it_ends_when_the_run_fails(start: Start) -> None:
    with pytest.raises(KeyboardInterrupt), start("answers") as server:
        raise KeyboardInterrupt
    assert server.ended is not None and server.ended.clean
    assert not server.temporary.exists()
    assert server.shutdown() is server.ended

"""Guards what surrounds a server: ports, words, logs, receipts, and the guard that lets no process escape.

No vLLM here: the guard is tried on small programs that misbehave on purpose.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.engines.flags import EngineFlags
from harness.engines.live import command, ports, processes, receipt_check, server_log
from harness.engines.live.command import ServeSpec
from harness.engines.live.processes import ServerProcess
from harness.errors import UserError
from patches.seam.plan import PatchPlan, resolve

GUARD = [sys.executable, "-P", "-m", "harness.engines.live.serve_process"]


# ports


def test_a_taken_port_is_refused_with_its_owner() -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} is in use already, by .*\(pid {os.getpid()}\)"):
            ports.choose("127.0.0.1", port)
    assert ports.choose("127.0.0.1", port) == port


def test_a_listener_on_all_addresses_takes_the_port_too() -> None:
    with socket.socket() as stranger:
        stranger.bind(("0.0.0.0", 0))
        stranger.listen()
        with pytest.raises(UserError, match="in use"):
            ports.choose("127.0.0.1", stranger.getsockname()[1])


@pytest.mark.parametrize(("host", "says"), [("203.0.113.7", "cannot listen"), ("no such host", "no address")])
def test_an_address_that_is_not_ours(host: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ports.choose(host, 0)


@pytest.mark.parametrize(
    ("host", "loopback", "url"),
    [
        ("127.0.0.1", True, "http://127.0.0.1:80"),
        ("127.3.2.1", True, "http://127.3.2.1:80"),
        ("localhost", True, "http://localhost:80"),
        ("::1", True, "http://[::1]:80"),
        ("0.0.0.0", False, "http://127.0.0.1:80"),
        ("::", False, "http://[::1]:80"),
        ("example.org", False, "http://example.org:80"),
    ],
)
def test_which_addresses_others_reach(host: str, loopback: bool, url: str) -> None:
    assert ports.is_loopback(host) is loopback
    assert ports.url(host, 80) == url


# words and environment


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    return folder


def test_an_arms_flags_become_vllms(model: Path) -> None:
    flags = EngineFlags(
        max_model_len=1024,
        max_num_queued_reqs=0,
        watermark=0.05,
        scheduling_policy="priority",
        enable_prefix_caching=False,
        block_size=32,
    )
    words = command.words(ServeSpec(str(model), flags=flags), 1234)
    for word in (
        *("--max-model-len=1024", "--max-num-queued-reqs=0", "--watermark=0.05", "--port=1234"),
        *("--scheduling-policy=priority", "--no-enable-prefix-caching", "--enable-chunked-prefill"),
        *("--block-size=32", "--served-model-name=tiny", "--host=127.0.0.1"),
    ):
        assert words.count(word) == 1, word
    # What an arm leaves open is vLLM's to decide.
    assert not [word for word in words if "queued-tokens" in word or "active-seqs" in word]


@pytest.mark.parametrize(
    "extra",
    ["--port=1", "--api-key", "--served_model_name", "--max-num-seqs=4", "--no-enable-prefix-caching"],
)
def test_what_is_decided_elsewhere_cannot_be_said_twice(model: Path, extra: str) -> None:
    spec = ServeSpec(str(model), flags=EngineFlags(max_model_len=1024, block_size=32), extra=(extra,))
    with pytest.raises(UserError, match="is set by"):
        command.words(spec, 1)


def test_what_the_cpu_would_set_can_be_set_otherwise(model: Path) -> None:
    if not command.is_cpu_build():
        pytest.skip("vLLM is not the CPU build here")
    words = command.words(ServeSpec(str(model), extra=("--dtype=bfloat16", "--block_size=64")), 1)
    assert "--dtype=float32" not in words and "--block-size=32" not in words
    assert "--enforce-eager" in words
    with pytest.raises(UserError, match="multiples of 32"):
        command.words(ServeSpec(str(model), flags=EngineFlags(max_model_len=1024)), 1)


@pytest.mark.parametrize(
    ("name", "says"),
    [("gone", "no such folder"), ("tiny/config.json", "it is a file"), ("empty", "no readable config.json")],
)
def test_a_model_that_is_not_there(model: Path, name: str, says: str) -> None:
    (model.parent / "empty").mkdir()
    with pytest.raises(UserError, match=says):
        command.words(ServeSpec(str(model.parent / name)), 1)


def test_a_model_too_short_for_the_arm(model: Path) -> None:
    with pytest.raises(UserError, match=r"takes 4096 tokens.*max_model_len=32768"):
        command.words(ServeSpec(str(model), flags=EngineFlags(block_size=32)), 1)


def test_the_environment_is_the_servers_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("PATCHBENCH_PLAN", "stale")
    monkeypatch.setenv("PATCHBENCH_OFF", "1")
    monkeypatch.setenv("VLLM_API_KEY", "somebody's")
    before = dict(os.environ)
    stock = command.environment(ServeSpec(str(model)), tmp_path, tmp_path)
    assert not [name for name in stock if name.startswith("PATCHBENCH_")]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in stock and "VLLM_API_KEY" not in stock
    plan = resolve("qos")
    spec = ServeSpec(str(model), plan=plan, api_key="k", env={"VLLM_LOGGING_LEVEL": "DEBUG"})
    patched = command.environment(spec, tmp_path, tmp_path)
    assert PatchPlan.from_json(patched["PATCHBENCH_PLAN"]) == plan
    assert patched["PATCHBENCH_RECEIPTS"] == str(tmp_path)
    # the same for all arms, with a KV connector or without
    assert stock["VLLM_CPU_NUM_OF_RESERVED_CPU"] == patched["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
    assert patched["VLLM_API_KEY"] == "k" and patched["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert not [word for word in command.words(spec, 1) if "key" in word]
    assert dict(os.environ) == before


# logs


def test_the_cause_is_the_last_error_at_first_hand(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        textwrap.dedent(
            """\
            (APIServer pid=1) INFO 01-02 03:04:05 [launcher.py:10] starting
            (EngineCore pid=2) ERROR 01-02 03:04:06 [core.py:20] Traceback (most recent call last):
            (EngineCore pid=2) ERROR 01-02 03:04:06 [core.py:20]   File "x.py", line 1, in f
            (EngineCore pid=2) ERROR 01-02 03:04:06 [core.py:20] \x1b[31mValueError: No room: 3 blocks\x1b[0m
            RuntimeError: Engine core initialization failed. See root cause above.
            """
        )
    )
    assert server_log.cause(log) == "ValueError: No room: 3 blocks"
    assert server_log.tail(log, 1)[0].startswith("RuntimeError")
    assert server_log.usage_error(log) == ""


def test_a_validation_error_comes_with_what_it_says(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "pydantic_core.ValidationError: 1 validation error\n  Value error, too long [type=x]\nbye\n"
    )
    assert (
        server_log.cause(log)
        == "pydantic_core.ValidationError: 1 validation error Value error, too long [type=x]"
    )


def test_cores_of_all_ranks_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "(EngineCore pid=2) INFO 01-02 03:04:05 [x.py:1] \tlocal_rank=0, core ids=[0, 1]\n"
        "(EngineCore pid=2) INFO 01-02 03:04:05 [x.py:1] \tlocal_rank=1, core ids=[4]\n"
    )
    assert server_log.compute_cores(log) == 3
    log.write_text("(EngineCore pid=2) INFO 01-02 03:04:05 [x.py:1] on a GPU\n")
    assert server_log.compute_cores(log) is None
    assert server_log.compute_cores(tmp_path / "no") is None


def test_no_log_and_a_refused_flag(tmp_path: Path) -> None:
    assert (server_log.tail(tmp_path / "no"), server_log.cause(tmp_path / "no")) == ((), "")
    log = tmp_path / "server.log"
    log.write_text(
        "usage: vllm serve [model_tag] [options]\nvllm serve: error: unrecognized arguments: --foo\n"
    )
    assert server_log.usage_error(log) == "unrecognized arguments: --foo"


# receipts

PROCESSES = tuple(
    ServerProcess(pid, role, 0.0) for pid, role in ((1, "APIServer"), (2, "EngineCore"), (3, "Worker"))
)


def receipt(plan: PatchPlan, pid: int, **over: Any) -> dict[str, Any]:
    whole = {"pid": pid, "plan_sha256": plan.sha256(), "hooks": {name: {"hits": 0} for name in plan.names}}
    return whole | over


def test_every_process_must_run_under_the_plan() -> None:
    plan = resolve("qos,slru")
    good = {pid: receipt(plan, pid) for pid in (1, 2, 3)}
    assert receipt_check.faults(plan, PROCESSES, good, spawned=True) == []
    for changed, says in (
        ({2: None}, "EngineCore (pid 2) left no receipt"),
        ({2: receipt(resolve("mlfq"), 2)}, "another plan"),
        ({2: receipt(plan, 2, error="DriftError: moved")}, "EngineCore (pid 2): DriftError: moved"),
        ({1: receipt(plan, 1, hooks={"qos": {}})}, "lacks slru"),
        ({9: receipt(plan, 9, error="late")}, "pid 9: late"),
        ({3: None}, "Worker (pid 3) left no receipt"),
    ):
        found = {pid: value for pid, value in (good | changed).items() if value is not None}
        (fault,) = receipt_check.faults(plan, PROCESSES, found, spawned=True)
        assert says in fault
    # A forked worker has its parent's patches and no step of its own that would say so.
    forked = {pid: good[pid] for pid in (1, 2)}
    assert receipt_check.faults(plan, PROCESSES, forked, spawned=False) == []
    assert receipt_check.faults(plan, PROCESSES[:1], good, spawned=False) == [
        "there is no process EngineCore"
    ]


def test_stock_leaves_no_receipt() -> None:
    assert receipt_check.faults(None, PROCESSES, {}, spawned=True) == []
    left = {7: receipt(resolve("qos"), 7)}
    assert receipt_check.faults(None, PROCESSES, left, spawned=True) == [
        "pid 7 left a receipt though no patch is enabled"
    ]


# the guard

# Two generations below the guard; the last one is in a session of its own, deaf to SIGTERM, and holds shared memory.
STUBBORN = """
import os, signal, subprocess, sys, time
deaf = '''
import mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("/dev/shm/pb-test-" + sys.argv[1], "w+b") as file:
    file.truncate(4096)
    shared = mmap.mmap(file.fileno(), 4096)
    print("ready", os.getpid(), flush=True)
    time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", deaf, sys.argv[1]], stdout=sys.stderr, start_new_session=True)
end = {"exit": lambda: time.sleep(1.5), "wait": lambda: time.sleep(600)}[sys.argv[2]]
end()
sys.exit(7)
"""


def start_guard(log: Path, *words: str, grace: float = 0.5) -> subprocess.Popen[str]:
    with log.open("wb") as errors:
        return subprocess.Popen(
            [*GUARD, str(os.getpid()), str(grace), sys.executable, "-c", STUBBORN, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )


def deaf_pid(log: Path) -> int:
    deadline = time.monotonic() + 30
    while "ready" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return int(log.read_text().split("ready ")[1].split()[0])


def gone(pid: int, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def tag(tmp_path: Path) -> Any:
    name = f"{os.getpid()}-{tmp_path.name}"
    yield name
    (processes.SHM / f"pb-test-{name}").unlink(missing_ok=True)


def test_the_guard_ends_what_does_not_want_to_end(tmp_path: Path, tag: str) -> None:
    log = tmp_path / "log"
    guard = start_guard(log, tag, "wait")
    deaf = deaf_pid(log)
    assert processes.shared_memory([deaf]) == {f"pb-test-{tag}"}
    assert {process.pid for process in processes.descendants(guard.pid)} >= {deaf}
    guard.send_signal(signal.SIGTERM)
    said, _ = guard.communicate(timeout=30)
    assert json.loads(said) == {"why": "asked", "returncode": -signal.SIGTERM, "killed": [deaf]}
    assert gone(deaf, 0)


def test_the_guard_says_how_the_server_died_and_ends_the_rest(tmp_path: Path, tag: str) -> None:
    log = tmp_path / "log"
    guard = start_guard(log, tag, "exit")
    deaf = deaf_pid(log)
    said, _ = guard.communicate(timeout=30)
    assert json.loads(said) == {"why": "ended", "returncode": 7, "killed": [deaf]}
    assert gone(deaf, 0)


def test_nothing_outlives_a_killed_parent(tmp_path: Path, tag: str) -> None:
    log = tmp_path / "log"
    log.touch()
    middle = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([*sys.argv[1].split(), str(os.getpid()), '0.5', sys.executable, '-c', sys.argv[2],\n"
        "    sys.argv[3], 'wait'], stderr=open(sys.argv[4], 'wb'), start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", middle, " ".join(GUARD), STUBBORN, tag, str(log)], stdout=subprocess.DEVNULL
    )
    deaf = deaf_pid(log)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(deaf)


def test_a_process_is_known_by_its_start_too() -> None:
    own = psutil.Process()
    assert ServerProcess(own.pid, "x", own.create_time()).is_alive()
    assert not ServerProcess(own.pid, "x", own.create_time() - 1).is_alive()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert processes.listens([own.pid], port)
        assert not processes.listens([os.getppid()], port)

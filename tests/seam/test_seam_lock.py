"""Drift: the lock agrees with what is installed, and each kind of tampering is named. Undo leaves no trace."""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patches.seam import adapter, upstream_lock
from patches.seam.plan import resolve
from patches.seam.seams import SEAMS
from patches.seam.targets import FILES, file_of

TOYS = "tests.seam.toys.reverse,tests.seam.toys.everything,tests.seam.toys.mru,tests.seam.toys.refuse"


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    """The locked files of the installed vLLM, copied so that they can be tampered with."""
    root = upstream_lock.vllm_root()
    assert root is not None
    for name in sorted(set(FILES.values())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))


def test_lock_agrees_with_the_installed_vllm() -> None:
    assert upstream_lock.verify() == []
    assert upstream_lock.read_lock() == upstream_lock.make_lock()


def test_each_seam_names_targets_that_exist() -> None:
    locked = upstream_lock.read_lock()["targets"]
    for seam in SEAMS.values():
        assert seam.targets
        assert set(seam.targets) <= set(locked)


def test_untouched_copy_and_changed_comments_are_no_drift(source_copy: Path) -> None:
    assert upstream_lock.verify(root=source_copy) == []
    path = source_copy / file_of("RequestQueue")
    edit(
        path,
        '"""Add a request to the queue according to the policy."""',
        '"""Says it otherwise."""  # and so',
    )
    assert upstream_lock.verify(root=source_copy) == []


@pytest.mark.parametrize(
    ("target", "old", "new", "message"),
    [
        (
            "BlockPool.touch",
            "block.ref_cnt += 1\n            if self",
            "block.ref_cnt += 2\n            if self",
            "body changed",
        ),
        ("BlockPool.touch", "def touch(self, blocks", "def touch(self, blocks_", "signature changed"),
        ("BlockPool.touch", "def touch(", "def touched(", "is no longer in v1/core/block_pool.py"),
        (
            "AsyncScheduler",
            "class AsyncScheduler(Scheduler)",
            "class AsyncScheduler(Other)",
            "signature changed",
        ),
        ("create_request_queue", "if policy == ", "if policy != ", "body changed"),
    ],
)
def test_changed_code_is_named(source_copy: Path, target: str, old: str, new: str, message: str) -> None:
    path = source_copy / file_of(target)
    edit(path, old, new)
    drifts = upstream_lock.verify(root=source_copy)
    assert [drift.target for drift in drifts] == [target]
    assert message in str(drifts[0])


def test_missing_file_and_missing_lock_entry_are_named(source_copy: Path) -> None:
    (source_copy / file_of("AsyncScheduler")).unlink()
    assert [d.target for d in upstream_lock.verify(root=source_copy)] == ["AsyncScheduler"]
    lock = upstream_lock.read_lock()
    del lock["targets"]["BlockPool.touch"]
    assert (
        str(upstream_lock.verify(["BlockPool.touch"], lock)[0]) == "BlockPool.touch: is not in upstream.lock"
    )


def test_another_version_is_drift() -> None:
    lock = copy.deepcopy(upstream_lock.read_lock())
    lock["vllm"] = "0.31.0"
    drift = upstream_lock.verify((), lock)
    assert [str(d) for d in drift] == ["vllm: version 0.32.0 is installed, the seams are written for 0.31.0"]


@pytest.mark.parametrize("content", [None, "", "{}", '{"schema": 9, "vllm": "1", "targets": {}}', "[1]"])
def test_lock_that_cannot_be_read_says_so(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "upstream.lock"
    if content is not None:
        path.write_text(content)
    with pytest.raises(upstream_lock.LockFileError, match="--write-lock"):
        upstream_lock.read_lock(path)


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lock = copy.deepcopy(upstream_lock.read_lock())
    lock["targets"]["Scheduler.schedule"]["ast_sha256"] = "0" * 64
    upstream_lock.check.cache_clear()
    monkeypatch.setattr(upstream_lock, "read_lock", lambda: lock)
    yield
    upstream_lock.check.cache_clear()


@pytest.mark.usefixtures("tampered")
def test_install_refuses_when_a_target_drifted() -> None:
    before = snapshot()
    with pytest.raises(upstream_lock.DriftError, match=r"Scheduler\.schedule: its body changed"):
        adapter.install(resolve("tests.seam.toys.reverse"))
    assert adapter.active() is None
    assert same(before, snapshot())
    # A plan that does not rely on it may still be installed.
    adapter.install(resolve("tests.seam.toys.mru")).undo()


# undo

_TOUCHED = (
    ("vllm.v1.core.sched.scheduler", "Scheduler"),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    ("vllm.v1.core.sched.scheduler", ""),
    ("vllm.v1.core.sched.request_queue", ""),
    ("vllm.v1.core.block_pool", "BlockPool"),
    ("vllm.v1.core.block_pool", ""),
    ("vllm.v1.engine.async_llm", "AsyncLLM"),
)


def snapshot() -> list[list[tuple[str, Any]]]:
    out = []
    for module_name, name in _TOUCHED:
        module = importlib.import_module(module_name)
        out.append(list(vars(getattr(module, name) if name else module).items()))
    return out


def same(before: list[list[tuple[str, Any]]], after: list[list[tuple[str, Any]]]) -> bool:
    return all(
        [name for name, _ in a] == [name for name, _ in b]
        and all(x is y for (_, x), (_, y) in zip(a, b, strict=True))
        for a, b in zip(before, after, strict=True)
    )


def test_undo_restores_every_entry_and_its_place() -> None:
    before = snapshot()
    for _ in range(2):
        installation = adapter.install(resolve(TOYS))
        assert not same(before, snapshot())
        installation.undo()
        assert same(before, snapshot())


def test_empty_plan_changes_nothing() -> None:
    before = snapshot()
    installation = adapter.install(resolve(""))
    assert same(before, snapshot())
    installation.undo()


def test_second_install_and_second_undo_are_refused() -> None:
    installation = adapter.install(resolve("tests.seam.toys.reverse"))
    with pytest.raises(adapter.InstallError, match="'reverse' is installed already"):
        adapter.install(resolve(""))
    installation.undo()
    with pytest.raises(adapter.InstallError, match="not installed"):
        installation.undo()


def test_api_admission_runs_after_upstreams_own_limits() -> None:
    llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    frontend = object.__new__(llm)
    limits = type("Limits", (), {"max_num_queued_reqs": None, "max_num_queued_tokens": None})
    frontend.__dict__["scheduler_config"] = limits
    installation = adapter.install(resolve("tests.seam.toys.refuse"))
    try:
        frontend.check_admission(1, "fine")
        with pytest.raises(PermissionError):
            frontend.check_admission(1, "refused-1")
        assert installation.tallies["refuse"].by_hook == {"api_admission": 1}
    finally:
        installation.undo()
    frontend.check_admission(1, "refused-1")

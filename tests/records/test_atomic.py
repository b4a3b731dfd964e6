"""Output paths: replaced whole, written into where they are streams, refused in one line where they are neither."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from harness.atomic import check_writable, write_json, write_text
from harness.errors import RunFailed, UserError

ROOT = Path(harness.__file__).parent.parent


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        text=True,
        cwd=ROOT,
        check=True,
        **options,  # type: ignore[call-overload]
    )


def test_a_file_is_made_with_its_folders_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a/b/c.txt"
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    write_text(path, "one")
    path.chmod(0o640)
    check_writable(path)
    write_text(path, "two")
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    path = tmp_path / "x"
    run(f"import os; os.umask(0o027); from harness.atomic import *; write_text(Path({str(path)!r}), '')")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_one(tmp_path: Path) -> None:
    for name, there in (("old", True), ("new", False)):
        target = tmp_path / f"{name}.txt"
        if there:
            target.write_text("before")
        link = tmp_path / name
        link.symlink_to(target.name)
        check_writable(link)
        write_text(link, "after")
        assert link.is_symlink()
        assert target.read_text() == "after"


def test_a_device_is_written_into_and_not_replaced() -> None:
    before = os.stat("/dev/null")
    check_writable(Path("/dev/null"))
    write_json(Path("/dev/null"), {})
    assert os.stat("/dev/null").st_ino == before.st_ino
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_fifo_is_written_into(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    check_writable(path)  # must not wait for a reader
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    write_text(path, "through")
    reader.join(10)
    assert got == ["through"]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("into", ["pipe", "file"])
def test_standard_output_is_added_to(tmp_path: Path, into: str) -> None:
    """A file that the shell redirects into is not replaced: what was printed before and after stays."""
    code = """
        from pathlib import Path
        from harness.atomic import check_writable, write_text
        print("before")
        check_writable(Path("/dev/stdout"))
        write_text(Path("/dev/stdout"), "between\\n")
        print("after")
    """
    if into == "pipe":
        said = run(code, stdout=subprocess.PIPE).stdout
    else:
        with (tmp_path / "out").open("w") as file:
            run(code, stdout=file)
        said = (tmp_path / "out").read_text()
    assert said == "before\nbetween\nafter\n"


@pytest.mark.parametrize("act", [check_writable, lambda path: write_text(path, "x")])
def test_paths_that_cannot_be_written_to(tmp_path: Path, act: object) -> None:
    assert callable(act)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for path, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "file/x.json", "not a directory"),
        (tmp_path / "file/deeper/x.json", "not a directory"),
        (Path("/proc/no/x.json"), "no such file"),
        (tmp_path / ("x" * 300), "too long"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "socket", "neither a file nor a stream"),
    ):
        with pytest.raises(UserError, match=why) as raised:
            act(path)
        assert str(path) in str(raised.value)
        assert ".bench-" not in str(raised.value)
        assert "\n" not in str(raised.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop", "socket"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_missing_permission_is_said(open_folder: Path) -> None:
    """In a process without root's rights, which would be let in everywhere."""
    closed, kept = open_folder / "closed", open_folder / "kept.json"
    closed.mkdir(mode=0o555)
    kept.write_text("keep")
    kept.chmod(0o444)
    code = f"""
        import os
        from pathlib import Path
        from harness.atomic import check_writable, write_text
        from harness.errors import UserError
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        for act in (check_writable, lambda path: write_text(path, "x")):
            for path in ({str(closed / "x.json")!r}, {str(kept)!r}):
                try:
                    act(Path(path))
                except UserError as error:
                    print(error)
                else:
                    print("let in")
    """
    said = run(code, stdout=subprocess.PIPE).stdout.splitlines()
    why = ": permission denied; name a file that can be written"
    assert said == [f"cannot write {path}{why}" for path in (closed / "x.json", kept)] * 2
    assert kept.read_text() == "keep"


def test_a_full_disk_is_a_failed_run_and_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on file size makes the real write fail half-way, as a full disk does; /dev/full says ENOSPC."""
    path = tmp_path / "x.json"
    path.write_text("old")
    code = f"""
        import resource, signal
        from pathlib import Path
        from harness.atomic import write_text
        from harness.errors import RunFailed
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_text(Path({str(path)!r}), "x" * 5000)
        except RunFailed as error:
            print(error)
    """
    said = run(code, stdout=subprocess.PIPE).stdout
    assert said.startswith(f"could not write {path}: file too large")
    assert len(said.splitlines()) == 1
    assert ".bench-" not in said
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(RunFailed, match="/dev/full: no space left"):
        write_text(Path("/dev/full"), "x")

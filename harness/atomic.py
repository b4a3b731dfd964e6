"""The one place that writes a command's output files: whole or not at all, and what cannot be written is said.

A regular file is written under a hidden name beside it and renamed into place. What is no regular file (a
terminal, a pipe, `/dev/null`) cannot be replaced so, and is written straight into.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Any

from harness.errors import RunFailed, UserError

# The path is fine, the disk is not: nothing that the user could have typed otherwise.
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_OWN_STREAMS = (1, 2)


def json_text(value: Any) -> str:
    """Canonical JSON: sorted keys, one trailing newline; ValueError for NaN."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a value's canonical JSON."""
    write_text(path, json_text(value))


def write_text(path: Path, text: str) -> None:
    """Write a file in one move, its folders too; links are followed, an existing file's mode is kept.

    Raises:
        UserError: the path cannot be written to, or is a directory.
        RunFailed: the disk is full; what was there is untouched.
    """
    blob = text.encode()
    try:
        mode = _mode(path)
        regular = mode is None or stat.S_ISREG(mode)
        if mode is not None and not regular:
            _refuse_odd(path, mode)
        stream = _own_stream(path)
        if stream is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            _write_all(stream, blob)
        elif regular:
            _replace(Path(os.path.realpath(path)), blob, mode)
        else:
            _write_into(path, blob)
    except BrokenPipeError:
        raise  # its reader is gone, which is no fault of the path
    except OSError as error:
        raise _spoken(path, error) from None


def check_writable(*paths: Path | None) -> None:
    """Refuse output paths that cannot be written to, before the work whose result goes there.

    Leaves nothing behind. What a path's folder allows is tried in the nearest folder that exists.

    Raises:
        UserError: naming the path and why.
    """
    for path in paths:
        if path is not None:
            try:
                _check(path)
            except OSError as error:
                raise _spoken(path, error) from None


def _check(path: Path) -> None:
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        _refuse_odd(path, mode)
    if _own_stream(path) is not None:
        return
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if mode is None or stat.S_ISREG(mode):
        folder = Path(os.path.realpath(path)).parent
        while _mode(folder) is None:
            folder = folder.parent
        handle, hidden = _hidden(folder, 0o600)
        os.close(handle)
        hidden.unlink()


def _mode(path: Path) -> int | None:
    """Type and permissions of what is there, links followed; None where nothing is."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _refuse_odd(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise UserError(f"cannot write {path}: it is a folder; name a file in it")
    if not (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)):
        raise UserError(f"cannot write {path}: it is neither a file nor a stream; name a file")


def _own_stream(path: Path) -> int | None:
    """Our standard output or error, if that is what the path leads to.

    A file that the shell redirects us into must not be replaced: what is printed would be lost.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    for handle in _OWN_STREAMS:
        try:
            own = os.fstat(handle)
        except OSError:
            continue  # closed by whoever started us
        if (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino):
            return handle
    return None


def _replace(target: Path, blob: bytes, mode: int | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if mode is not None and not os.access(target, os.W_OK):
        # a rename needs the folder's permission only; a file that is write-protected stays as it is
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    handle, hidden = _hidden(target.parent, 0o666)
    try:
        try:
            if mode is not None:
                os.fchmod(handle, stat.S_IMODE(mode))
            _write_all(handle, blob)
            os.fsync(handle)
        finally:
            os.close(handle)
        hidden.replace(target)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def _hidden(folder: Path, mode: int) -> tuple[int, Path]:
    hidden = folder / f".bench-{secrets.token_hex(8)}.tmp"
    return os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), hidden


def _write_into(path: Path, blob: bytes) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        _write_all(handle, blob)
    finally:
        os.close(handle)


def _write_all(handle: int, blob: bytes) -> None:
    rest = memoryview(blob)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _spoken(path: Path, error: OSError) -> UserError | RunFailed:
    """The error as one line, without the hidden name that it may have been met at."""
    why = (os.strerror(error.errno) if error.errno else str(error)).lower()
    if error.errno in _DISK_ERRORS:
        return RunFailed(f"could not write {path}: {why}; free some space and run the same command again")
    return UserError(f"cannot write {path}: {why}; name a file that can be written")

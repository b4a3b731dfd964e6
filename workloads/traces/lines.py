"""A text file by its lines: plain or gzip, with or without a byte order mark, whatever ends its lines.

Nothing is held but the line at hand, so the size of a file (or of what a small gzip file unpacks to) is no
matter; a line has a limit.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import UserError

# A million tokens of prompt in blocks of 16, with ids of ten digits, take 0.7 MB.
MAX_LINE_CHARS = 8 << 20
_GZIP = b"\x1f\x8b"
_FOREIGN = {
    b"PK\x03\x04": "a zip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"PAR1": "a Parquet file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
_LFS = b"version https://git-lfs"


@contextmanager
def open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """The file as text, unpacked where it begins as gzip does; all line ends read as a newline.

    Raises:
        UserError: if it cannot be read, is of a kind that is not, or ends early.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: not a file; a trace is read more than once, so name a file on the disk")
        with path.open("rb") as raw:
            head = raw.read(len(_LFS))
            raw.seek(0)
            _refuse_foreign(path, head)
            stream = gzip.GzipFile(fileobj=raw) if head.startswith(_GZIP) else raw
            with io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig") as text:
                yield text
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; name a trace (docs/TRACES.md lists the formats)") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip ({error}); is the download complete?") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error.reason}); name a trace as text") from None


def _refuse_foreign(path: Path, head: bytes) -> None:
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise UserError(
                f"{path}: not a text file but {what}; unpack it first (only .gz is read as it is)"
            )
    if head == _LFS:
        raise UserError(
            f"{path}: a Git LFS pointer, not the trace itself; fetch the file (git lfs pull) and try again"
        )


def numbered(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of all lines, blank ones included.

    Raises:
        UserError: for a line longer than `MAX_LINE_CHARS`.
    """
    number = 0
    while line := text.readline(MAX_LINE_CHARS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARS:
            raise UserError(
                f"{path}: line {number}: longer than {MAX_LINE_CHARS >> 20} MiB, which no row of a trace is; "
                "is this the right file?"
            )
        yield number, line


def file_sha256(path: Path) -> str:
    """The sha256 of the file as it lies on the disk, in hex.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        with path.open("rb") as raw:
            return hashlib.file_digest(raw, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot read the trace ({error.strerror}); name a file") from None

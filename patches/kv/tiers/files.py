"""The disk tier's files: one a block, whole or not there, told from anything else by a checksum.

    FOLDER/.lock                                   held while an engine uses the folder
    FOLDER/<model>/<tenant>/<xx>/<block hash>.kv   header, then the block's bytes
    ... .<block hash>.tmp                          being written

`model` and `tenant` are digests in hex and so is the block hash: no name comes from outside.
A file is written beside its place and renamed into it, so a killed process leaves either a whole file or a
temporary one, which the next start removes. What lies on the disk is not believed: length, key and
checksum are compared on each read. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

TENANT_BYTES = 16
MODEL_BYTES = 16
_CHECK_BYTES = 16
_MAGIC = b"VPBKV001"
_HEADER = struct.Struct(f">8sQ{MODEL_BYTES}s80s{_CHECK_BYTES}s")
HEADER_BYTES = _HEADER.size
_KEY_BYTES_MAX = 79
_HEX = re.compile(r"[0-9a-f]+\Z")
_READY, _TEMPORARY = ".kv", ".tmp"


class TierFolderError(RuntimeError):
    """The folder cannot be used; says why and what to do."""


class BadBlock(RuntimeError):
    """A file is missing, cut short, of something else, or its bytes are not what was written."""


@lru_cache(maxsize=1024)
def tenant_digest(tenant: str) -> bytes:
    """What stands for a tenant in keys and paths, 16 bytes; no two tenants share one."""
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_BYTES, person=b"kv tier tenant").digest()


@dataclass(frozen=True, slots=True)
class Found:
    """A whole file that an earlier engine left: its key and when it was last written or read, ns."""

    key: bytes
    used_ns: int


class TierFolder:
    """One model's blocks in a folder that no other engine uses meanwhile.

    Args:
        root: absolute path; made if it is missing, for its owner alone.
        model: digest of all that makes blocks of equal hash equal (model, dtype, layout).
        payload_bytes: bytes of a block.

    Raises:
        TierFolderError: it is no folder of ours, or another engine has it.
    """

    def __init__(self, root: Path, model: bytes, payload_bytes: int) -> None:
        assert len(model) == MODEL_BYTES
        self._model = model
        self._payload_bytes = payload_bytes
        self._root = root
        self._own = root / model.hex()
        self._lock = _take(root)
        _make_private(self._own)

    @property
    def file_bytes(self) -> int:
        """Bytes of a file."""
        return HEADER_BYTES + self._payload_bytes

    def close(self) -> None:
        """Let another engine have it."""
        os.close(self._lock)

    def path(self, key: bytes) -> Path:
        """Where the block of this key lies."""
        tenant, block = key[:TENANT_BYTES].hex(), key[TENANT_BYTES:].hex()
        assert block and len(key) <= _KEY_BYTES_MAX
        return self._own / tenant / block[-2:] / f"{block}{_READY}"

    def write(self, key: bytes, payload: memoryview) -> None:
        """Put a block down; OSError if the disk will not have it, and then nothing is left of it."""
        target = self.path(key)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.stem}{_TEMPORARY}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(temporary, flags, 0o600)
            try:
                _write_all(descriptor, memoryview(self._header(key, payload)))
                _write_all(descriptor, payload)
            finally:
                os.close(descriptor)
            os.replace(temporary, target)
        except OSError:
            _unlink(temporary)
            raise

    def read(self, key: bytes, into: memoryview) -> None:
        """Fill `into` with the block of this key; BadBlock, with what lay there removed, if it is not whole."""
        path = self.path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise BadBlock(f"{path.name}: {os.strerror(error.errno or 0)}") from None
        try:
            self._read_checked(descriptor, key, into)
            # The next start takes this for when it was used last.
            os.utime(descriptor)
        except (BadBlock, OSError) as error:
            _unlink(path)
            raise BadBlock(f"{path.name}: {error}") from None
        finally:
            os.close(descriptor)

    def drop(self, key: bytes) -> None:
        """Remove it, if it is there."""
        _unlink(self.path(key))

    def sweep(self) -> list[Found]:
        """What an earlier engine left: whole files, used longest ago first; all else is removed.

        Files of another model are removed as well: they count against the same disk.
        """
        found: list[Found] = []
        for path in self._files():
            key = self._key_of(path)
            if key is None or not self._whole(path):
                _unlink(path)
            else:
                found.append(Found(key, path.stat().st_mtime_ns))
        return sorted(found, key=lambda f: (f.used_ns, f.key))

    def _files(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self._root, followlinks=False):
            # Only what could be ours: a stranger's folder is left alone.
            folders[:] = sorted(name for name in folders if _HEX.match(name))
            if Path(folder) != self._root:
                yield from (Path(folder) / name for name in sorted(files) if _ours(name))

    def _key_of(self, path: Path) -> bytes | None:
        parts = path.relative_to(self._root).parts
        if len(parts) != 4 or parts[0] != self._own.name or path.suffix != _READY:
            return None
        try:
            key = bytes.fromhex(parts[1]) + bytes.fromhex(path.stem)
        except ValueError:
            return None
        return key if len(key) <= _KEY_BYTES_MAX and self.path(key) == path else None

    def _whole(self, path: Path) -> bool:
        facts = path.lstat()
        return stat.S_ISREG(facts.st_mode) and facts.st_size == self.file_bytes

    def _header(self, key: bytes, payload: memoryview) -> bytes:
        check = self._check(key, payload)
        return _HEADER.pack(_MAGIC, self._payload_bytes, self._model, _padded(key), check)

    def _check(self, key: bytes, payload: memoryview) -> bytes:
        digest = hashlib.blake2b(self._model + _padded(key), digest_size=_CHECK_BYTES)
        digest.update(payload)
        return digest.digest()

    def _read_checked(self, descriptor: int, key: bytes, into: memoryview) -> None:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != self.file_bytes:
            raise BadBlock(f"{facts.st_size} bytes, not {self.file_bytes}")
        header = os.read(descriptor, HEADER_BYTES)
        if len(header) != HEADER_BYTES:
            raise BadBlock("no whole header")
        magic, length, model, name, check = _HEADER.unpack(header)
        if (magic, length, model, name) != (_MAGIC, self._payload_bytes, self._model, _padded(key)):
            raise BadBlock("its header names another block")
        done = 0
        while done < self._payload_bytes:
            count = os.readv(descriptor, [into[done : self._payload_bytes]])
            if not count:
                raise BadBlock("it ends early")
            done += count
        if self._check(key, into[: self._payload_bytes]) != check:
            raise BadBlock("its bytes are not those that were written")


def _padded(key: bytes) -> bytes:
    return bytes([len(key)]) + key.ljust(_KEY_BYTES_MAX, b"\0")


def _ours(name: str) -> bool:
    stem, suffix = os.path.splitext(name)
    return suffix in (_READY, _TEMPORARY) and bool(_HEX.match(stem.removeprefix(".")))


def _unlink(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        # Gone, or not to be removed: what is read is checked anyway.
        return


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        count = os.write(descriptor, data)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[count:]


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise TierFolderError(
            f"{folder}: {error.strerror}; set tiering.disk_folder to one that can be written"
        ) from None
    if not stat.S_ISDIR(facts.st_mode):
        raise TierFolderError(f"{folder}: not a folder; set tiering.disk_folder to another path")
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o022:
        raise TierFolderError(
            f"{folder}: others may write to it, so what it holds cannot be trusted; chown it, chmod 700, or set "
            "tiering.disk_folder to another path"
        )


def _take(root: Path) -> int:
    """The folder's lock, held until it is closed."""
    if not root.is_absolute():
        raise TierFolderError(f"tiering.disk_folder is {str(root)!r}; give an absolute path")
    _make_private(root)
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise TierFolderError(
            f"{root}: another engine uses it; set tiering.disk_folder to a folder of this engine's own"
        ) from None
    return descriptor

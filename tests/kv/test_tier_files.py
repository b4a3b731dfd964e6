"""Guards the disk tier's files: whole or not there, told from damaged ones, apart by tenant, bounded, and safe to share.

Real files, a real child that is killed while it writes, and a real limit for a disk that is full. Not here:
losing power, after which the checksum must tell.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patches.kv.tiers.cache import BlockCache
from patches.kv.tiers.disk import DiskTier
from patches.kv.tiers.disk_io import Done, ThreadedDisk
from patches.kv.tiers.files import (
    HEADER_BYTES,
    BadBlock,
    TierFolder,
    TierFolderError,
    tenant_digest,
)
from patches.kv.tiers.rates import Link

MODEL = b"m" * 16
BLOCK = 4096


def key(number: int, tenant: str = "a") -> bytes:
    """A key as the tiers have them."""
    return tenant_digest(tenant) + hashlib.sha256(f"{number}".encode()).digest()


def block(number: int) -> bytearray:
    """Bytes that tell blocks apart."""
    return bytearray(number.to_bytes(4, "big") * (BLOCK // 4))


@contextmanager
def folder(root: Path, model: bytes = MODEL) -> Iterator[TierFolder]:
    made = TierFolder(root, model, BLOCK)
    try:
        yield made
    finally:
        made.close()


def read(tier: TierFolder, name: bytes) -> bytearray:
    into = bytearray(BLOCK)
    tier.read(name, memoryview(into))
    return into


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with folder(tmp_path / "t") as tier:
        tier.write(key(1), memoryview(block(1)))
        tier.write(key(2), memoryview(block(2)))
        assert read(tier, key(1)) == block(1)
        assert tier.path(key(1)).stat().st_size == tier.file_bytes == HEADER_BYTES + BLOCK
        tier.drop(key(1))
        with pytest.raises(BadBlock):
            read(tier, key(1))
    with folder(tmp_path / "t") as tier:
        assert [found.key for found in tier.sweep()] == [key(2)]
        assert read(tier, key(2)) == block(2)


@pytest.mark.parametrize("where", [0, 9, 20, 40, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + BLOCK - 1])
def test_one_changed_bit_anywhere_is_found_and_the_file_goes(tmp_path: Path, where: int) -> None:
    with folder(tmp_path / "t") as tier:
        tier.write(key(1), memoryview(block(1)))
        data = bytearray(tier.path(key(1)).read_bytes())
        data[where] ^= 4
        tier.path(key(1)).write_bytes(data)
        with pytest.raises(BadBlock):
            read(tier, key(1))
        assert not tier.path(key(1)).exists()


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + BLOCK - 1, HEADER_BYTES + BLOCK + 1])
def test_a_file_of_another_length_is_found(tmp_path: Path, size: int) -> None:
    with folder(tmp_path / "t") as tier:
        tier.write(key(1), memoryview(block(1)))
        os.truncate(tier.path(key(1)), size)
        with pytest.raises(BadBlock):
            read(tier, key(1))
    with folder(tmp_path / "t") as tier:
        tier.write(key(2), memoryview(block(2)))
        os.truncate(tier.path(key(2)), size)
        assert tier.sweep() == []
        assert not tier.path(key(2)).exists()


def test_a_block_in_anothers_place_is_found(tmp_path: Path) -> None:
    """Of the same tenant or of another: the key is part of what is checked."""
    with folder(tmp_path / "t") as tier:
        tier.write(key(1), memoryview(block(1)))
        for other in (key(2), key(1, "b")):
            tier.path(other).parent.mkdir(parents=True, exist_ok=True)
            tier.path(other).write_bytes(tier.path(key(1)).read_bytes())
            with pytest.raises(BadBlock):
                read(tier, other)
        assert read(tier, key(1)) == block(1)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    with folder(tmp_path / "t") as tier:
        tier.write(key(1), memoryview(block(1)))
        tier.path(key(2)).parent.mkdir(parents=True, exist_ok=True)
        tier.path(key(2)).symlink_to(tier.path(key(1)))
        with pytest.raises(BadBlock):
            read(tier, key(2))


@pytest.mark.parametrize("tenant", ["..", "../../etc", "a/b", "", "\0", "x" * 5000, "ü"])
def test_no_name_from_outside_reaches_a_path(tmp_path: Path, tenant: str) -> None:
    with folder(tmp_path / "t") as tier:
        path = tier.path(key(1, tenant))
        assert path.resolve().is_relative_to((tmp_path / "t").resolve())
        assert all(set(part) <= set("0123456789abcdef.kv") for part in path.relative_to(tmp_path / "t").parts)
        tier.write(key(1, tenant), memoryview(block(1)))
        assert read(tier, key(1, tenant)) == block(1)


def test_another_models_blocks_are_not_taken_and_strangers_files_stay(tmp_path: Path) -> None:
    with folder(tmp_path / "t") as tier:
        tier.write(key(1), memoryview(block(1)))
    stranger = tmp_path / "t" / "notes.txt"
    stranger.write_text("mine")
    deep = tmp_path / "t" / "photos"
    deep.mkdir()
    (deep / "ab.kv").write_text("mine too")
    with folder(tmp_path / "t", b"n" * 16) as tier:
        assert tier.sweep() == []
    assert stranger.read_text() == "mine"
    assert (deep / "ab.kv").exists()
    assert len(list((tmp_path / "t").rglob("*.kv"))) == 1


def test_a_folder_is_one_engines_own(tmp_path: Path) -> None:
    with folder(tmp_path / "t"), pytest.raises(TierFolderError, match="another engine uses it"):
        TierFolder(tmp_path / "t", MODEL, BLOCK)
    with folder(tmp_path / "t"):
        assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "t"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(TierFolderError, match="others may write"):
        TierFolder(shared, MODEL, BLOCK)
    with pytest.raises(TierFolderError, match="absolute"):
        TierFolder(Path("here"), MODEL, BLOCK)
    (tmp_path / "file").write_text("")
    with pytest.raises(TierFolderError):
        TierFolder(tmp_path / "file", MODEL, BLOCK)


_CHILD = """
import sys
from pathlib import Path
from tests.kv.test_tier_files import MODEL, block, key
from patches.kv.tiers.files import TierFolder
tier = TierFolder(Path(sys.argv[1]), MODEL, 4096)
print("ready", flush=True)
number = 0
while True:
    tier.write(key(number % 500), memoryview(block(number % 500)))
    number += 1
"""


def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path) -> None:
    root = tmp_path / "t"
    for delay_s in (0.02, 0.11):
        child = subprocess.Popen([sys.executable, "-c", _CHILD, str(root)], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(delay_s)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        # What a write that was cut off leaves, whether or not the signal hit one.
        with folder(root) as tier:
            cut = tier.path(key(900))
            cut.parent.mkdir(parents=True, exist_ok=True)
            cut.with_name(f".{cut.stem}.tmp").write_bytes(b"half")
        with folder(root) as tier:
            found = tier.sweep()
            assert found
            numbers = {key(number): number for number in range(500)}
            for one in found:
                assert read(tier, one.key) == block(numbers[one.key])
        assert not list(root.rglob("*.tmp"))
        assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".kv", ""}


@contextmanager
def full_disk(largest_file: int) -> Iterator[None]:
    """No file may grow beyond this: the system refuses the rest of a write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_refuses_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    with folder(tmp_path / "t") as tier, full_disk(BLOCK // 2):
        with pytest.raises(OSError, match="too large"):
            tier.write(key(1), memoryview(block(1)))
        assert not [path for path in (tmp_path / "t").rglob("*") if path.suffix in (".kv", ".tmp")]


def until_idle(disk: DiskTier, now: float) -> None:
    """Wait for the threads."""
    deadline = time.monotonic() + 20
    while disk._jobs:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        disk.collect(now)


def test_the_tier_degrades_when_the_disk_is_full_and_comes_back(tmp_path: Path) -> None:
    rows = memoryview(bytearray(8 * BLOCK)).cast("B", (8, BLOCK))
    host = BlockCache(8)
    for number in range(8):
        entry = host.add(key(number), True)
        assert entry is not None
        rows.cast("B")[entry.slot * BLOCK : (entry.slot + 1) * BLOCK] = block(number)
    host.written([key(number) for number in range(8)])
    tier = TierFolder(tmp_path / "t", MODEL, BLOCK)
    disk = DiskTier(3, BLOCK, ThreadedDisk(tier, rows), host, Link(1e9), retry_s=30.0)
    with full_disk(BLOCK // 2):
        disk.demote(64, now=0.0)
        until_idle(disk, 0.0)
    assert disk.counts.refused_blocks == 3 and len(disk.cache) == 0
    disk.demote(64, now=29.0)
    assert not disk._jobs, "it is let alone for a while"
    disk.demote(64, now=31.0)
    until_idle(disk, 31.0)
    assert disk.counts.to_disk_bytes == 3 * BLOCK
    assert len(list((tmp_path / "t").rglob("*.kv"))) == 3, "its size is kept"
    # Up again, into another slot.
    gone = next(number for number in range(8) if disk.has(key(number)))
    host.remove(key(gone))
    assert disk.fetch([key(gone)], True, must=True) == 1
    until_idle(disk, 31.0)
    back = host.get(key(gone))
    assert back is not None and back.ready
    assert rows.cast("B")[back.slot * BLOCK : (back.slot + 1) * BLOCK] == block(gone)
    disk.close()


def test_whatever_happens_to_a_job_it_ends(tmp_path: Path) -> None:
    """A thread that dies without a word would leave requests waiting."""
    rows = memoryview(bytearray(2 * BLOCK)).cast("B", (2, BLOCK))
    tier = TierFolder(tmp_path / "t", MODEL, BLOCK)
    io = ThreadedDisk(tier, rows)
    io.read(5, [(key(1), 99)])
    io.write(6, [(b"", 0)])
    done: list[Done] = []
    deadline = time.monotonic() + 20
    while len(done) < 2 and time.monotonic() < deadline:
        done += io.finished()
    assert {one.job for one in done} == {5, 6}
    assert all(not one.moved for one in done)
    io.close()

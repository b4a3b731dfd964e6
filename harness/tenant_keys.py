"""Makes keys of tenants and keeps their hashes in an identity file; a key itself is never written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.atomic import write_text
from harness.errors import UserError
from harness.toml_text import toml_text
from patches.front.tenants import Entry, check_entry, check_name, digest_of, new_key, read_entries
from workloads.request import Tenant

_HEAD = "# API keys of tenants, each as its SHA-256. Written by bench; comments are not kept.\n\n"
_MODE = 0o600


def add_key(path: Path, name: str, changes: Mapping[str, Any]) -> str:
    """A new key of a tenant, who is added or changed; what is returned is the only copy.

    Args:
        changes: fields of `Entry` to set.

    Raises:
        UserError: the file or a value is wrong, or it cannot be written.
    """
    check_name(name)
    entries = _entries(path)
    key = new_key()
    before = entries.get(name, Entry())
    values = before.model_dump() | dict(changes) | {"keys": [*before.keys, digest_of(key)]}
    _write(path, entries | {name: check_entry(path, name, values)})
    return key


def revoke(path: Path, name: str) -> int:
    """Take all of a tenant's keys away; how many it had. A running server notices within a second or two.

    Raises:
        UserError: the file is wrong, or it has no such tenant.
    """
    entries = read_entries(path)
    if name not in entries:
        raise UserError(f"identity file {path}: it has no tenant {name!r}; it has {', '.join(entries)}")
    had = len(entries[name].keys)
    _write(path, entries | {name: entries[name].model_copy(update={"keys": []})})
    return had


def issue(tenants: Iterable[Tenant], path: Path) -> dict[str, str]:
    """Write an identity file for a workload's tenants, and return a new key of each, by name.

    For a run: the server is started with the file (`launch(..., identity=path)`), the client gets the keys
    (`make_target(..., keys=...)`).
    """
    keys = {tenant.name: new_key() for tenant in tenants}
    entries = {
        tenant.name: Entry(
            tier=tenant.tier,
            weight=float(tenant.weight),
            priority=tenant.priority,
            slo_ttft_ms=tenant.slo_ttft_ms,
            keys=[digest_of(keys[tenant.name])],
        )
        for tenant in tenants
    }
    for name in entries:
        check_name(name)
    _write(path, entries)
    return keys


def _entries(path: Path) -> dict[str, Entry]:
    return read_entries(path) if path.exists() else {}


def _write(path: Path, entries: Mapping[str, Entry]) -> None:
    tables = {name: entry.model_dump(exclude_none=True) for name, entry in entries.items()}
    made = not path.exists()
    try:
        if made:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE))
        else:
            path.chmod(_MODE)
        write_text(path, _HEAD + toml_text(tables).lstrip())
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write {path}: {why}; name a file that can be written") from None
    except BaseException:
        if made:
            path.unlink(missing_ok=True)
        raise

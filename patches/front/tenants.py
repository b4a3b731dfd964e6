"""The identity file: which API key belongs to which tenant, and what a tenant is entitled to.

    [gold-a]
    tier = "gold"
    weight = 4
    priority = -1
    slo_ttft_ms = 200.0
    keys = ["<SHA-256 of a key, 64 hexadecimal digits>"]

A key is 256 random bits, so that a fast hash is enough: a slow or salted one protects words that people
choose, which can be guessed one by one; here there is nothing to guess, and every request is checked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from harness.errors import UserError

_RANDOM_BYTES = 32
_INDEX_BYTES = 8
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """One tenant's table in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tier: str = Field(default="", max_length=64, description="name of its class of service, as gold")
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="its share under contention")
    priority: int = Field(
        default=0, ge=-(2**31), lt=2**31, description="vLLM's own: the smaller is served first"
    )
    slo_ttft_ms: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="target for the first token; none: no deadline"
    )
    keys: list[Digest] = Field(default=[], description="SHA-256 of each of its keys")


_ENTRIES = TypeAdapter(dict[str, Entry])


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request belongs to, and what it is therefore entitled to.

    `NOBODY` stands for a caller that is let in but is no tenant.
    """

    tenant: str
    tier: str
    weight: float
    priority: int
    slo_ttft_ms: float | None

    @property
    def xargs(self) -> dict[str, str | float]:
        """As the engine is told it (`vllm_xargs`)."""
        if not self.tenant:
            return {}
        told: dict[str, str | float] = {"tenant": self.tenant, "tier": self.tier, "weight": self.weight}
        return told if self.slo_ttft_ms is None else told | {"slo_ttft_ms": self.slo_ttft_ms}


NOBODY = Identity("", "", 1.0, 0, None)


class KeyRing:
    """Finds what belongs to a key, in a time that does not depend on how much of the key is right."""

    def __init__(self, owners: Iterable[tuple[str, Identity]]) -> None:
        """Take pairs of a key's SHA-256 (hexadecimal) and its owner."""
        self._found: dict[bytes, list[tuple[bytes, Identity]]] = {}
        for digest, owner in owners:
            raw = bytes.fromhex(digest)
            self._found.setdefault(raw[:_INDEX_BYTES], []).append((raw, owner))

    def find(self, key: str) -> Identity | None:
        """The key's owner; None for a key that nobody has.

        The table is indexed by a part of the hash, which a caller cannot steer; the whole is compared in constant time.
        """
        raw = hashlib.sha256(key.encode("utf-8", "replace")).digest()
        owner = None
        for digest, one in self._found.get(raw[:_INDEX_BYTES], ((b"", NOBODY),)):
            if hmac.compare_digest(digest, raw):
                owner = one
        return owner


def new_key() -> str:
    """A key that nobody can guess, of characters that a header carries."""
    return f"pb-{secrets.token_urlsafe(_RANDOM_BYTES)}"


def digest_of(key: str) -> str:
    """What the file keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_name(name: str) -> None:
    """UserError unless a tenant may be called so."""
    if not _NAME.fullmatch(name):
        raise UserError(f"tenant {name!r}: use 1 to 64 letters, digits, - and _")


def read_entries(path: Path) -> dict[str, Entry]:
    """The file's tenants by name.

    Raises:
        UserError: it cannot be read, others may write it, or what in it is wrong.
    """
    try:
        text = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"identity file {path}: {why}; `bench keys {path} TENANT` makes one") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(f"identity file {path}: others may write it; type chmod 600 {path}")
    try:
        values = tomllib.loads(text.decode())
    except ValueError as error:
        raise UserError(f"identity file {path}: it is no TOML: {error}") from None
    return _checked(path, values)


def key_ring(path: Path) -> KeyRing:
    """The file, ready to be asked; UserError as `read_entries`."""
    entries = read_entries(path)
    return KeyRing((digest, identity_of(n, one)) for n, one in entries.items() for digest in one.keys)


def identity_of(name: str, entry: Entry) -> Identity:
    """A tenant as its requests carry it."""
    return Identity(name, entry.tier, entry.weight, entry.priority, entry.slo_ttft_ms)


def check_entry(path: Path, name: str, values: Mapping[str, Any]) -> Entry:
    """One tenant's table, checked; UserError naming what is wrong with it."""
    return _checked(path, {name: dict(values)})[name]


def _checked(path: Path, values: Mapping[str, Any]) -> dict[str, Entry]:
    for name, table in values.items():
        if not isinstance(table, dict):
            raise UserError(
                f"identity file {path}: {name}: only tables of tenants, as [gold-a], may stand here"
            )
        if not _NAME.fullmatch(name):
            raise UserError(
                f"identity file {path}: tenant {name!r}: use 1 to 64 letters, digits, - and _ for its name"
            )
    try:
        entries = _ENTRIES.validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        name, *rest = (str(part) for part in first["loc"])
        # A key itself, put there in place of its hash, must not be repeated.
        hint = "give the SHA-256 of the key" if rest[:1] == ["keys"] else first["msg"].lower()
        raise UserError(f"identity file {path}: [{name}] {'.'.join(rest) or 'table'}: {hint}") from None
    if not entries:
        raise UserError(f"identity file {path}: it has no tenant; `bench keys {path} TENANT` adds one")
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        for digest in entry.keys:
            if owners.setdefault(digest, name) != name:
                raise UserError(
                    f"identity file {path}: [{owners[digest]}] and [{name}] share a key; take it from one"
                )
    return entries

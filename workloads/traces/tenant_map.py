"""Whose request a row is: a TOML file of tenants and rules, since public traces do not say.

`example_tenants.toml` beside this module explains every field.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from harness.errors import UserError
from workloads.request import Tenant
from workloads.traces.row import TraceRow

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_WHOLE = 1 << 64
LONE_TENANT = "trace"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    tier: str | None = None
    kind: str = "trace"
    weight: int = Field(default=1, ge=1)
    priority: int = 0
    slo_ttft_ms: FiniteFloat = Field(default=1000.0, gt=0)
    short: bool = True
    share: FiniteFloat | None = Field(default=None, gt=0, le=1)
    match: dict[str, str | int | list[str | int]] = Field(default_factory=dict)
    min_input_tokens: int | None = Field(default=None, ge=1)
    max_input_tokens: int | None = Field(default=None, ge=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tenant: list[_Table] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class TenantRule:
    """A tenant and what makes a row its own.

    Attributes:
        share: part of the sessions (of single requests where the trace has none) that its conditions admit.
        match: (column, values): the row's column must hold one of the values.
    """

    name: str = LONE_TENANT
    tier: str = LONE_TENANT
    kind: str = "trace"
    weight: int = 1
    priority: int = 0
    slo_ttft_ms: float = 1000.0
    short: bool = True
    share: float | None = None
    match: tuple[tuple[str, tuple[str, ...]], ...] = ()
    min_input_tokens: int | None = None
    max_input_tokens: int | None = None

    @property
    def takes_all(self) -> bool:
        """Whether no row passes it by."""
        return not self.match and (self.share, self.min_input_tokens, self.max_input_tokens) == (None,) * 3

    def tenant(self) -> Tenant:
        """The tenant without its rule. Its target is taken as written, whatever the profile."""
        return Tenant(
            self.name, self.tier, self.kind, self.weight, self.priority, self.slo_ttft_ms, self.short
        )


@dataclass(frozen=True, slots=True)
class TenantMap:
    """The rules, in the order in which they are tried."""

    rules: tuple[TenantRule, ...] = (TenantRule(),)
    file: str = ""

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants, in the file's order."""
        return tuple(rule.tenant() for rule in self.rules)

    @property
    def assumed(self) -> str:
        """What a reader of the figures must know."""
        if self.file:
            return f"tenants are those of {self.file}"
        only = self.rules[0]
        return (
            f"one tenant, {only.name!r} (weight {only.weight}, TTFT target {only.slo_ttft_ms:,.0f} ms), sends "
            "everything; --tenants MAP tells them apart"
        )

    def to_json(self) -> list[dict[str, Any]]:
        """As it stands in plan.json; what was left out has its default."""
        return [asdict(rule) | {"match": dict(rule.match)} for rule in self.rules]

    @staticmethod
    def from_json(raw: Sequence[Mapping[str, Any]], file: str) -> TenantMap:
        """The inverse of `to_json`."""
        rules = [
            TenantRule(
                **{**rule, "match": tuple((name, tuple(values)) for name, values in rule["match"].items())}
            )
            for rule in raw
        ]
        return TenantMap(tuple(rules), file)


def load_map(path: Path) -> TenantMap:
    """Read a map.

    Raises:
        UserError: naming file and field.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; workloads/traces/example_tenants.toml is a map to begin with"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not readable as TOML: {error}") from None
    try:
        tables = _File(**raw).tenant
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        known = (
            f"; a tenant has {', '.join(_Table.model_fields)}" if first["type"] == "extra_forbidden" else ""
        )
        raise UserError(
            f"{path}: {place}: {first['msg']}{known}; docs/TRACES.md explains the fields"
        ) from None
    rules = tuple(_rule(table, path) for table in tables)
    _check(rules, path)
    return TenantMap(rules, path.name)


def _rule(table: _Table, path: Path) -> TenantRule:
    if not _NAME.fullmatch(table.name) or not _NAME.fullmatch(table.tier or table.name):
        raise UserError(
            f"{path}: tenant {table.name!r}: names and tiers are letters, digits, '.', '_' and '-', at most 40"
        )
    low, high = table.min_input_tokens, table.max_input_tokens
    if low is not None and high is not None and low > high:
        raise UserError(
            f"{path}: tenant {table.name!r}: min_input_tokens {low} is above max_input_tokens {high}"
        )
    match = tuple(
        (column, tuple(str(value) for value in (values if isinstance(values, list) else [values])))
        for column, values in table.match.items()
    )
    for column, values in match:
        if not values:
            raise UserError(
                f"{path}: tenant {table.name!r}: match.{column} is empty; name at least one value"
            )
    return TenantRule(
        **table.model_dump(exclude={"match", "tier"}), tier=table.tier or table.name, match=match
    )


def _check(rules: tuple[TenantRule, ...], path: Path) -> None:
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: two tenants are called {name!r}; give one of them another name")
    for rule, after in pairwise(rules):
        if rule.takes_all:
            raise UserError(
                f"{path}: tenant {rule.name!r} has no rule and takes every row, so {after.name!r} after it would get "
                "none; move it to the end"
            )


class Draw:
    """Gives each row its tenant.

    Rules are tried in order: one without a share takes every row that its conditions admit; those with a share
    divide the rows that reach them, a session as a whole, by a hash of its name and the seed.

    Raises:
        UserError: if a rule matches a column that the trace has not.
    """

    def __init__(self, tenants: TenantMap, label_names: Sequence[str], seed: int, trace: Path) -> None:
        self._rules = tenants.rules
        self._file, self._seed, self._trace = tenants.file, seed, trace
        at = {name.lower(): i for i, name in enumerate(label_names)}
        for rule in tenants.rules:
            for column, _ in rule.match:
                if column.lower() not in at:
                    has = (
                        f"it has {', '.join(label_names)}"
                        if label_names
                        else "it has none but times and lengths"
                    )
                    raise UserError(
                        f"{tenants.file}: tenant {rule.name!r} matches on {column!r}, a column that {trace.name} does "
                        f"not have; {has}"
                    )
        self._matches = [[(at[name.lower()], values) for name, values in rule.match] for rule in self._rules]
        self._shares = [None if rule.share is None else Fraction(str(rule.share)) for rule in self._rules]
        self._draws = any(share is not None for share in self._shares)

    def tenant_of(self, row: TraceRow) -> str:
        """The name of the row's tenant.

        Raises:
            UserError: if no rule admits the row, or the shares that do exceed 1.
        """
        drawn = self._drawn(row) if self._draws else 0
        below = Fraction(0)
        for rule, match, share in zip(self._rules, self._matches, self._shares, strict=True):
            if not self._admits(rule, match, row):
                continue
            if share is None:
                return rule.name
            below += share
            if below > 1:
                raise UserError(
                    f"{self._file}: the shares of the tenants that may take line {row.line} of {self._trace.name} add "
                    f"up to {float(below):g}; they may not exceed 1"
                )
            if drawn < below * _WHOLE:
                return rule.name
        raise UserError(
            f"{self._trace}: line {row.line}: no tenant of {self._file} takes this row "
            f"({row.input_tokens} input tokens{''.join(', ' + label for label in row.labels)}); add a last tenant "
            "without share, match and bounds for the rest"
        )

    def _drawn(self, row: TraceRow) -> int:
        name = f"session:{row.session}" if row.session else f"row:{row.line}"
        return int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:8], "big")

    @staticmethod
    def _admits(rule: TenantRule, match: list[tuple[int, tuple[str, ...]]], row: TraceRow) -> bool:
        low, high = rule.min_input_tokens, rule.max_input_tokens
        return (
            (low is None or row.input_tokens >= low)
            and (high is None or row.input_tokens <= high)
            and all(row.labels[at] in values for at, values in match)
        )

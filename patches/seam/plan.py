"""Which patches, with which knobs, in which order: resolved and checked before anything is built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import UserError
from patches.catalogue import CATALOGUE
from patches.seam import registry
from patches.seam.knob_values import knob_overrides, make_knobs
from patches.seam.patch import Knobs, Patch, input_files
from patches.seam.seams import SEAMS

SCHEMA = 1
_CATALOGUE_ORDER = {entry.name: index for index, entry in enumerate(CATALOGUE)}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A patch and its knobs. `source` is what finds it again: its name or its import path.

    `files`: sha256 of the input files that knobs name, by knob, as they are now, or as `planned` has them.
    """

    patch: Patch
    knobs: Knobs
    source: str
    planned: InitVar[Mapping[str, str] | None] = None
    files: Mapping[str, str] = field(init=False, hash=False)

    def __post_init__(self, planned: Mapping[str, str] | None) -> None:
        object.__setattr__(self, "files", _digests(self.knobs) if planned is None else dict(planned))

    def to_json(self) -> dict[str, Any]:
        """As it stands in a plan; files only where there are some."""
        files = {"files": dict(self.files)} if self.files else {}
        return {"source": self.source, "knobs": self.knobs.model_dump(mode="json"), **files}

    def check_files(self) -> None:
        """UserError if a file is not there, is another one than when it was planned, or not what the knob takes."""
        now = _digests(self.knobs)
        for knob, digest in self.files.items():
            if now.get(knob) != digest:
                raise UserError(
                    f"{self.patch.name}.{knob}: {getattr(self.knobs, knob, '')} has changed since this was planned; "
                    "put it back, or start a new run"
                )
        if now:
            make_knobs(self.patch, self.knobs.model_dump())


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """A set of patches that may be installed together, in canonical order. Build it with `resolve`."""

    patches: tuple[Chosen, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "patches", tuple(sorted(self.patches, key=_canonical)))
        _check(tuple(chosen.patch for chosen in self.patches))
        _check_flags(self._brought())

    @property
    def names(self) -> tuple[str, ...]:
        """Names in canonical order: the catalogue's, then those from outside by name."""
        return tuple(chosen.patch.name for chosen in self.patches)

    @property
    def label(self) -> str:
        """Name of the arm: `qos+mlfq+slru`; `stock` without patches."""
        return "+".join(self.names) or "stock"

    @property
    def knobs(self) -> dict[str, dict[str, Any]]:
        """All knobs' values, defaults included, by patch; JSON-able."""
        return {chosen.patch.name: chosen.knobs.model_dump(mode="json") for chosen in self.patches}

    @property
    def replaces(self) -> frozenset[str]:
        """Engine flags whose place some patch takes."""
        return frozenset(flag for chosen in self.patches for flag in chosen.patch.replaces)

    @property
    def engine_flags(self) -> dict[str, Any]:
        """Engine flags that the patches bring along, as `Patch.engine_flags` has it."""
        return {flag: value for flags in self._brought().values() for flag, value in flags.items()}

    def brought_by(self, flag: str) -> str:
        """Name of the patch that brings this engine flag along; "" if none does."""
        return next((name for name, flags in self._brought().items() if flag in flags), "")

    def _brought(self) -> dict[str, Mapping[str, Any]]:
        return {
            chosen.patch.name: chosen.patch.engine_flags(chosen.knobs)
            for chosen in self.patches
            if chosen.patch.engine_flags is not None
        }

    def on_seam(self, seam: str) -> tuple[str, ...]:
        """Names of the patches on one seam, in the order in which they apply."""
        users = [chosen.patch for chosen in self.patches if seam in chosen.patch.seams]
        if SEAMS[seam].ranked:
            users.sort(key=lambda patch: patch.ranks[seam])
        return tuple(patch.name for patch in users)

    def order(self) -> dict[str, tuple[str, ...]]:
        """Per seam in use, the patches in the order in which they apply."""
        order = {seam: self.on_seam(seam) for seam in SEAMS}
        return {seam: names for seam, names in order.items() if names}

    def targets(self) -> tuple[str, ...]:
        """The upstream objects that this plan relies on, sorted."""
        return tuple(sorted({target for seam in self.order() for target in SEAMS[seam].targets}))

    def to_json(self) -> str:
        """Everything that another process needs to resolve the same plan; one line, keys sorted."""
        data = {
            "schema": SCHEMA,
            "patches": [chosen.to_json() for chosen in self.patches],
        }
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PatchPlan:
        """The plan that `to_json` wrote; UserError if it is none, or a patch is not to be found here.

        Its input files are not read: they may be gone or others by now. Who installs it calls `check_files` first.
        """
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']!r}, expected {SCHEMA}")
            entries = [
                (str(entry["source"]), dict(entry["knobs"]), dict(entry.get("files", {})))
                for entry in data["patches"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"this is not a patch plan: {error}; write one with `bench plan --json FILE`"
            ) from error
        chosen = []
        for source, values, files in entries:
            patch = registry.find(source)
            chosen.append(Chosen(patch, _planned_knobs(patch, values), source, files))
        return cls(tuple(chosen))

    def check_files(self) -> None:
        """UserError if an input file of a knob is no longer what was planned."""
        for chosen in self.patches:
            chosen.check_files()

    def sha256(self) -> str:
        """Hash of the patches, knob values and the files that these name, hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def resolve(
    enable: str | Iterable[str] = (),
    sets: Sequence[str] = (),
    knobs: Mapping[str, Mapping[str, Any]] | None = None,
) -> PatchPlan:
    """Make a plan from what a user typed.

    Args:
        enable: names or import paths, as a list or joined by commas.
        sets: `patch.knob=value` texts; they win over `knobs`.
        knobs: values by patch and knob, as read from TOML.

    Raises:
        UserError: one line that says what is wrong and what to type.
    """
    sources = split_names(enable)
    patches = [registry.find(source) for source in sources]
    _check(tuple(patches))
    overrides = knob_overrides(patches, sets, knobs or {})
    return PatchPlan(
        tuple(
            Chosen(patch, make_knobs(patch, overrides[patch.name]), source)
            for source, patch in zip(sources, patches, strict=True)
        )
    )


def split_names(enable: str | Iterable[str]) -> tuple[str, ...]:
    """Names from `a,b` or ["a", "b,c"]; blanks dropped."""
    texts = [enable] if isinstance(enable, str) else list(enable)
    return tuple(name for text in texts for name in (part.strip() for part in text.split(",")) if name)


def _planned_knobs(patch: Patch, values: Mapping[str, Any]) -> Knobs:
    """As `make_knobs`, but input files are named only, and not looked into."""
    texts: dict[str, Any] = {
        name: value for name in patch.knobs.model_fields if isinstance(value := values.get(name), str)
    }
    files = {name: values[name] for name in input_files(patch.knobs.model_construct(**texts))}
    knobs = make_knobs(patch, {name: value for name, value in values.items() if name not in files})
    return knobs.model_copy(update=files)


def _digests(knobs: Knobs) -> dict[str, str]:
    return {knob: _digest(path) for knob, path in input_files(knobs).items()}


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a file that can be read") from error


def _canonical(chosen: Chosen) -> tuple[int, str]:
    name = chosen.patch.name
    return _CATALOGUE_ORDER.get(name, len(_CATALOGUE_ORDER)), name


def _check(patches: tuple[Patch, ...]) -> None:
    names = [patch.name for patch in patches]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"patch {name!r} is enabled twice; name it once")
    for patch in patches:
        for other in patch.requires:
            if other not in names:
                raise UserError(
                    f"patch {patch.name!r} requires {other!r}; add it: --enable {','.join([*names, other])}"
                )
        for other in patch.conflicts:
            if other in names:
                raise UserError(f"patches {patch.name!r} and {other!r} conflict; enable one of them")
    for seam in SEAMS.values():
        _check_seam(seam.name, [patch for patch in patches if seam.name in patch.seams])


def _check_flags(brought: Mapping[str, Mapping[str, Any]]) -> None:
    by_flag: dict[str, str] = {}
    for name, flags in brought.items():
        for flag in flags:
            other = by_flag.setdefault(flag, name)
            if other != name:
                raise UserError(
                    f"patches {other!r} and {name!r} both bring the engine flag {flag}; enable one of them"
                )


def _check_seam(name: str, users: list[Patch]) -> None:
    seam = SEAMS[name]
    if seam.exclusive and len(users) > 1:
        raise UserError(
            f"patches {users[0].name!r} and {users[1].name!r} both own the seam {name}; enable one of them"
        )
    if not seam.ranked:
        return
    by_rank: dict[int, str] = {}
    for patch in users:
        rank = patch.ranks[name]
        if rank in by_rank:
            raise UserError(
                f"patches {by_rank[rank]!r} and {patch.name!r} both declare rank {rank} on the seam {name}; "
                "their order is not defined: change one of the ranks"
            )
        by_rank[rank] = patch.name

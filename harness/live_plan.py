"""What a live run settles beyond arms, seeds and traffic: the machine, the model, and how they are treated.

Plain values, so that reading a plan needs nothing of the live engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.profiles.profile import FivePhase

# The second time that the base's own server is measured; what differs from the first is noise.
AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Machine:
    """What stands in for a profile where no GPU's does: flags to compare, rates that fit, targets in reach.

    Attributes:
        name: as the run's reports call it, `cpu/<model>`.
        title: the processor, as a person calls it.
        stock: engine flags that vLLM resolves by default here. tuned: upstream's best, laid over stock.
        five_phase: the rates and the factor on the SLOs that calibration found.
        max_model_len: longest request, tokens.
        measured: what the rates were worked out from.
    """

    name: str
    title: str
    stock: Mapping[str, Any]
    tuned: Mapping[str, Any]
    five_phase: FivePhase
    max_model_len: int
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sized(self) -> bool:
        """Whether the five-phase rates were found; always so, or there is no machine."""
        return True

    @property
    def sha256(self) -> str:
        """Over everything that it says."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json and in the cache."""
        return {
            "name": self.name,
            "title": self.title,
            "stock": dict(self.stock),
            "tuned": dict(self.tuned),
            "five_phase": self.five_phase.model_dump(),
            "max_model_len": self.max_model_len,
            "measured": dict(self.measured),
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Machine:
        """The inverse of `to_json`; KeyError, TypeError or pydantic's ValidationError where it is none."""
        return Machine(**{**raw, "five_phase": FivePhase(**raw["five_phase"])})


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """The model that is served, and how.

    Attributes:
        model: its folder, or its name on the hub.
        model_name: name under which it is served.
        model_sha256: over the folder's configuration, tokenizer and weights; "" for a hub's name.
        vocab_size: token ids of the workload are below this.
        kv_cache_bytes: the KV cache of a CPU; a GPU's is what vLLM finds.
        engine_extra: more words for vLLM's command line, the same for every arm.
        warmup_s: how long each server is warmed up at least.
        again: name of the arm that repeats `tuned` (or `stock`, where that is all there is), "" without one.
        again_of: the arm that it repeats.
        tensor_parallel: GPUs that the engine uses.
        emulated: the server's device is the profile's, emulated: there is no model, and its traffic is a virtual run's.
    """

    model: str
    model_name: str
    model_sha256: str
    vocab_size: int
    kv_cache_bytes: int
    engine_extra: tuple[str, ...] = ()
    warmup_s: float = 5.0
    again: str = ""
    again_of: str = ""
    tensor_parallel: int = 1
    emulated: bool = False

    @property
    def engine(self) -> str:
        """As `bench run --engine` calls it."""
        return "emulated" if self.emulated else "live"

    @property
    def is_local(self) -> bool:
        """Whether the model is a folder here, so that its path is no part of what decides the results."""
        return bool(self.model_sha256)

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json; a folder's path is kept beside it."""
        return {
            **asdict(self),
            "engine_extra": list(self.engine_extra),
            "model": "" if self.is_local else self.model,
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any], model_path: str | None) -> LiveSettings:
        """The inverse of `to_json`."""
        model = model_path if raw["model_sha256"] and model_path else raw["model"]
        return LiveSettings(**{**raw, "engine_extra": tuple(raw["engine_extra"]), "model": model})

    @property
    def where(self) -> dict[str, str]:
        """How to find the model again."""
        return {"model_path": str(Path(self.model).resolve())} if self.is_local else {}

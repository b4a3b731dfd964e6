"""What the engine's process of an emulated server is told, in a file that the environment names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.atomic import write_json
from harness.errors import RunFailed
from harness.profiles import Profile, load_profile

EMULATION_ENV = "PATCHBENCH_EMULATION"


@dataclass(frozen=True, slots=True)
class Emulation:
    """An engine to be emulated.

    Attributes:
        profile_ref: what `load_profile` needs; profile_sha256: what it must find then.
        kv_blocks: blocks in the KV cache.
        slowdown: multiplies every step time. mixed_penalty: as `Assumptions` has it.
        outputs: file of the requests' true outputs.
        conduct: file into which the engine says at its end how well it kept the time.
    """

    profile_ref: Mapping[str, Any]
    profile_sha256: str
    kv_blocks: int
    outputs: str
    conduct: str
    slowdown: float = 1.0
    mixed_penalty: float | None = None

    def write(self, path: Path) -> None:
        """Write it where `from_environment` will look."""
        write_json(path, asdict(self))

    def profile(self) -> Profile:
        """The profile, the same as the one that was meant.

        Raises:
            RunFailed: it has changed since.
        """
        profile = load_profile(**self.profile_ref)
        if profile.sha256 != self.profile_sha256:
            raise RunFailed(
                f"the profile {profile.name} has changed since the server was started; start a new run"
            )
        return profile


def from_environment() -> Emulation:
    """What this process is told to emulate.

    Raises:
        RunFailed: nothing, or something unreadable.
    """
    path = os.environ.get(EMULATION_ENV)
    if not path:
        raise RunFailed(
            f"{EMULATION_ENV} is not set: an emulated engine is started by `bench run --engine emulated`"
        )
    try:
        return Emulation(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunFailed(f"{path}: not what an emulated engine is told ({error})") from None

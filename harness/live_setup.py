"""What `bench run --engine live` settles before anything runs: model, machine or profile, and how they are treated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.arms import BASELINES, Arm
from harness.errors import UserError
from harness.live_plan import AGAIN, LiveSettings, Machine
from harness.profiles import Profile

Say = Callable[[str], None]

# Five phases of 24 s, and tokens enough for a system prompt to fill a block: with a server for each of three arms and one arm twice, a run of one seed
# takes some 12 minutes on two quiet cores.
CPU_TIME_SCALE, CPU_LENGTH_SCALE = 0.4, 0.15


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """What the user asked for, as options of `bench run`; a `model` of None is the small one."""

    model: str | None = None
    vllm_flags: tuple[str, ...] = ()
    warmup_s: float = 5.0
    again: bool = True
    recalibrate: bool = False
    tensor_parallel: int = 1


def refuse_jobs(jobs: int) -> None:
    """UserError for more than one task at a time: servers that share a machine slow each other down."""
    if jobs > 1:
        raise UserError(f"--jobs {jobs}: a live run measures one server at a time; leave --jobs out")


def on_cpu() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    from harness.engines.live.command import is_cpu_build

    return is_cpu_build()


def settle(asked: LiveRequest, length_scale: float, say: Say) -> tuple[LiveSettings, Machine | None]:
    """The model, and on a CPU the machine; with a GPU the profile takes its place.

    Raises:
        UserError: the model is not there, or cannot be served so. RunFailed: it cannot be fetched, or calibration failed.
    """
    from harness.engines.live import command
    from harness.engines.live.model import ensure_model
    from harness.engines.live.served import served_model

    cpu = on_cpu()
    model = asked.model if asked.model is not None else os.fspath(ensure_model(say=say))
    command.check_model(model, None)
    model = folder_of(model)
    served = served_model(Path(model))
    settings = LiveSettings(
        model=model,
        model_name=served.name,
        model_sha256=served.sha256,
        vocab_size=served.vocab_size,
        kv_cache_bytes=command.KV_CACHE_BYTES,
        engine_extra=(*_parallel(asked.tensor_parallel), *asked.vllm_flags),
        warmup_s=asked.warmup_s,
        tensor_parallel=asked.tensor_parallel,
    )
    if not cpu:
        return settings, None
    from harness.engines.live.machines import cpu_machine

    machine = cpu_machine(served, settings.kv_cache_bytes, length_scale, again=asked.recalibrate, say=say)
    return settings, machine


def folder_of(model: str) -> str:
    """The model's folder: itself, or where this machine keeps what it has fetched of that name from the hub.

    Raises:
        UserError: neither is there. Nothing is fetched: models are large, and a benchmark is no place for surprises.
    """
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise UserError(
            f"--model {model}: neither a folder nor a model that was fetched from the hub to this machine; "
            f"type `hf download {model}` first, or give a folder"
        ) from None


def settle_emulated(profile: Profile, asked: LiveRequest) -> LiveSettings:
    """What a server with the profile's device emulated is given.

    Raises:
        UserError: an option that means something only where there is a model.
    """
    from harness.engines.live.served import served_model

    if asked.vllm_flags:
        raise UserError(
            "--vllm-flag goes with --engine live: an emulated engine is the profile's; use --arms for flags"
        )
    if asked.recalibrate:
        raise UserError("--recalibrate goes with --engine live: an emulated engine's times are the profile's")
    return LiveSettings(
        model="",
        model_name=profile.model,
        model_sha256="",
        vocab_size=served_model(profile.model_dir).vocab_size,
        kv_cache_bytes=0,
        warmup_s=asked.warmup_s,
        emulated=True,
    )


def with_again(
    settings: LiveSettings, arms: Sequence[Arm], wanted: bool
) -> tuple[LiveSettings, tuple[Arm, ...]]:
    """The arms, and one of the baselines once more: what differs between the two is noise."""
    names = [arm.name for arm in arms]
    base = next((arm for name in reversed(BASELINES) for arm in arms if arm.name == name), None)
    if not wanted or base is None or f"{base.name}-{AGAIN}" in names:
        return settings, tuple(arms)
    again = replace(base, name=f"{base.name}-{AGAIN}")
    return replace(settings, again=again.name, again_of=base.name), (*arms, again)


def refuse_arms(arms: Sequence[Arm], settings: LiveSettings) -> None:
    """UserError where vLLM could not be started for an arm, before the others have run for minutes."""
    from harness.engines.live import command

    for arm in arms:
        command.words(
            command.ServeSpec(settings.model, plan=arm.plan, flags=arm.flags, extra=settings.engine_extra),
            0,
        )


def _parallel(gpus: int) -> tuple[str, ...]:
    return () if gpus == 1 else (f"--tensor-parallel-size={gpus}",)

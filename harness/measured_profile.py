"""Which profile a measured run is replayed on: that of its GPU, its model and its number of GPUs."""

from __future__ import annotations

import re
from pathlib import Path

from harness.errors import UserError
from harness.measured_config import tensor_parallel
from harness.measured_run import MeasuredRun
from harness.profiles import Profile, load_profile
from harness.profiles.gpu import list_gpus, load_gpu
from harness.profiles.known_models import list_models, model_called

# A GPU whose memory differs from the profile's by more than this is another variant, or a part of one.
_SAME_MEMORY = 0.06
_BRANDS = {"nvidia", "tesla", "geforce", "graphics", "device"}


def profile_for(run: MeasuredRun, profile: str | None, model: str | None, notes: list[str]) -> Profile:
    """The profile to replay `run` on.

    Args:
        run: says which GPU, model and number of GPUs it had.
        profile: overrides the GPU (a GPU's name), or GPU and model (GPU/MODEL, or a profile's folder).
        model: overrides the model: a known shape, or a folder with a config.json.
        notes: what is taken in place of what was recorded is added.

    Raises UserError, saying what to give, for a GPU or a model that is not known.
    """
    gpus = tensor_parallel(run)
    if profile is not None and profile not in list_gpus() and not profile.endswith(".json"):
        chosen = load_profile(profile, model)
        _check_gpus(run, chosen, gpus, profile)
    else:
        gpu = profile if profile is not None else _gpu_of(run)
        chosen = load_profile(gpu, model or _model_of(run), gpus)
    _note_differences(run, chosen, notes)
    return chosen


def _gpu_of(run: MeasuredRun) -> str:
    device = run.recorded("device_name", "gpu_name")
    known = f"choose one with --profile GPU ({', '.join(list_gpus())})"
    if not isinstance(device, str):
        raise UserError(f"{run.meta_file}: it does not say which GPU it was (hardware.device_name); {known}")
    if re.search(r"\bMIG\b", device):
        raise UserError(
            f"{run.meta_file}: {device!r} is a slice of a GPU, of which there is no profile; {known}"
        )
    names = {_plain(name): gpu for gpu in list_gpus() for name in load_gpu(gpu).device_names}
    gpu = names.get(_plain(device))
    if gpu is None:
        kin = sorted({gpu for name, gpu in names.items() if _chips(name) & _chips(_plain(device))})
        nearest = f"the nearest is {' or '.join(kin)}; " if kin else ""
        raise UserError(f"{run.meta_file}: there is no profile of the GPU {device!r}; {nearest}{known}")
    return gpu


def _plain(device: str) -> str:
    """A driver's name for a GPU without what differs between tools: letter case, marks, the brand."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return " ".join(word for word in words if word not in _BRANDS)


def _chips(plain: str) -> set[str]:
    """The words that name the chip: a100, 4090; not its memory."""
    return {word for word in plain.split() if re.search(r"\d", word) and not word.endswith("gb")}


def _model_of(run: MeasuredRun) -> str:
    for model in (run.recorded("model"), run.recorded("served_model_name")):
        if not isinstance(model, str):
            continue
        known = model_called(model)
        if known is not None:
            return known.name
        if (Path(model) / "config.json").is_file():
            return model
    raise UserError(
        f"{run.meta_file}: the shape of the model {run.recorded('model')!r} is not known; give --model DIR, a folder "
        f"with its config.json (known: {', '.join(list_models())})"
    )


def _check_gpus(run: MeasuredRun, profile: Profile, gpus: int, asked: str) -> None:
    if profile.tensor_parallel != gpus:
        raise UserError(
            f"{run.meta_file}: the run used {gpus} GPUs, but the profile {asked} is for {profile.tensor_parallel}; "
            "name one that ends in -tpN, or a GPU alone"
        )


def _note_differences(run: MeasuredRun, profile: Profile, notes: list[str]) -> None:
    device, model = run.recorded("device_name", "gpu_name"), run.recorded("model")
    memory = run.recorded("device_total_memory_bytes")
    if isinstance(device, str) and _plain(device) not in map(_plain, profile.device_names):
        notes.append(f"the run's GPU is {device}, replayed as {profile.gpu}")
        memory = None
    if isinstance(model, str) and not profile.model_shape.is_called(model):
        notes.append(f"the run's model is {model}, replayed as {profile.model}")
    if isinstance(memory, int) and abs(memory / profile.memory.device_bytes - 1) > _SAME_MEMORY:
        notes.append(
            f"the run's GPU has {memory / 1e9:.1f} GB, the profile's {profile.memory.device_bytes / 1e9:.1f} GB: "
            "a variant or a part of it; its speed is taken for the whole one's"
        )

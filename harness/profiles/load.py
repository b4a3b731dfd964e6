"""Finding and reading a profile.

A profile is named GPU/MODEL, with -tpN for N GPUs, and comes from one of three places:

- a folder with `profile.toml` and `tables.json`: kernel times measured on that GPU with that model;
- composed of a GPU's file (`gpus/`) and a model's config.json; a folder with a `profile.toml` and no tables
  holds what was found out about such a pair (rates, upstream's best flags), laid over what is composed;
- any folder in one of these forms, by its path.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import UserError
from harness.profiles.compose import compose
from harness.profiles.gpu import Gpu, list_gpus, load_gpu
from harness.profiles.known_models import Model, list_models, load_model, model_called
from harness.profiles.memory import derive_kv_blocks
from harness.profiles.profile import Profile, ProfileRef
from harness.profiles.stock import stock_flags

BUILT_IN = Path(__file__).resolve().parent
DEFAULT_MODEL = "llama-3.1-8b"
UTILIZATION = 0.9
BLOCK_SIZE = 16
# The longest request that is asked for, and the least that is worth an engine.
MAX_MODEL_LEN, MIN_MODEL_LEN = 32768, 1024
_NAME = re.compile(r"(?P<gpu>[^/]+)/(?P<model>.+?)(-tp(?P<tp>\d+))?")
# One with KV memory to spare and one without: a result is believed when it holds on both.
STANDARD_PAIR = {"rich": "rtxpro6000-96g/llama-3.1-8b", "tight": "rtx4090-24g/llama-3.1-8b"}


def list_profiles() -> list[str]:
    """Names of the built-in profiles that have a folder, sorted; others are composed when named."""
    return sorted(p.parent.relative_to(BUILT_IN).as_posix() for p in BUILT_IN.glob("*/*/profile.toml"))


def load_profile(
    name: str, model: str | None = None, tensor_parallel: int | None = None, kv_blocks: int | None = None
) -> Profile:
    """The profile of that name.

    Args:
        name: GPU/MODEL[-tpN]; a GPU alone; `rich` or `tight`; or the path of a profile's folder.
        model: known shape or folder with a config.json; with a GPU alone (default: Llama-3.1-8B).
        tensor_parallel: GPUs that share the model; with a GPU alone.
        kv_blocks: overrides the number of KV blocks.

    Raises UserError for an unknown name (with the nearest), a malformed file, and a model that does not fit.
    """
    ref = ProfileRef(_lasting(name), _lasting(model), tensor_parallel, kv_blocks)
    name = STANDARD_PAIR.get(name, name)
    if model is not None or tensor_parallel is not None or _is_gpu(name):
        profile = _of_pair(name, model or DEFAULT_MODEL, tensor_parallel or 1)
    elif name in list_profiles():
        profile = _of_folder(BUILT_IN / name)
    elif (named := _split(name)) is not None:
        profile = _of_pair(*named)
    elif (Path(name) / "profile.toml").is_file():
        profile = _of_folder(Path(name))
    else:
        raise UserError(_unknown(name))
    profile = profile.model_copy(update={"ref": ref})
    return profile if kv_blocks is None else _with_blocks(profile, kv_blocks)


def profile_for_device(device_name: str, model: str, tensor_parallel: int = 1) -> Profile | None:
    """The profile of the GPU that the driver calls `device_name` with the model of a hub name; None if unknown."""
    gpu = gpu_called(device_name)
    known = model_called(model)
    if gpu is None or known is None:
        return None
    return load_profile(_pair_name(gpu.name, known.name, tensor_parallel))


def gpu_called(device_name: str) -> Gpu | None:
    """The GPU file for a name as the driver reports it, or None."""
    wanted = device_name.strip().lower()
    for name in list_gpus():
        gpu = load_gpu(name)
        if wanted in {known.lower() for known in gpu.device_names}:
            return gpu
    return None


def _lasting(name: str | None) -> Any:
    """A path in a form that holds in another folder; names as they are."""
    if name is None or name in list_profiles() or name in list_models() or not Path(name).exists():
        return name
    return str(Path(name).resolve())


def _is_gpu(name: str) -> bool:
    return name in list_gpus() or name.endswith(".json")


def _split(name: str) -> tuple[str, str, int] | None:
    """GPU, model and GPUs of a composed profile's name; None when it is no such name."""
    match = _NAME.fullmatch(name)
    if match is None or match["gpu"] not in list_gpus() or match["model"] not in list_models():
        return None
    return match["gpu"], match["model"], int(match["tp"] or 1)


def _pair_name(gpu: str, model: str, tensor_parallel: int) -> str:
    return f"{gpu}/{model}" + (f"-tp{tensor_parallel}" if tensor_parallel > 1 else "")


def _of_pair(gpu_name: str, model_name: str, tensor_parallel: int) -> Profile:
    """The built-in folder of this pair if there is one; else composed."""
    if not _is_gpu(gpu_name):
        raise UserError(
            f"--model and --tensor-parallel go with a GPU alone, not with {gpu_name!r}; "
            f"GPUs are {', '.join(list_gpus())}"
        )
    gpu, model = load_gpu(gpu_name), load_model(model_name)
    name = _pair_name(gpu.name, model.name, tensor_parallel)
    if gpu_name in list_gpus() and model_name in list_models() and name in list_profiles():
        return _of_folder(BUILT_IN / name)
    return _composed(BUILT_IN / name, b"", {}, gpu, model, tensor_parallel)


def _of_folder(folder: Path) -> Profile:
    toml = folder / "profile.toml"
    text = _bytes_of(toml)
    try:
        raw = tomllib.loads(text.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{toml}: not valid TOML: {error}") from None
    tables = _tables_of(folder, toml, raw)
    named = _NAME.fullmatch(str(raw.get("name", "")))
    if named is None:
        raise UserError(f"{toml}: name: it must be GPU/MODEL, with -tpN for N GPUs")
    own_model = (folder / "config.json").is_file()
    if tables is None:
        own_gpu = folder / "gpu.json"
        gpu = load_gpu(str(own_gpu) if own_gpu.is_file() else named["gpu"])
        model = load_model(str(folder) if own_model else named["model"])
        if own_model:
            model = replace(model, name=named["model"])
        return _composed(folder, text, raw, gpu, model, int(named["tp"] or 1))
    model = load_model(str(folder) if own_model else named["model"])
    digest = hashlib.sha256(text + _bytes_of(tables)).hexdigest()
    return _checked(raw, toml, path=folder, model_shape=model, tables_path=tables, sha256=digest)


def _composed(
    folder: Path, text: bytes, raw: Mapping[str, Any], gpu: Gpu, model: Model, tensor_parallel: int
) -> Profile:
    """A profile made from a GPU's file and a model's shape, with what a profile.toml says laid over it."""
    parts = compose(gpu, model.shape, tensor_parallel)
    made: dict[str, Any] = {
        "name": _pair_name(gpu.name, model.name, tensor_parallel),
        "gpu": gpu.title if tensor_parallel == 1 else f"{tensor_parallel} x {gpu.title}",
        "device_names": list(gpu.device_names),
        "model": model.title,
        "model_names": list(model.hub_names),
        "measured": gpu.measured,
        "not_measured": list(parts.not_measured),
        "beyond": list(parts.extrapolated),
        "dtype": gpu.dtype,
        "tensor_parallel": tensor_parallel,
        "layers": model.shape.layers,
        "block_size": BLOCK_SIZE,
        "tuned": {
            "comment": "the flags that a sweep chose on another GPU (docs/TUNED.md); no sweep was made here",
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 256,
            "scheduling_policy": "priority",
        },
        "source": gpu.source,
        "domain": parts.domain,
    }
    laid_over = {k: v for k, v in raw.items() if k not in ("memory", "stock")}
    memory: dict[str, Any] = {"utilization": UTILIZATION, **raw.get("memory", {})}
    length = min(MAX_MODEL_LEN, int(model.config.get("max_position_embeddings") or MAX_MODEL_LEN))
    stock = stock_flags(gpu.spec.device_bytes, gpu.device_names[0], length, BLOCK_SIZE) | dict(
        raw.get("stock", {})
    )
    made["memory"] = memory = _memory(gpu, model, tensor_parallel, memory, stock)
    stock["max_model_len"] = made["max_model_len"] = _fitting_length(
        made["name"], stock["max_model_len"], memory["kv_blocks"]
    )
    made["stock"] = stock
    digest = hashlib.sha256(text + gpu.sha256.encode() + model.config_bytes + str(tensor_parallel).encode())
    return _checked(
        made | laid_over,
        folder / "profile.toml",
        path=folder,
        model_shape=model,
        composed_tables=parts.tables,
        gpu_path=gpu.path,
        sha256=digest.hexdigest(),
    )


def _memory(
    gpu: Gpu, model: Model, tensor_parallel: int, memory: dict[str, Any], stock: Mapping[str, Any]
) -> dict[str, Any]:
    device_bytes = memory.setdefault("device_bytes", gpu.spec.device_bytes)
    if "kv_blocks" in memory:
        return {"kv_blocks_from": "given", "kv_blocks_how": "profile.toml"} | memory
    blocks = derive_kv_blocks(
        model.config,
        device_bytes,
        memory["utilization"],
        stock["max_num_batched_tokens"],
        stock["max_num_seqs"],
        BLOCK_SIZE,
        tensor_parallel,
    )
    how = (
        f"harness.profiles.memory: {memory['utilization']:g} of {device_bytes / 1e9:.1f} GB on each GPU, less weights, "
        f"a profiling run and what vLLM keeps; an estimate"
    )
    if not blocks:
        weights_gb = 2 * model.shape.shard(tensor_parallel).parameters / 1e9
        raise UserError(
            f"{model.title} does not fit {tensor_parallel} x {gpu.title}: {weights_gb:.1f} GB of weights on each in "
            f"{memory['utilization']:g} of {device_bytes / 1e9:.1f} GB; give more GPUs with --tensor-parallel"
        )
    return memory | {"kv_blocks": blocks, "kv_blocks_from": "derived", "kv_blocks_how": how}


def _fitting_length(name: str, wanted: int, kv_blocks: int) -> int:
    """The longest request that the cache can hold, which vLLM insists on; one block is its placeholder."""
    held = (kv_blocks - 1) * BLOCK_SIZE
    if held >= wanted:
        return wanted
    if held < min(wanted, MIN_MODEL_LEN):
        raise UserError(
            f"{name}: {kv_blocks} KV blocks hold {held} tokens, fewer than one request of {min(wanted, MIN_MODEL_LEN)}; "
            "give more GPUs with --tensor-parallel, or a smaller model"
        )
    return held // 1024 * 1024


def _with_blocks(profile: Profile, kv_blocks: int) -> Profile:
    needed = -(-profile.max_model_len // profile.block_size) + 1
    if kv_blocks < needed:
        raise UserError(
            f"--kv-blocks {kv_blocks}: one request of {profile.max_model_len} tokens needs {needed}; vLLM would not start"
        )
    memory = profile.memory.model_copy(
        update={"kv_blocks": kv_blocks, "kv_blocks_from": "given", "kv_blocks_how": "--kv-blocks"}
    )
    digest = hashlib.sha256(f"{profile.sha256} kv_blocks={kv_blocks}".encode()).hexdigest()
    return profile.model_copy(update={"memory": memory, "sha256": digest})


def _checked(raw: Mapping[str, Any], toml: Path, **found: Any) -> Profile:
    """The profile of these values; UserError names file and field of what is wrong."""
    try:
        return Profile(**raw, ref=ProfileRef(str(found["path"])), **found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"{toml}: {where}: {first['msg']}; docs/PROFILES.md lists the fields") from None
    except TypeError as error:
        raise UserError(f"{toml}: {error}; path and sha256 are not fields of the file") from None


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes().replace(b"\r\n", b"\n")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); is the profile complete?") from None


def _tables_of(folder: Path, toml: Path, raw: Mapping[str, Any]) -> Path | None:
    """Its own tables, those of the built-in profile that it shares, or None when it is composed."""
    shared = raw.get("tables_of")
    if shared is not None:
        if shared not in list_profiles():
            raise UserError(f"{toml}: tables_of names no built-in profile: {shared!r}")
        return BUILT_IN / str(shared) / "tables.json"
    own = folder / "tables.json"
    return own if own.is_file() or "domain" in raw else None


def _unknown(name: str) -> str:
    names = [*list_profiles(), *list_gpus(), *(f"{g}/{m}" for g in list_gpus() for m in list_models())]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    if near:
        return f"no profile {name!r}; did you mean {near[0]}?"
    return f"no profile {name!r}; it is GPU/MODEL of {', '.join(list_gpus())} and {', '.join(list_models())}"

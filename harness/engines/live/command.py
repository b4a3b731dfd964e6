"""What vLLM is started with: its command line, from an arm's flags, and its environment."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import vllm_metadata
from harness.engines.flags import EngineFlags
from harness.errors import UserError
from patches.seam.plan import PatchPlan
from patches.seam.plugin import IDENTITY_ENV, PLAN_ENV, RECEIPTS_ENV

VLLM_MODULE = "vllm.entrypoints.cli.main"
KV_CACHE_BYTES = 2**30
# How long a server that is told to end may finish requests and let its workers end; they take seconds.
SHUTDOWN_TIMEOUT_S = 15
# What vLLM's attention on the CPU takes is a multiple of this.
CPU_BLOCK_SIZE = 32
_EXECUTOR = "distributed-executor-backend"
# Set for engines within this project's own processes, or decided below; a server must not inherit them.
_NOT_INHERITED = (
    "VLLM_API_KEY",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_RPC_BASE_PATH",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_TARGET_DEVICE",
)
# Where the server listens and who may talk to it is the launcher's to say.
_LAUNCHERS = (
    *("host", "port", "uds", "api-key", "served-model-name", "api-server-count", "headless", "root-path"),
    *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "grpc", "grpc-port", "model"),
)


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """A server to be started.

    Attributes:
        model: a local folder, or a name on the model hub.
        plan: patches to install in each of its processes; None for vLLM as it is.
        flags: an arm's engine flags; None leaves them to vLLM.
        extra: more words for vLLM's command line; what `flags` or the launcher says cannot be said again.
        port: 0 for any that is free.
        api_key: "" lets anybody in.
        identity: file of API keys and tenants (`patches.front.tenants`); None: a request says itself whose it is.
            `api_key` is the operator's then.
        env: variables for vLLM, over those of this process.
        kv_cache_bytes: size of the KV cache on the CPU; on a GPU vLLM measures it.
        control: serve vLLM's control endpoints too (cache reset, resolved configuration).
        online: whether a model may be fetched from the hub.
        module: the Python module that is run as vLLM.
    """

    model: str
    plan: PatchPlan | None = None
    flags: EngineFlags | None = None
    extra: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str = field(default="", repr=False)
    identity: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    kv_cache_bytes: int = KV_CACHE_BYTES
    control: bool = True
    online: bool = False
    module: str = VLLM_MODULE


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def model_name(model: str) -> str:
    """Name under which a model is served: its folder's, or the hub's."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def words(spec: ServeSpec, port: int) -> list[str]:
    """The command that starts the server.

    Raises:
        UserError: `extra` says something that is decided elsewhere, or the model cannot be what is served.
    """
    check_model(spec.model, spec.flags)
    ours = [
        f"--host={spec.host}",
        f"--port={port}",
        f"--served-model-name={model_name(spec.model)}",
        # Sampling is what a request asks for, not what a model's author would like.
        "--generation-config=vllm",
        "--enable-request-id-headers",
        "--enable-prompt-tokens-details",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
        # Without it the engine is killed at once, before it could write its last receipt.
        f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}",
    ]
    own = {_option(word) for word in spec.extra if word.startswith("--")}
    if is_cpu_build():
        # An executor of one's own brings its own attention, or none.
        if spec.flags is not None and spec.flags.block_size % CPU_BLOCK_SIZE and _EXECUTOR not in own:
            raise UserError(
                f"engine flag block_size={spec.flags.block_size}: vLLM's attention on the CPU takes multiples of "
                f"{CPU_BLOCK_SIZE}; set block_size={CPU_BLOCK_SIZE} in every arm"
            )
        ours += [word for word in _cpu_words(spec) if _option(word) not in own]
    flags = flag_words(spec.flags) if spec.flags is not None else _brought(spec.plan)
    _check_extra(own, {_option(word) for word in flags})
    return [sys.executable, "-P", "-m", spec.module, "serve", spec.model, *ours, *flags, *spec.extra]


def flag_words(flags: EngineFlags) -> list[str]:
    """An arm's flags as words of `vllm serve`; what is None stays unsaid."""
    out = []
    for name, value in flags.model_dump().items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, dict):
            out.append(f"--{option}={json.dumps(value)}")
        elif value is not None:
            out.append(f"--{option}={value}")
    return out


def _brought(plan: PatchPlan | None) -> list[str]:
    """Words for the engine flags that a plan brings along; an arm's flags have them already."""
    flags = plan.engine_flags if plan is not None else {}
    said = {name: value for name, value in flags.items() if value is not None}
    return [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in said.items()]


def environment(spec: ServeSpec, receipts: Path, temporary: Path) -> dict[str, str]:
    """The server's environment: this process's, less what is meant for this project's own processes.

    Args:
        receipts: folder in which each patched process leaves its receipt.
        temporary: short path of a folder for the sockets between vLLM's processes and what else it leaves behind.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith("PATCHBENCH_")
    }
    env |= {
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(temporary),
        "TMPDIR": str(temporary),
        "TOKENIZERS_PARALLELISM": "false",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # Compiled kernels are worth keeping, unlike the rest of what lies in the temporary folder.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        env[name] = "0" if spec.online else "1"
    if spec.control:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if spec.api_key:
        # On the command line everybody on this machine could read it.
        env["VLLM_API_KEY"] = spec.api_key
    if is_cpu_build():
        env["VLLM_TARGET_DEVICE"] = "cpu"
        # Left alone, vLLM 0.32.0 keeps one core free and another if there is a KV connector, or takes all if there are
        # not so many: arms with and without a connector would compute on different numbers of cores.
        env.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    _add_metadata(env)
    if spec.plan is not None and spec.plan.patches:
        env[PLAN_ENV] = spec.plan.to_json()
        env[RECEIPTS_ENV] = str(receipts.resolve())
    if spec.identity is not None:
        env[IDENTITY_ENV] = str(spec.identity.resolve())
    return env | dict(spec.env)


def check_model(model: str, flags: EngineFlags | None) -> None:
    """Refuse a model that is not there, or too short for what an arm asks; a hub's name is left to vLLM.

    Raises:
        UserError: what is wrong with it, and what to give instead.
    """
    folder = Path(model)
    if not folder.is_dir():
        if folder.exists():
            raise UserError(f"model {model}: it is a file; give the folder with its config.json")
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise UserError(f"model {model}: there is no such folder; give one with config.json and weights")
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        longest = config.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        raise UserError(f"model {model}: it holds no readable config.json; give a model's folder") from None
    if flags is not None and isinstance(longest, int) and flags.max_model_len > longest:
        raise UserError(
            f"model {model}: it takes {longest} tokens, and the arm asks for max_model_len={flags.max_model_len}; "
            f"give the arm at most {longest}"
        )


def _cpu_words(spec: ServeSpec) -> Sequence[str]:
    cpu = [
        "--dtype=float32",
        # Compiling takes a C++ compiler, and a minute for each shape of model.
        "--enforce-eager",
        f"--kv-cache-memory-bytes={spec.kv_cache_bytes}",
    ]
    if spec.flags is None:
        cpu.append(f"--block-size={CPU_BLOCK_SIZE}")
    return cpu


def _check_extra(own: set[str], arms: set[str]) -> None:
    for option in sorted(own):
        if option in _LAUNCHERS:
            raise UserError(f"vLLM flag --{option}: it is set by this command itself, or not offered here")
        if option in arms:
            raise UserError(f"vLLM flag --{option}: it is set by the arm; set it there")


def _option(word: str) -> str:
    """Which option a word sets: `--no-enable_x=1` sets enable-x."""
    return word.removeprefix("--").split("=")[0].replace("_", "-").removeprefix("no-")


def _add_metadata(env: dict[str, str]) -> None:
    before = os.environ.get("PYTHONPATH")
    folder = vllm_metadata.ensure()
    if folder is not None:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before

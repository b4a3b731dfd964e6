"""The device that is timed: what it is, and what is written down about it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

from harness.errors import UserError

_QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU for trying the script. `capability` is (0, 0) on a CPU."""

    kind: str
    name: str
    memory_bytes: int
    l2_bytes: int
    capability: tuple[int, int]
    dtype: torch.dtype

    def free_bytes(self) -> int:
        """Device memory that is free now; on a CPU a small allowance."""
        return int(torch.cuda.mem_get_info()[0]) if self.kind == "cuda" else 1 << 30

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        if self.kind == "cuda":
            torch.cuda.synchronize()


def open_device(kind: str) -> Device:
    """The device to time on; UserError where torch sees no GPU."""
    if kind == "cpu":
        return Device("cpu", "CPU", 0, 0, (0, 0), torch.bfloat16)
    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no CUDA GPU; --device cpu tries the script without one"
        )
    found = torch.cuda.get_device_properties(0)
    # float16 costs the same where bfloat16 is not native.
    dtype = torch.bfloat16 if found.major >= 8 else torch.float16
    l2_bytes = int(getattr(found, "L2_cache_size", 0)) or 64 << 20
    return Device("cuda", found.name, found.total_memory, l2_bytes, (found.major, found.minor), dtype)


def facts(device: Device) -> dict[str, Any]:
    """Name, memory and versions: what must be the same for two runs to share a folder."""
    return {
        "device": device.name,
        "device_memory_bytes": device.memory_bytes,
        "compute_capability": f"{device.capability[0]}.{device.capability[1]}",
        "l2_bytes": device.l2_bytes,
        "dtype": str(device.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def readings(device: Device) -> dict[str, str]:
    """Driver, clocks (MHz), power limit (W) and temperature (C) as nvidia-smi gives them; {} where it cannot."""
    tool = shutil.which("nvidia-smi")
    if device.kind != "cuda" or tool is None:
        return {}
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    which = ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"] if uuid else []
    command = [tool, *which, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_readings(out)


def parse_readings(out: str) -> dict[str, str]:
    """The fields of one line of nvidia-smi's answer by name; those it does not support are left out."""
    fields = [field.strip() for field in (out.splitlines() or [""])[0].split(",")]
    if len(fields) != len(_QUERY):
        return {}
    return {
        name: field for name, field in zip(_QUERY, fields, strict=True) if field and not field.startswith("[")
    }

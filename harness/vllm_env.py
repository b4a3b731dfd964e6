"""The process environment under which this project imports vLLM.

Everything here must happen before the first `import vllm`: vLLM reads its environment at import
and caches it when an engine starts.
"""

from __future__ import annotations

import os

_QUIET = {
    # The CPU wheel is built for the CPU; saying so spares the look-up of the distribution's name.
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Nothing here may reach for a model hub by accident.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCH_LOGS": "-torch._library.triton",
    "TOKENIZERS_PARALLELISM": "false",
    # In-process engines: no child process, and no plugin but the one that the caller installs.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def prepare() -> None:
    """Set what is not set yet; call it before importing vLLM in this process."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)

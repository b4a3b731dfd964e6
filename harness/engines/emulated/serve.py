"""vLLM's command line for a server whose device is emulated: `python -m harness.engines.emulated.serve serve ...`."""

from __future__ import annotations

from harness.engines.emulated.gpu_config import keep_async_scheduling


def main() -> None:
    """Run vLLM."""
    keep_async_scheduling()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()

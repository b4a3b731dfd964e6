"""A real engine in a process of its own, for test_telemetry_process: `python -m tests.live.telemetry_engine FOLDER`.

Serves a few requests with a small model of random weights, then kills the engine's process in the middle of more.
Prints what it knows as JSON. The environment says where telemetry goes; nothing here imports it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from harness import vllm_env

BLOCK_SIZE = 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def main(folder: Path) -> None:
    """Serve, count, kill."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    vllm_env.prepare()
    import torch
    from prometheus_client import generate_latest
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    torch.set_num_threads(1)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder / "model"),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            enforce_eager=True,
            max_model_len=448,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=16,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=64 * 2**20,
        ),
        enable_multiprocessing=True,
    )
    scrapes = [generate_latest().decode()]
    began_ns = time.monotonic_ns()
    tokens: dict[str, int] = {}
    for number in range(8):
        add(engine, f"r{number}", list(range(64)) + [number] * 100, 60)
    steps = drive(engine, tokens, abort_at=6)
    ended_ns = time.monotonic_ns()
    scrapes.append(generate_latest().decode())
    # more, of which nobody sees the end
    for number in range(4):
        add(engine, f"late{number}", [number] * 40, 400)
    for _ in range(20):
        engine.step()
    told = {
        "pid": os.getpid(),
        "began_ns": began_ns,
        "ended_ns": ended_ns,
        "tokens": tokens,
        "steps": steps,
        "scrapes": scrapes,
    }
    print(json.dumps(told), flush=True)
    (tape,) = folder.glob("telemetry/engine-*.tape")
    os.kill(int(tape.name.split("-")[1]), signal.SIGKILL)
    os._exit(0)


def add(engine: Any, name: str, prompt: list[int], max_tokens: int) -> None:
    """As the API server names a completion's first prompt."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    engine.add_request(f"cmpl-{name}-0", {"prompt_token_ids": prompt}, params)


def drive(engine: Any, tokens: dict[str, int], abort_at: int) -> int:
    """Step to the end; the last request is given up on the way."""
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)
        steps += 1
        if steps == abort_at:
            engine.abort_request(["cmpl-r7-0"])
    return steps


if __name__ == "__main__":
    main(Path(sys.argv[1]))

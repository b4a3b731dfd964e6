"""Record a run that `bench validate` can replay: serve a workload with vLLM, and write down when and how.

    python scripts/record_run.py --model MODEL --workload workload.jsonl --out DIR [--engine '{"max_num_seqs": 128}']

Run it where the GPU is, with the vLLM that is to be compared. Every row of the workload needs `input_tok_ids`,
`output_toks` and `arrival_time_ns`; docs/VALIDATION.md has the format. Requests are sent at their times,
whether or not earlier ones have ended, and each generates exactly its `output_toks`. A few others go ahead
of them, since an engine's first steps compile and allocate.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TIMES = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
_CONFIGS = ("scheduler_config", "cache_config", "model_config", "parallel_config", "compilation_config")
_SINGLE = ("speculative_config", "lora_config", "kv_transfer_config", "quant_config")
_WARM_UP = 8


def read_workload(file: Path) -> list[dict[str, Any]]:
    """The rows, checked for what is sent; ValueError names the line."""
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        for field in ("input_tok_ids", "output_toks", "arrival_time_ns"):
            if not row.get(field) and not (field == "arrival_time_ns" and row.get(field) == 0):
                raise ValueError(f"{file}: line {number}: no {field}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{file}: no rows")
    return rows


async def serve(engine: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send every row at its time; the rows of requests.jsonl, and each row's output ids put into `rows`."""
    from vllm import SamplingParams

    async def one(request_id: str, row: dict[str, Any]) -> dict[str, Any]:
        count = int(row["output_toks"])
        params = SamplingParams(min_tokens=count, max_tokens=count, ignore_eos=True, temperature=0.0)
        metrics, ids = None, list[int]()
        prompt = {"prompt_token_ids": list(row["input_tok_ids"])}
        async for output in engine.generate(prompt, params, request_id):
            metrics = output.metrics or metrics
            ids = list(output.outputs[0].token_ids)
        row["output_tok_ids"] = ids
        times = {name: getattr(metrics, name, None) for name in _TIMES}
        sizes = {"input_toks": len(row["input_tok_ids"]), "output_toks": len(ids)}
        return {"request_id": request_id, **sizes, **times}

    # Of the same lengths but with content of their own, so that nothing of the run is in the prefix cache.
    warm = [
        {"input_tok_ids": [row["input_tok_ids"][-1]] * len(row["input_tok_ids"]), "output_toks": 2}
        for row in rows[:_WARM_UP]
    ]
    await asyncio.gather(*(one(f"warm-up-{i}", row) for i, row in enumerate(warm)))
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def at_its_time(index: int, row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(max(start + row["arrival_time_ns"] / 1e9 - loop.time(), 0.0))
        return await one(f"run-{index}", row)

    return list(await asyncio.gather(*(at_its_time(i, row) for i, row in enumerate(rows))))


def describe(engine: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """run_meta.json: what vLLM resolved, and the hardware."""
    import torch
    import vllm

    config = engine.vllm_config
    resolved: dict[str, Any] = {name: _plain(getattr(config, name, None)) for name in _CONFIGS}
    for name in _SINGLE:
        value = getattr(config, name, None)
        resolved[name] = None if value is None else f"<{type(value).__name__}>"
    resolved["model_config"]["hf_config"] = f"<{type(config.model_config.hf_config).__name__}>"
    hardware: dict[str, Any] = {"torch_version": torch.__version__}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        hardware |= {"device_name": device.name, "device_total_memory_bytes": device.total_memory}
        hardware |= {"device_count": torch.cuda.device_count(), "cuda_version": torch.version.cuda}
    cache = config.cache_config
    kept = ("num_gpu_blocks", "block_size", "gpu_memory_utilization", "enable_prefix_caching")
    return {
        "schema_version": 1,
        "model": kwargs["model"],
        "vllm_version": vllm.__version__,
        "engine_kwargs": _plain(dict(kwargs)),
        "kv_cache": {name: _plain(getattr(cache, name, None)) for name in kept},
        "hardware": hardware,
        "resolved_config": resolved,
    }


def _plain(value: Any) -> Any:
    """A setting as JSON holds it; what it cannot hold, by its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value):
        return {
            f.name: _plain(getattr(value, f.name, None))
            for f in dataclasses.fields(value)
            if not dataclasses.is_dataclass(getattr(value, f.name, None))
        }
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and all(isinstance(v, (bool, int, float, str)) for v in value):
        return list(value)
    name, text = getattr(value, "name", None), repr(value)
    if isinstance(name, str):
        return name
    return text if len(text) <= 60 and " at 0x" not in text else f"<{type(value).__name__}>"


async def record(args: argparse.Namespace) -> int:
    """The whole run; returns how many requests were served."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    rows = read_workload(args.workload)
    kwargs = {"model": args.model, **json.loads(args.engine)}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(disable_log_stats=False, **kwargs))
    try:
        timed = await serve(engine, rows)
        meta = describe(engine, kwargs)
    finally:
        engine.shutdown()
        # vLLM's own clean-up fails once the interpreter is going down.
        del engine
    args.out.mkdir(parents=True, exist_ok=True)
    for name, content in (("requests.jsonl", timed), ("workload.jsonl", rows)):
        text = "".join(json.dumps(row) + "\n" for row in content)
        (args.out / name).write_text(text, encoding="utf-8")
    (args.out / "run_meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return len(timed)


def main() -> int:
    parser = argparse.ArgumentParser(description="record a run for bench validate")
    parser.add_argument("--model", required=True, help="as vllm serve takes it")
    parser.add_argument("--workload", required=True, type=Path, help="what to send; see docs/VALIDATION.md")
    parser.add_argument("--out", required=True, type=Path, help="folder to write the three files into")
    parser.add_argument("--engine", default="{}", help="engine arguments as a JSON object")
    args = parser.parse_args()
    try:
        count = asyncio.run(record(args))
    except (OSError, ValueError) as error:
        print(f"record_run: {error}", file=sys.stderr)
        return 2
    print(f"{count} requests recorded; now: bench validate {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

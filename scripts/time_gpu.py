"""Time a model's kernels on this machine's GPU with plain torch, and write the tables a profile is made of.

    python scripts/time_gpu.py OUT
    python scripts/time_gpu.py OUT --compare ../shared/data/aic/h200_sxm

The first takes at most eight minutes and writes attention.csv, dense.csv, per_sequence.csv and meta.json into
OUT, the most important rows first; run again, it goes on where it stopped. The second only reads OUT. It needs
torch and this checkout, nothing else; docs/GPU_TIMING.md says what is timed, how, and what is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.errors import RunFailed, UserError  # noqa: E402

# Raised when the way times are taken changes, so that old and new ones do not meet in one folder.
METHOD = 1
REPEATS = {"cuda": 9, "cpu": 3}


def main(argv: list[str] | None = None) -> int:
    """Time or compare; the exit code."""
    args = _parser().parse_args(argv)
    try:
        return _compare(args) if args.compare else _time(args)
    except (UserError, RunFailed) as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the tables")
    parser.add_argument(
        "--compare", type=Path, metavar="DIR", help="compare OUT with a folder of public tables"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script only")
    parser.add_argument(
        "--model", default="llama-3.1-8b", help="folder with a config.json, or a model that the profiles know"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="time one GPU's part of N"
    )
    parser.add_argument("--budget-s", type=float, default=480.0, metavar="S", help="seconds in all")
    parser.add_argument(
        "--quick", action="store_true", help="a few rows of everything: no profile, but a try"
    )
    parser.add_argument("--attention", choices=("auto", "vllm", "torch"), default="auto", help="whose kernel")
    parser.add_argument(
        "--mixed",
        choices=("auto", "one", "two", "faster"),
        default="auto",
        help="a chunk beside decodes in one call of the kernel, in two, or the faster of both",
    )
    parser.add_argument("--no-fuse", action="store_true", help="leave small kernels as torch has them")
    return parser


def _compare(args: argparse.Namespace) -> int:
    from scripts.gpu_timing.compare import compare, table

    print(
        f"{args.out} beside {args.compare} (ours / theirs - 1)\n\n{table(compare(args.out, args.compare))}",
        end="",
    )
    return 0


def _time(args: argparse.Namespace) -> int:
    if args.tensor_parallel < 1 or not args.budget_s > 0:
        raise UserError("--tensor-parallel and --budget-s must be positive")
    from scripts.gpu_timing.model import load_shape
    from scripts.gpu_timing.session import Clock

    clock = Clock(args.budget_s)
    shape = load_shape(args.model, args.tensor_parallel)
    try:
        import torch
    except ImportError:
        raise UserError(
            "torch is not installed here; install it, or use an environment that has it"
        ) from None
    with torch.no_grad():
        try:
            return _run(args, shape, clock)
        except torch.OutOfMemoryError:
            raise UserError(
                "one layer's weights and a small cache do not fit into the device's memory"
            ) from None


def _run(args: argparse.Namespace, shape: Any, clock: Any) -> int:
    from scripts.gpu_timing import bench as benches
    from scripts.gpu_timing.attention import ONE_CALL, TWO_CALLS
    from scripts.gpu_timing.device import facts, open_device, readings
    from scripts.gpu_timing.drift import LIMIT_PCT, measure
    from scripts.gpu_timing.rows import full_blocks, quick_blocks
    from scripts.gpu_timing.session import Session
    from scripts.gpu_timing.store import Store
    from scripts.gpu_timing.timer import CpuTimer, CudaTimer, Timer

    def say(line: str) -> None:
        print(line, flush=True)

    device = open_device(args.device)
    blocks = (quick_blocks if args.quick else full_blocks)(qk_norm=shape.qk_norm)
    repeats = REPEATS[device.kind]
    timer: Timer = CudaTimer(repeats, device.l2_bytes) if device.kind == "cuda" else CpuTimer(repeats)
    ceilings, sentinel = measure(device, timer)
    say(f"{device.name}: {ceilings.flops_per_s / 1e12:.3g} TFLOP/s, {ceilings.bytes_per_s / 1e9:.3g} GB/s")
    ways = {"one": ONE_CALL, "two": TWO_CALLS, "faster": benches.FASTER, "auto": "auto"}
    choices = benches.Choices(args.attention, ways[args.mixed], not args.no_fuse)
    bench = benches.Bench(device, shape, timer, ceilings, blocks, choices)
    say(
        f"attention: {bench.attention.kernel.name}, mixed: {bench.mixed}; off the reference by {bench.check_error:.2%}"
    )
    for failure in bench.failures:
        say(f"  not used: {failure}")
    setup = {
        "method": METHOD,
        "model": dataclasses.asdict(shape),
        "tensor_parallel": args.tensor_parallel,
        "attention": bench.attention.kernel.name,
        "mixed": bench.mixed,
        "small_kernels": "torch.compile" if bench.dense.fused else "torch, unfused",
        **facts(device),
    }
    store = Store(args.out, setup)
    session = Session(bench, store, sentinel, clock, repeats, say)
    before = readings(device)
    after: dict[str, str] = {}

    def meta() -> dict[str, Any]:
        return {
            "setup": setup,
            "model_named": args.model,
            "method": _method(device.kind),
            "repeats": repeats,
            "ceilings": {"tflop_per_s": ceilings.flops_per_s / 1e12, "gb_per_s": ceilings.bytes_per_s / 1e9},
            "readings_before": before,
            "readings_after": after,
            "rows": len(store.rows),
            "left_out": session.left_out,
            "kernels_not_used": bench.failures,
            "not_captured": sorted(set(timer.not_captured)),
            "cache_tokens": {"held": bench.cache_tokens, "largest_row": bench.cache_wanted},
            "drift": {
                "limit_pct": LIMIT_PCT,
                "largest_pct": round(sentinel.drift_pct(), 2),
                "rows_beyond_limit": session.drifted_rows,
                "product_us": [round(us, 3) for us in sentinel.us],
            },
        }

    try:
        session.run(blocks, meta)
    except KeyboardInterrupt:
        raise RunFailed(
            f"stopped; the same command goes on from the {len(store.rows):,} rows it has"
        ) from None
    finally:
        after.update(readings(device))
        store.write(blocks, meta())
    say(f"{len(store.rows):,} rows in {args.out}, {clock.spent_s():.0f} s, drift {sentinel.drift_pct():.1f}%")
    for name, why in session.left_out.items():
        say(f"  not whole: {name} ({why})")
    return 0


def _method(kind: str) -> str:
    if kind != "cuda":
        return "wall clock on a CPU: a try of the script, not a measurement"
    return (
        "CUDA events around one replay of a graph of several launches, median of the repeats; a buffer of twice the "
        "L2 cache is zeroed before each replay; weights and keys alternate between places that outgrow the L2 cache, "
        "activations do not; the attention rows write the step's own keys and values first"
    )


if __name__ == "__main__":
    sys.exit(main())

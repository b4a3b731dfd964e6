"""Reading kernel tables in the layout of aiconfigurator: three parquet files a GPU.

- `gemm_perf`: m tokens through n x k weights.
- `context_attention_perf`: `batch_size` whole prompts of `isl` tokens.
- `generation_attention_perf`: `batch_size` decodes whose context is isl + step.

Latencies there are milliseconds of one kernel of one layer; here they are microseconds. Only 16-bit rows with full
attention and heads of 128 are read; repeated rows count by their median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError

DTYPE = "bfloat16"
HEAD_DIM = 128
GEMM, CONTEXT, GENERATION = (
    f"{name}_perf.parquet" for name in ("gemm", "context_attention", "generation_attention")
)

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AicTables:
    """Measured kernel times of one GPU, us.

    Attributes:
        device: the GPU as its driver calls it.
        gemm: (n, k) -> tokens m -> time.
        context: (heads, key-value heads) -> (prompts, tokens each) -> time.
        generation: (heads, key-value heads) -> (decodes, context) -> time.
    """

    device: str
    gemm: dict[Shape, dict[int, float]]
    context: dict[Shape, dict[Shape, float]]
    generation: dict[Shape, dict[Shape, float]]


def is_aic_folder(folder: Path) -> bool:
    """Whether the folder holds tables in this layout."""
    return (folder / GEMM).is_file()


def device_of(folder: Path) -> str:
    """The GPU that the tables were taken on, as its driver calls it; empty when they do not say."""
    frame = _frame(folder / GEMM)
    return str(frame["device"].iloc[0]) if "device" in frame else ""


def read_aic_tables(folder: Path) -> AicTables:
    """Read the three files; UserError names the file and what is wrong with it."""
    rows = _rows(folder / GEMM, ["n", "k", "m"], {"gemm_dtype": DTYPE})
    gemm: dict[Shape, dict[int, float]] = {}
    for (n, k, m), us in rows.items():
        gemm.setdefault((n, k), {})[m] = us
    only = {"attn_dtype": DTYPE, "kv_cache_dtype": DTYPE, "head_dim": HEAD_DIM, "window_size": 0}
    heads = ["num_heads", "num_key_value_heads", "batch_size"]
    context: dict[Shape, dict[Shape, float]] = {}
    for (h, kv, batch, isl), us in _rows(folder / CONTEXT, [*heads, "isl"], only | {"step": 0}).items():
        context.setdefault((h, kv), {})[batch, isl] = us
    generation: dict[Shape, dict[Shape, float]] = {}
    for (h, kv, batch, step), us in _rows(folder / GENERATION, [*heads, "step"], only | {"isl": 1}).items():
        generation.setdefault((h, kv), {})[batch, step + 1] = us
    return AicTables(device_of(folder), gemm, context, generation)


def _frame(file: Path) -> Any:
    import pandas as pd

    try:
        return pd.read_parquet(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or 'not a parquet file'})") from None
    except ValueError as error:
        raise UserError(f"{file}: not a parquet file ({error})") from None


def _rows(file: Path, columns: Sequence[str], only: dict[str, Any]) -> dict[tuple[int, ...], float]:
    frame = _frame(file)
    # Older tables have no column for a sliding window: all of their rows are full attention.
    only = {name: value for name, value in only.items() if name != "window_size" or name in frame}
    if lacking := [name for name in (*columns, *only, "latency") if name not in frame]:
        raise UserError(f"{file}: no column {', '.join(lacking)}")
    for name, value in only.items():
        frame = frame[frame[name] == value]
    if frame.empty:
        raise UserError(f"{file}: no rows with {', '.join(f'{n} = {v}' for n, v in only.items())}")
    if frame["latency"].min() <= 0 or frame[list(columns)].min().min() < 0:
        raise UserError(f"{file}: sizes and latencies must be positive")
    medians = frame.groupby(list(columns), sort=True)["latency"].median()
    return {tuple(int(x) for x in key): 1e3 * float(ms) for key, ms in medians.items()}

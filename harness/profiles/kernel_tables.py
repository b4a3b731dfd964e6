"""Reading measured kernel tables (attention.csv, dense.csv, per_sequence.csv) as they were published."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UserError

# How often a layer runs each of the dense kernels of a Llama-like model, and what runs once a step.
PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
ONCE = ("embedding", "final_layernorm")
# In tables of models that have it: norms of queries and keys, one kernel for both.
OPTIONAL_PER_LAYER = {"qk_norm": 1}

AttentionKey = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class KernelTables:
    """Measured kernel times, us."""

    attention: dict[AttentionKey, float]  # (prefill chunk, kv before it, decodes, ctx of each) -> one layer
    dense: dict[str, dict[int, float]]  # kernel -> tokens -> one call
    per_sequence: dict[int, float]  # requests -> output head + sampler
    head: dict[int, float] = field(default_factory=dict)  # requests -> output head
    sampler: dict[int, float] = field(default_factory=dict)  # requests -> sampler

    def dense_tokens(self) -> list[int]:
        """Token counts that every dense kernel was measured at, ascending."""
        return sorted(set.intersection(*(set(self.dense[k]) for k in (*PER_LAYER, *ONCE))))


def per_layer_us(tables: KernelTables, tokens: int) -> float:
    """All dense kernels of one layer at a measured token count, us."""
    optional = {kernel: times for kernel, times in OPTIONAL_PER_LAYER.items() if kernel in tables.dense}
    return sum(times * tables.dense[kernel][tokens] for kernel, times in (PER_LAYER | optional).items())


def once_us(tables: KernelTables, tokens: int) -> float:
    """Embedding and final norm at a measured token count, us."""
    return sum(tables.dense[kernel][tokens] for kernel in ONCE)


def read_kernel_tables(folder: Path) -> KernelTables:
    """Read the three files of a folder; UserError names file and line of what is wrong."""
    attention: dict[AttentionKey, float] = {}
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    for _, row in _rows(folder / "attention.csv", columns):
        attention[row[0], row[1], row[2], row[3]] = row[4]  # type: ignore[index]
    dense: dict[str, dict[int, float]] = {}
    for name, row in _rows(folder / "dense.csv", ("tokens",)):
        dense.setdefault(name, {})[int(row[0])] = row[1]
    missing = [kernel for kernel in (*PER_LAYER, *ONCE) if kernel not in dense]
    if missing:
        raise UserError(f"{folder / 'dense.csv'}: no rows for {', '.join(missing)}")
    per_sequence: dict[str, dict[int, float]] = {}
    for name, row in _rows(folder / "per_sequence.csv", ("sequences",)):
        per_sequence.setdefault(name, {})[int(row[0])] = row[1]
    for kernel in ("lm_head", "sampler"):
        if kernel not in per_sequence:
            raise UserError(f"{folder / 'per_sequence.csv'}: no rows for {kernel}")
    head, sampler = per_sequence["lm_head"], per_sequence["sampler"]
    both = {n: head[n] + sampler[n] for n in sorted(head) if n in sampler}
    return KernelTables(attention, dense, both, head, sampler)


def measured_on(folder: Path) -> tuple[str, str, int] | None:
    """GPU, model and GPUs that share it, as profile_meta.yaml beside the tables says; None if it does not."""
    import yaml

    try:
        meta = yaml.safe_load((folder / "profile_meta.yaml").read_text(encoding="utf-8"))
        return str(meta["gpu"]), str(meta["model"]), 1
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return None


def _rows(file: Path, columns: tuple[str, ...]) -> list[tuple[str, tuple[float, ...]]]:
    """(layer or "", (*columns as int, time)) of each row."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle)
            lacking = [c for c in (*columns, "time_us") if c not in (reader.fieldnames or ())]
            if lacking:
                raise UserError(f"{file}: line 1: no column {', '.join(lacking)}")
            out = []
            for row in reader:
                try:
                    values = (*(int(row[c]) for c in columns), float(row["time_us"]))
                except (TypeError, ValueError):
                    raise UserError(f"{file}: line {reader.line_num}: not a row of numbers") from None
                if values[-1] <= 0 or min(values) < 0:
                    raise UserError(f"{file}: line {reader.line_num}: sizes and times must be positive")
                out.append((row.get("layer") or "", values))
            return out
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None

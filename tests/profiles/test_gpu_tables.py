"""Tables over sizes and geometries: which rows are read, and what is said of damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.profiles.aic_tables import CONTEXT, GEMM, GENERATION, device_of, is_aic_folder, read_aic_tables


def write(folder: Path, **changes: Any) -> None:
    import pandas as pd

    gemm = {"gemm_dtype": "bfloat16", "m": 1, "n": 4096, "k": 4096, "latency": 0.02, "device": "NVIDIA X"}
    attention = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "attn_dtype": "bfloat16"}
    attention |= {"kv_cache_dtype": "bfloat16", "batch_size": 4, "latency": 0.03, "window_size": 0}
    context, generation = attention | {"isl": 512, "step": 0}, attention | {"isl": 1, "step": 1023}
    for name, row in ((GEMM, gemm), (CONTEXT, context), (GENERATION, generation)):
        others = [row | {"latency": 0.05}, row | {"latency": 0.04}]
        others.append(row | {"gemm_dtype": "fp8"} if name == GEMM else row | {"kv_cache_dtype": "fp8"})
        if name != GEMM:
            others += [row | {"head_dim": 64}, row | {"window_size": 128}]
        pd.DataFrame([row | changes, *others]).to_parquet(folder / name)


def test_the_right_rows_are_read_in_microseconds(tmp_path: Path) -> None:
    write(tmp_path)
    tables = read_aic_tables(tmp_path)
    assert is_aic_folder(tmp_path)
    assert device_of(tmp_path) == tables.device == "NVIDIA X"
    # Three equal rows: the median. Context is what was there and the new token.
    assert tables.gemm == {(4096, 4096): {1: pytest.approx(40.0)}}
    assert tables.context == {(32, 8): {(4, 512): pytest.approx(40.0)}}
    assert tables.generation == {(32, 8): {(4, 1024): pytest.approx(40.0)}}


def test_damage_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{GEMM}: cannot be read"):
        read_aic_tables(tmp_path)
    write(tmp_path, latency=-1.0)
    with pytest.raises(UserError, match=rf"{GEMM}: sizes and latencies must be positive"):
        read_aic_tables(tmp_path)
    write(tmp_path)
    (tmp_path / CONTEXT).write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=CONTEXT):
        read_aic_tables(tmp_path)
    write(tmp_path)
    import pandas as pd

    pd.DataFrame({"latency": [1.0]}).to_parquet(tmp_path / GENERATION)
    with pytest.raises(UserError, match=rf"{GENERATION}: no column num_heads"):
        read_aic_tables(tmp_path)

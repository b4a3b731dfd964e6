"""A trace survives the way to a file and back, or the reader says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import UserError
from workloads.digest import requests_sha256
from workloads.five_phase import build
from workloads.request import Workload
from workloads.trace_parquet import export, load


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build(5, phases="2", rate_scale=0.05, slo_factor=1.5)


@pytest.fixture
def trace(workload: Workload, tmp_path: Path) -> Path:
    path = tmp_path / "trace.parquet"
    export(workload, path)
    return path


def test_nothing_is_lost(workload: Workload, trace: Path) -> None:
    back = load(trace)
    assert requests_sha256(back.requests) == workload.sha256 == back.sha256
    for name in ("name", "seed", "tenants", "phases", "corpus_sha256", "slo_factor", "notes"):
        assert getattr(back, name) == getattr(workload, name)
    assert back.requests[0].segments == workload.requests[0].segments
    assert {request.cancel_ns for request in back.requests} == {r.cancel_ns for r in workload.requests}
    assert [path.name for path in trace.parent.iterdir()] == ["trace.parquet"]


def test_the_same_workload_is_the_same_file(workload: Workload, trace: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.parquet"
    export(workload, again)
    assert again.read_bytes() == trace.read_bytes()


def test_a_truncated_file_is_refused(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"trace\.parquet: not a readable trace"):
        load(trace)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.parquet: not a readable trace"):
        load(tmp_path / "none.parquet")


def test_another_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(UserError, match="not a trace of this project"):
        load(path)


@pytest.mark.parametrize("column", ["intended_ns", "prompt"])
def test_a_changed_request_is_noticed(trace: Path, column: str) -> None:
    table = pq.read_table(trace)
    values = table.column(column).to_pylist()
    values[3] = values[3] + 1 if column == "intended_ns" else [*values[3][:-1], 7]
    index = table.schema.get_field_index(column)
    pq.write_table(
        table.set_column(
            index, table.schema.field(column), pa.array(values, type=table.schema.field(column).type)
        ),
        trace,
    )
    with pytest.raises(UserError, match="do not match the sha256"):
        load(trace)


def test_a_folder_that_is_not_there_is_said_so(workload: Workload, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--export: cannot write"):
        export(workload, tmp_path / "no" / "trace.parquet")

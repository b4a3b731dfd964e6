"""`scripts/time_gpu.py` on a CPU with a tiny model: what it writes, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import RunFailed, UserError
from harness.profiles import load_model, thin
from harness.profiles.gpu_numbers import of_kernel_tables
from harness.profiles.kernel_tables import KernelTables, read_kernel_tables
from scripts import make_profile, time_gpu
from scripts.gpu_timing import rows
from scripts.gpu_timing.compare import Difference, compare
from scripts.gpu_timing.device import open_device, parse_readings
from scripts.gpu_timing.drift import Sentinel
from scripts.gpu_timing.model import load_shape
from scripts.gpu_timing.rows import ATTENTION, DENSE, PER_SEQUENCE, Block, Row
from scripts.gpu_timing.session import Clock, Session
from scripts.gpu_timing.store import Store
from scripts.gpu_timing.timer import Sample
from scripts.gpu_timing.work import Ceilings, work_of

# the rows


def tables_of(blocks: list[Block]) -> KernelTables:
    """Tables that hold every row of the blocks, each at 1 us."""
    taken = [row for block in blocks for row in block.rows]
    dense: dict[str, dict[int, float]] = {}
    for row in taken:
        if row.table == DENSE:
            dense.setdefault(row.layer, {})[row.sizes[0]] = 1.0
    attention = {(*row.sizes,): 1.0 for row in taken if row.table == ATTENTION}
    heads = {row.sizes[0]: 1.0 for row in taken if row.table == PER_SEQUENCE}
    return KernelTables(attention, dense, heads, heads, heads)  # type: ignore[arg-type]


def test_every_prefix_of_the_blocks_that_a_cut_off_leaves_makes_a_profile() -> None:
    blocks = rows.full_blocks(qk_norm=False)
    first = next(i for i, block in enumerate(blocks) if block.name == "prefill") + 1
    assert first == 3
    shape = load_model("llama-3.1-8b").shape
    for count in range(first, len(blocks) + 1):
        content: Any = make_profile.build(tables_of(blocks[:count]), "a source")
        mixed = [block for block in blocks[:count] if block.name.startswith("mixed")]
        assert len(content.get("mixed", {"n": []})["n"]) == len(mixed)
        of_gpu: Any = of_kernel_tables(tables_of(blocks[:count]), shape)
        assert of_gpu.get("mixed", {"n": []})["n"] == content.get("mixed", {"n": []})["n"]
    assert content["mixed"]["n"] == [1, 2, 4, 8, 16, 32, 64, 128]
    tokens = [t for t in range(1, 2049) if thin.keep_tokens(t)]
    assert content["dense"]["tokens"] == tokens
    assert content["per_sequence"]["sequences"] == [n for n in range(1, 257) if thin.keep_sequences(n)]
    assert content["prefill"]["chunk"] == list(thin.CHUNKS)


def test_no_row_is_in_two_blocks_and_the_held_out_ones_are_off_the_grid() -> None:
    blocks = rows.full_blocks(qk_norm=False)
    taken = [row for block in blocks for row in block.rows]
    assert len(taken) == len(set(taken))
    grid = {row for block in blocks if not block.name.startswith("held out") for row in block.rows}
    held_out = [row for block in blocks if block.name.startswith("held out") for row in block.rows]
    assert held_out
    assert not grid & {*held_out}
    for row in held_out:
        if row.table == ATTENTION:
            assert row.sizes[0] not in rows.FULL.chunks
            assert row.sizes[2] not in rows.FULL.decodes


def test_a_model_with_norms_of_queries_and_keys_has_their_rows() -> None:
    with_norm, without = (rows.full_blocks(qk_norm=wanted) for wanted in (True, False))
    layers = {row.layer for block in with_norm for row in block.rows} - {
        r.layer for b in without for r in b.rows
    }
    assert layers == {"qk_norm"}


def test_rows_are_taken_in_one_seeded_order() -> None:
    block = rows.full_blocks(qk_norm=False)[1]
    assert rows.shuffled(block, 1) == rows.shuffled(block, 1)
    assert rows.shuffled(block, 1) != rows.shuffled(block, 2)
    assert sorted(rows.shuffled(block, 1)) == sorted(block.rows)


def test_the_least_work_of_rows_is_known() -> None:
    shape = load_shape("llama-3.1-8b", 1)
    gemm = work_of(Row(DENSE, "qkv_proj", (16,)), shape)
    assert gemm.flops == 2 * 16 * 6144 * 4096
    assert gemm.bytes == 2 * (6144 * 4096 + 16 * (6144 + 4096))
    decode = work_of(Row(ATTENTION, "", (0, 0, 256, 16383)), shape)
    assert decode.bytes == pytest.approx(256 * 16384 * 4096, rel=0.001)
    prefill = work_of(Row(ATTENTION, "", (2048, 0, 0, 0)), shape)
    assert prefill.flops == pytest.approx(4 * 32 * 128 * 2048 * 2049 / 2)
    assert Ceilings(1e12, 1e9).us(work_of(Row(DENSE, "layernorm", (1,)), shape)) < 100


# the script


def run(out: Path, model: Path, *more: str) -> int:
    return time_gpu.main([str(out), "--device", "cpu", "--quick", "--model", str(model), *more])


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of one quick run."""
    out = tmp_path_factory.mktemp("timed") / "out"
    assert run(out, tiny_model) == 0
    return out


def test_a_quick_run_writes_tables_that_can_be_read(timed: Path) -> None:
    tables = read_kernel_tables(timed)
    quick = rows.QUICK
    assert tables.dense_tokens() == list(quick.tokens)
    assert tuple(tables.per_sequence) == quick.sequences
    assert {key for key in tables.attention if key[0] and key[2]} == {
        (c, k, n, x) for c in quick.chunks for k in quick.kv for n in quick.mixed for x in quick.ctx
    }
    assert len(tables.attention) == 24 + 6 + 6


def test_the_meta_file_says_how_and_holds_no_path_or_date(timed: Path, tiny_model: Path) -> None:
    text = (timed / "meta.json").read_text()
    meta = json.loads(text)
    assert meta["setup"]["device"] == "CPU"
    assert meta["setup"]["model"]["heads"] == 8
    assert meta["setup"]["torch"] == torch.__version__
    assert meta["rows"] == len((timed / "rows.jsonl").read_text().splitlines()) - 1
    assert meta["left_out"] == {}
    assert meta["drift"]["product_us"]
    assert str(timed) not in text


def test_a_second_run_has_nothing_left_to_do(timed: Path, tiny_model: Path) -> None:
    files = ("rows.jsonl", "attention.csv", "dense.csv", "per_sequence.csv")
    before = [(timed / name).read_bytes() for name in files]
    assert run(timed, tiny_model) == 0
    assert [(timed / name).read_bytes() for name in files] == before


def test_a_run_without_time_leaves_valid_files_and_the_next_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    assert run(tmp_path, tiny_model, "--budget-s", "0.1") == 0
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert {*meta["left_out"]} == {block.name for block in rows.quick_blocks(qk_norm=False)}
    assert (tmp_path / "dense.csv").read_text() == "layer,tokens,time_us\n"
    assert run(tmp_path, tiny_model) == 0
    assert len(read_kernel_tables(tmp_path).attention) == 36


def test_half_a_line_of_a_killed_run_is_taken_again(timed: Path, tmp_path: Path, tiny_model: Path) -> None:
    whole = (timed / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(whole[: int(len(whole) * 0.6)])
    assert run(tmp_path, tiny_model) == 0
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(lines) == len(whole.splitlines())
    assert len(read_kernel_tables(tmp_path).attention) == 36


@pytest.mark.parametrize("way", ["two", "faster"])
def test_a_mixed_batch_can_go_in_two_calls(tmp_path: Path, tiny_model: Path, way: str) -> None:
    assert run(tmp_path, tiny_model, "--mixed", way) == 0
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[1:]]
    mixed = [line for line in lines if line["table"] == ATTENTION and line["sizes"][0] and line["sizes"][2]]
    assert len(mixed) == 24
    if way == "faster":
        assert all(line["us"] == min(line["one call us"], line["two calls us"]) for line in mixed)


def test_a_gpu_times_graphs_and_its_kernel_is_right(root: Path, tmp_path: Path, tiny_model: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    words = [
        str(root / "scripts/time_gpu.py"),
        str(tmp_path),
        "--quick",
        "--no-fuse",
        "--model",
        str(tiny_model),
    ]
    subprocess.run([sys.executable, *words], check=True, timeout=300)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[1:]]
    assert {line["how"] for line in lines} == {"graph"}
    assert len(read_kernel_tables(tmp_path).attention) == 36


def test_times_of_another_set_up_are_refused(
    timed: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(timed, tiny_model, "--tensor-parallel", "2") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "another set-up" in error


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--model", "no-such-model"], "llama-3.1-8b"),
        (["--model", "llama-3.1-8b", "--tensor-parallel", "3"], "3 GPUs"),
        (["--tensor-parallel", "0"], "must be positive"),
        (["--device", "cpu", "--attention", "vllm"], "no attention kernel"),
        (["--compare", "no-such-folder"], "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, tiny_model: Path, words: list[str], needle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = ["--quick"] + ([] if "--model" in words else ["--model", str(tiny_model)])
    assert time_gpu.main([str(tmp_path / "out"), *defaults, *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert needle in error


def test_no_gpu_is_said(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert time_gpu.main([str(tmp_path / "out"), "--model", str(tiny_model)]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_it_needs_torch_and_the_checkout_only(root: Path, tmp_path: Path, tiny_model: Path) -> None:
    # A bare GPU machine has no pydantic, pandas, typer or rich, and this project is not installed there.
    lean = tmp_path / "lean.py"
    lean.write_text(
        "import runpy, sys\n"
        "for name in ('pydantic', 'pandas', 'pyarrow', 'typer', 'rich', 'yaml', 'vllm', 'jinja2', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "script, *sys.argv[1:] = sys.argv[1:]\n"
        "runpy.run_path(script, run_name='__main__')\n"
    )
    words = [str(root / "scripts/time_gpu.py"), str(tmp_path / "out"), "--device", "cpu", "--quick"]
    done = subprocess.run(
        [sys.executable, str(lean), *words, "--model", str(tiny_model)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "87 rows" in done.stdout


# rows that fail, and time that runs out


class Stub:
    """Stands in for the kernels where what matters is what the session does about them."""

    def __init__(self, fail: dict[Row, Exception]) -> None:
        self.fail, self.asked = fail, 0

    def estimate_us(self, row: Row) -> float:
        return 1.0

    def launches(self, row: Row) -> int:
        return 1

    def time(self, row: Row) -> dict[str, Any]:
        self.asked += 1
        if row in self.fail:
            raise self.fail[row]
        return {"us": 1.0}


class Steady:
    """A timer whose device slows down from the third look on."""

    def __init__(self) -> None:
        self.not_captured: list[str] = []
        self.looks = 0

    def time(self, calls: Any) -> Sample:
        self.looks += 1
        return Sample(1.0 if self.looks < 3 else 1.1, 0.0, 1, 1, "none")


def session_of(folder: Path, stub: Stub, said: list[str]) -> Session:
    sentinel = Sentinel(Steady(), lambda: None)
    sentinel.take()
    return Session(stub, Store(folder, {}), sentinel, Clock(60.0), 1, said.append)  # type: ignore[arg-type]


def decode(n: int) -> Row:
    return Row(ATTENTION, "", (0, 0, n, 16))


def test_a_block_with_a_row_that_failed_stays_out_of_the_tables(tmp_path: Path) -> None:
    blocks = [Block("small", (decode(1), decode(2))), Block("large", (decode(3), decode(4)))]
    session = session_of(tmp_path, Stub({decode(4): torch.OutOfMemoryError("full")}), [])
    session.run(blocks, dict)
    assert session.left_out == {"large": "1 row: not enough device memory"}
    lines = (tmp_path / "attention.csv").read_text().splitlines()
    assert lines[1:] == ["0,0,1,16,1", "0,0,2,16,1"]
    assert decode(3) in session.store.rows


def test_a_device_that_fails_again_and_again_ends_the_run(tmp_path: Path) -> None:
    block = Block("broken", tuple(map(decode, range(1, 21))))
    stub = Stub({row: RuntimeError("an illegal memory access\nand more") for row in block.rows})
    with pytest.raises(RunFailed, match="an illegal memory access"):
        session_of(tmp_path, stub, []).run([block], dict)
    assert stub.asked == 8


def test_drift_is_said_and_the_rows_beside_it_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.gpu_timing.session._SENTINEL_S", 0.0)
    said: list[str] = []
    session = session_of(tmp_path, Stub({}), said)
    session.run([Block("all", tuple(map(decode, range(1, 5))))], dict)
    assert session.drifted_rows > 0
    assert session.sentinel.drift_pct() > 3.0
    assert any("off its own median" in line for line in said)


# beside a public table


def test_a_table_beside_one_twice_as_slow(timed: Path, tmp_path: Path) -> None:
    for name in ("attention.csv", "dense.csv", "per_sequence.csv"):
        head, *lines = (timed / name).read_text().splitlines()
        slower = [f"{line.rsplit(',', 1)[0]},{2 * float(line.rsplit(',', 1)[1])}" for line in lines]
        (tmp_path / name).write_text("\n".join([head, *slower]) + "\n")
    found = {d.regime: d for d in compare(timed, tmp_path)}
    assert found["mixed attention"] == Difference("mixed attention", 24, 50.0, 50.0, -50.0)
    assert found["head and sampler"].rows == 3
    assert found["qkv_proj up to 256"].bias_pct == -50.0


def test_percentiles_are_nearest_rank_and_the_bias_is_signed() -> None:
    found = Difference.of("any", [(1.1, 1.0), (0.9, 1.0), (1.0, 1.0), (1.4, 1.0)])
    assert (found.rows, round(found.median_pct, 6), round(found.p90_pct, 6)) == (4, 10.0, 40.0)
    assert found.bias_pct == pytest.approx(10.0)


def test_a_table_beside_aiconfigurator_s(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The tables of one GPU beside those of another: what is compared is what both have, and units agree.
    ours = shared_dir / "data/rtxpro6000-llama31-8b"
    for name in ("attention.csv", "dense.csv", "per_sequence.csv"):
        (tmp_path / name).symlink_to(ours / name)
    model = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128}
    model |= {"intermediate": 14336, "vocab": 128256}
    (tmp_path / "meta.json").write_text(json.dumps({"setup": {"model": model}}))
    found = {d.regime: d for d in compare(tmp_path, shared_dir / "data/aic/h200_sxm")}
    assert {*found} == {"GEMM up to 256", "GEMM above 256", "prefill attention", "decode attention"}
    # An RTX PRO 6000 has a bit more than a third of an H200's bandwidth and less than half its products.
    assert 50 < found["GEMM up to 256"].bias_pct < 300
    assert 50 < found["GEMM above 256"].bias_pct < 300
    assert time_gpu.main([str(tmp_path), "--compare", str(shared_dir / "data/aic/h200_sxm")]) == 0
    assert "decode attention" in capsys.readouterr().out


def test_folders_without_common_rows_are_refused(timed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither gemm_perf"):
        compare(timed, tmp_path)


# the device


def test_readings_are_named_and_unsupported_ones_left_out() -> None:
    found = parse_readings("580.10, 1980, 1980, 3201, [N/A], 41\n")
    assert found["driver_version"] == "580.10"
    assert found["clocks.mem"] == "3201"
    assert "power.limit" not in found
    assert parse_readings("") == parse_readings("No devices were found") == {}


def test_a_cpu_is_no_gpu() -> None:
    device = open_device("cpu")
    assert (device.name, device.l2_bytes, device.dtype) == ("CPU", 0, torch.bfloat16)
    device.synchronize()

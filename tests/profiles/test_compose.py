"""Tables composed from a GPU's file and a model's shape: close to measured ones, sane everywhere, flagged.

Guards composition and its rules. The rows that no file holds are compared in test_step_error.py.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.profiles import StepTimeModel, load_profile
from harness.profiles import attention_rules as rules
from harness.profiles.attention import attention_of
from harness.profiles.communication import all_reduce_us, gather_us
from harness.profiles.compose import Composed, compose
from harness.profiles.gemm import GemmTimes, gemm_bytes, roofline_us
from harness.profiles.gpu import load_gpu
from harness.profiles.kernel_tables import read_kernel_tables
from harness.profiles.known_models import list_models, load_model
from harness.profiles.shape import ModelShape
from harness.profiles.step_error import summarise

GRIDS = ("a100-80g", "h100-80g", "h200-141g")
TABLES = {"rtx4090-24g": "rtx4090-llama31-8b", "rtxpro6000-96g": "rtxpro6000-llama31-8b"}
LLAMA = load_model("llama-3.1-8b").shape


@cache
def composed(gpu: str, model: str = "llama-3.1-8b", gpus: int = 1) -> Composed:
    return compose(load_gpu(gpu), load_model(model).shape, gpus)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_measured_profile_is_met_by_composing_it(name: str) -> None:
    measured, made = load_profile(f"{name}/llama-3.1-8b").tables, composed(name).tables
    assert made.decode.us == pytest.approx(measured.decode.us, rel=1e-9)
    assert made.prefill.us == pytest.approx(measured.prefill.us, rel=1e-9)
    assert made.mixed is not None and measured.mixed is not None
    assert made.mixed.us == pytest.approx(measured.mixed.us, rel=1e-9)
    assert made.dense.tokens == measured.dense.tokens
    assert made.dense.layer_us == pytest.approx(measured.dense.layer_us, rel=0.002)
    assert made.dense.once_us == pytest.approx(measured.dense.once_us, rel=0.002)
    assert made.per_sequence.us == pytest.approx(measured.per_sequence.us, rel=0.002)
    assert composed(name).not_measured == ()
    assert composed(name).extrapolated == ()


@pytest.mark.parametrize("gpu", ["a100-80g", "h100-80g", "rtx4090-24g", "t4-16g"])
def test_every_pair_composes_fast_and_grows_with_the_batch(gpu: str) -> None:
    slowest = 0.0
    for model in list_models():
        shape = load_model(model).shape
        for gpus in (1, 8):
            start = time.perf_counter()
            try:
                tables = compose(load_gpu(gpu), shape, gpus).tables
            except UserError:
                assert shape.heads % gpus
                continue
            slowest = max(slowest, time.perf_counter() - start)
            small, large = tables.dense.layer_us[0], tables.dense.layer_us[-1]
            # A layer reads each of its weights once at least.
            weights = sum(n * k for _, n, k in shape.shard(gpus).gemms)
            assert 2 * weights / (load_gpu(gpu).spec.bandwidth_gb_s * 1e3) < small < large
            assert tables.decode.us[-1] > tables.decode.us[0]
            assert tables.prefill.us[-1] > tables.prefill.us[0]
    assert slowest < 5.0  # a sanity bound only: under 0.2 s on an idle core


def test_composing_twice_gives_the_same_bits() -> None:
    gpu, shape = load_gpu("h100-80g"), load_model("qwen2.5-7b").shape
    assert compose(gpu, shape, 2) == compose(gpu, shape, 2)


@pytest.mark.parametrize("name", GRIDS)
def test_magnitudes_are_those_of_the_hardware(name: str) -> None:
    """Shares of the sheet as FIDELITY lists them: a factor of 1,000 or a wrong column cannot hide."""
    spec, gemms = load_gpu(name).spec, GemmTimes(load_gpu(name))
    for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        assert 0.5 < gemm_bytes(n, k, 1) / (spec.bandwidth_gb_s * 1e3) / gemms.us(n, k, 1) < 0.9
        assert 0.65 < 2.0 * 4096 * n * k / (spec.tflops * 1e6) / gemms.us(n, k, 4096) < 0.95
    attention = attention_of(load_gpu(name), 32, 8, 128)
    kv_us = 64 * 4096 * 2 * 8 * 128 * 2 / (spec.bandwidth_gb_s * 1e3)
    assert 0.7 < kv_us / attention.decode_us(64, 4096) < 0.95
    flops = 2.0 * 32 * 128 * 8192 * 8192
    assert 0.5 < flops / (spec.tflops * 1e6) / attention.prefill_us(8192, 0) < 0.7


def test_what_lies_between_and_beyond_the_sizes() -> None:
    gpu = load_gpu("h100-80g")
    gemms = GemmTimes(gpu)
    for m in (1, 64, 2048):
        below, above = gemms.us(16384, 4096, m), gemms.us(51200, 4096, m)
        assert below < gemms.us(28672, 4096, m) < above
        share = roofline_us(gpu.spec, 65536, 4096, m) / gemms.us(65536, 4096, m)
        assert roofline_us(gpu.spec, 128256, 4096, m) / gemms.us(128256, 4096, m) == pytest.approx(share)
    assert gemms.beyond(28672, 4096) is None
    assert gemms.beyond(128256, 4096) == "above the measured sizes (n > 65536)"
    assert composed("h100-80g").extrapolated == (
        "lm_head 128256 x 4096: above the measured sizes (n > 65536)",
    )


def test_shapes_between_measured_curves() -> None:
    """RTX tables hold five shapes; between two of them the share of the roofline lies between theirs."""
    gpu = load_gpu("rtxpro6000-96g")
    gemms = GemmTimes(gpu)

    def share(n: int, k: int, m: int) -> float:
        return roofline_us(gpu.spec, n, k, m) / gemms.us(n, k, m)

    for m in (1, 64, 512, 2048):
        low, high = sorted((share(4096, 14336, m), share(28672, 4096, m)))
        assert low <= share(20480, 4096, m) <= high
    # A quarter of the smallest product costs more than a quarter of its time: launching does not shrink.
    assert gemms.us(1024, 4096, 1) > 0.25 * gemms.us(4096, 4096, 1) + 1.0
    assert gemms.beyond(20480, 4096) == "by the roofline share of other shapes"


def test_regimes_without_rows_are_named() -> None:
    assert composed("h100-80g").not_measured == ("context", "mixed")
    assert composed("h100-80g", gpus=2).not_measured == ("context", "mixed", "communication")
    everything = ("decode", "prefill", "context", "mixed")
    assert composed("rtx4090-24g", "qwen3-8b").not_measured == everything
    assert composed("l4-24g").not_measured == everything
    wide = ModelShape(2048, 16, 32, 8, 64, 8192, 128256)
    odd = compose(load_gpu("h100-80g"), wide)
    assert odd.not_measured == everything
    assert any("32 heads and 8 key-value heads of 64" in said for said in odd.extrapolated)


def test_the_domain_is_that_of_the_tables() -> None:
    domain, tables = composed("h100-80g").domain, composed("h100-80g").tables
    assert tables.mixed is not None
    assert domain.max_tokens == tables.dense.tokens[-1] == 16384
    assert domain.max_sequences == tables.per_sequence.sequences[-1] == 1024
    assert domain.max_decodes == tables.decode.n[-1] == 1024
    assert domain.max_chunk == tables.prefill.chunk[-1] == tables.mixed.chunk[-1] == 16384
    assert domain.max_context == 65536


def test_several_gpus_share_the_work_and_pay_for_talking() -> None:
    gpu = load_gpu("h100-80g")
    one, two, four = (composed("h100-80g", gpus=g).tables.dense.layer_us for g in (1, 2, 4))
    assert one[-1] > two[-1] > four[-1]
    assert two[-1] > 0.5 * one[-1]
    assert all_reduce_us(gpu.spec, 2048, 4096, 1) == gather_us(gpu.spec, 8, 128256, 1) == 0.0
    # Ring: each of two GPUs sends all of 16.8 MB once, at 0.8 of 450 GB/s.
    assert all_reduce_us(gpu.spec, 2048, 4096, 2) == pytest.approx(10 + 2048 * 4096 * 2 / 360e3)
    silent = gpu.model_copy(
        update={
            "spec": gpu.spec.model_copy(update={"interconnect_latency_us": 0.0, "interconnect_gb_s": 1e12})
        }
    )
    without = compose(silent, LLAMA, 2).tables.dense.layer_us
    assert two[0] - without[0] == pytest.approx(2 * all_reduce_us(gpu.spec, 1, 4096, 2), rel=1e-6)


def test_a_model_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match="28 attention heads cannot be shared by 8 GPUs"):
        compose(load_gpu("h100-80g"), load_model("qwen2.5-7b").shape, 8)


def test_unlisted_key_value_heads_stand_for_sequences() -> None:
    gpu = load_gpu("h100-80g")
    many = attention_of(gpu, 32, 16, 128)
    assert many.decode_us(16, 4096) == pytest.approx(attention_of(gpu, 16, 8, 128).decode_us(32, 4096))
    between = attention_of(gpu, 28, 4, 128).decode_us(64, 4096)
    ends = sorted(attention_of(gpu, h, 4, 128).decode_us(64, 4096) for h in (16, 32))
    assert ends[0] <= between <= ends[1]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_rules_for_prior_tokens_and_mixed_steps_on_gpus_that_have_them(
    name: str, shared_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rules of the GPUs without such rows, on rows of those with them: that is what is known of their error.

    Given is what one row costs per key at full rate, which tables of longer prompts hold and these show in their
    longest prefixes.
    """
    gpu, profile = load_gpu(name), load_profile(f"{name}/llama-3.1-8b")
    rows = read_kernel_tables(shared_dir / "data" / TABLES[name]).attention
    row_us = (rows[2048, 16384, 0, 0] - rows[2048, 4096, 0, 0]) / 12288 / 2048
    full = rules.full_rows("fa2", gpu.spec.sms, 32, 4096, gpu.spec.bandwidth_gb_s, row_us)
    model = StepTimeModel(profile)
    context, mixed, plain, step = [], [], [], []
    for (q, kv, n, ctx), us in rows.items():
        if q and not n and kv >= 128 and (q, 0, 0, 0) in rows:
            context.append((rows[q, 0, 0, 0] + rules.context_us(q, kv, full, row_us)) / us - 1.0)
        if q and n and (q, kv, 0, 0) in rows and (0, 0, n, ctx) in rows:
            alone, decode = rows[q, kv, 0, 0], rows[0, 0, n, ctx]
            made = rules.mixed_us("fa2", q, n, ctx, alone, decode, rows[0, 0, 1, 16], full, row_us)
            mixed.append(made / us - 1.0)
            plain.append((alone + decode) / us - 1.0)
            rest = model.dense_us(q + n) / profile.layers
            step.append((rest + made) / (rest + us) - 1.0)
    with capsys.disabled():
        for what, errors in (
            ("context", context),
            ("mixed", mixed),
            ("mixed, plain sum", plain),
            ("mixed, whole step", step),
        ):
            e = summarise(errors)
            print(
                f"\n{name} rule, {what}: {e.rows} rows, median {e.median_pct:.1f}%, p90 {e.p90_pct:.1f}%, bias {e.bias_pct:+.1f}%",
                end="",
            )
    assert summarise(context).median_pct < 4.0
    assert summarise(mixed).median_pct < 15.0
    assert summarise(plain).median_pct > 1.5 * summarise(mixed).median_pct

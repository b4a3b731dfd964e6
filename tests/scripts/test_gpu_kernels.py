"""The kernels that `time_gpu.py` times: masks, lengths, places in the cache, and the check that guards them.

What it does not do is run them on a GPU: there the script makes the same check before it times anything.
"""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any

import pytest
import torch

from harness.profiles.shape import ModelShape
from scripts.gpu_timing import check
from scripts.gpu_timing.attention import ONE_CALL, TWO_CALLS
from scripts.gpu_timing.dense import Dense, add_norm, silu_and_mul
from scripts.gpu_timing.kernels import Sdpa, TorchFlash, Unavailable, VllmFlash, keys_of
from scripts.gpu_timing.kv import KvCache, Lens, Placed, TooLarge
from scripts.gpu_timing.rows import HEAD, ONCE, PER_LAYER, QK_NORM
from scripts.gpu_timing.timer import CpuTimer
from tests.scripts.conftest import attention_of

BF16 = torch.bfloat16


@pytest.mark.parametrize("page", [0, 16])
def test_attention_of_every_batch_is_that_of_plain_arithmetic(tiny: ModelShape, page: int) -> None:
    assert 0 < check.check(attention_of(tiny, Sdpa(page))) < check.TOLERANCE


class Wrong(Sdpa):
    """A kernel that does one thing wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__(16)
        self.fault = fault

    def __call__(self, query: torch.Tensor, placed: Placed, lens: Lens, prepared: Any) -> torch.Tensor:
        if self.fault == "ignores the last key":
            cut = tuple(max(k - 1, 1) for k in lens.keys)
            lens = Lens(lens.queries, cut, lens.cu_q, lens.cu_k, lens.used_k)
        out = super().__call__(query, placed, lens, prepared)
        if self.fault == "leaves a row unwritten":
            out[-1] = float("nan")
        if self.fault == "mixes up the sequences":
            out = out.flip(0)
        return out


class TopLeft(Sdpa):
    """Causal from the first key on: right without a context, wrong behind one."""

    def __call__(self, query: torch.Tensor, placed: Placed, lens: Lens, prepared: Any) -> torch.Tensor:
        outs, start = [], 0
        for i, q in enumerate(lens.queries):
            key, value = keys_of(placed, lens, i)
            outs.append(check.reference(query[start : start + q], key[:q], value[:q]).to(query.dtype))
            start += q
        return torch.cat(outs)


@pytest.mark.parametrize(
    "fault", ["ignores the last key", "leaves a row unwritten", "mixes up the sequences"]
)
def test_a_wrong_kernel_is_found(tiny: ModelShape, fault: str) -> None:
    with pytest.raises(check.WrongResult, match="relative error"):
        check.check(attention_of(tiny, Wrong(fault)))


def test_a_mask_aligned_to_the_first_key_is_found(tiny: ModelShape) -> None:
    with pytest.raises(check.WrongResult, match="relative error"):
        check.check(attention_of(tiny, TopLeft(16)))


def test_the_reference_is_torch_s_attention() -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(5, 4, 8), torch.randn(5, 4, 8), torch.randn(5, 4, 8)
    ours = check.reference(query, key, value)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), is_causal=True
    )
    torch.testing.assert_close(ours, theirs.transpose(0, 1))


@pytest.mark.parametrize("page", [0, 16])
def test_the_step_s_own_tokens_are_the_last_keys_of_their_sequences(tiny: ModelShape, page: int) -> None:
    attention = attention_of(tiny, Sdpa(page))
    (step,) = attention.steps((5, 20, 2, 33), 1, ONE_CALL)
    attention.run(step)
    own = attention.own[: step.rows.shape[0]].view(BF16).unflatten(1, (tiny.kv_heads, tiny.head_dim))
    (part,) = step.parts
    assert part.lens.keys == (25, 34, 34)
    start = 0
    for i, q in enumerate(part.lens.queries):
        key, value = keys_of(part.placed, part.lens, i)
        assert torch.equal(key[-q:], own[start : start + q])
        assert torch.equal(value[-q:], own[7 + start : 7 + start + q])
        start += q


@pytest.mark.parametrize("page", [0, 16])
def test_calls_go_round_places_that_do_not_overlap_and_outgrow_the_cache(tiny: ModelShape, page: int) -> None:
    attention = attention_of(tiny, Sdpa(page))
    sizes = (0, 0, 3, 63)
    steps = attention.steps(sizes, 64, ONE_CALL)
    # 192 keys of 128 bytes are 24 KiB; twice the L2 cache of 64 KiB takes six of them.
    assert len(steps) == 6
    seen: set[int] = set()
    for step in steps:
        placed = step.parts[0].placed
        if placed.table is None:
            start = (placed.key.data_ptr() - attention.cache._kv.data_ptr()) // placed.key[0].nbytes
            here = set(range(start, start + placed.key.shape[0]))
        else:
            here = set(placed.table.flatten().tolist())
        assert not seen & here
        seen |= here
    assert len(attention.calls(sizes, 64, ONE_CALL)) == 64


def test_two_calls_give_what_one_gives(tiny: ModelShape) -> None:
    attention = attention_of(tiny, Sdpa(16))
    (one,) = attention.steps((16, 40, 3, 70), 1, ONE_CALL)
    (two,) = attention.steps((16, 40, 3, 70), 1, TWO_CALLS)
    assert [part.lens.queries for part in two.parts] == [(16,), (1, 1, 1)]
    (whole,) = attention.run(one)
    torch.testing.assert_close(torch.cat(attention.run(two)), whole)


def test_a_small_cache_is_shared_by_pages_and_refused_without_them(tiny: ModelShape) -> None:
    lens = Lens.of([1] * 8, [64] * 8, "cpu")
    paged, flat = (KvCache(tiny, 256, page, dtype=BF16, device="cpu", seed=0) for page in (16, 0))
    (placed,) = paged.place(lens, 1)
    assert placed.table is not None
    assert placed.table.max() < 16
    assert placed.rows.max() < 2 * 256
    with pytest.raises(TooLarge, match="512 keys, room for 256"):
        flat.place(lens, 1)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("queries", [(1, 1, 1), (5, 1, 1)])
def test_torch_s_operator_takes_the_call(tiny: ModelShape, paged: bool, queries: tuple[int, ...]) -> None:
    # On meta tensors: names, types and number of the arguments are torch's own to check.
    kernel = TorchFlash(tiny, paged=paged)
    keys = tuple(300 + q for q in queries)
    lens = Lens.of(queries, keys, "meta")
    size = (4, 256) if paged else (sum(keys),)
    cache = [torch.empty(*size, tiny.kv_heads, tiny.head_dim, dtype=BF16, device="meta") for _ in range(2)]
    table = torch.empty(3, 2, dtype=torch.int32, device="meta") if paged else None
    query = torch.empty(sum(queries), tiny.heads, tiny.head_dim, dtype=BF16, device="meta")
    placed = Placed(cache[0], cache[1], table, torch.empty(0, device="meta"))
    assert kernel(query, placed, lens, None).shape == query.shape


def test_keys_are_split_for_grouped_decodes_only(tiny: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, Any]] = []
    kernel = TorchFlash(tiny, paged=True)

    def op(*args: Any, **named: Any) -> list[Any]:
        seen.append((args[8], named["num_splits"]))
        return [args[0]]

    monkeypatch.setattr(kernel, "_op", op)
    for queries in ((1, 1), (5, 1)):
        lens = Lens.of(queries, (9, 9), "cpu")
        empty = torch.empty(0)
        kernel(empty, Placed(empty, empty, empty, empty), lens, None)
    assert seen == [(False, None), (True, 1)]


def test_a_kernel_that_is_not_here_says_so(tiny: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Unavailable, match="not installed"):
        VllmFlash(tiny, (9, 0), BF16)


# the rows outside attention


@pytest.fixture(scope="module")
def dense() -> Dense:
    shape = ModelShape(64, 2, 8, 2, 16, 96, 512, qk_norm=True)
    return Dense(shape, max_tokens=8, max_sequences=4, l2_bytes=20000, dtype=BF16, device="cpu", fuse=False)


def test_every_layer_of_the_tables_runs(dense: Dense) -> None:
    widths = {
        "qkv_proj": 192,
        "o_proj": 64,
        "gate_up_proj": 192,
        "down_proj": 64,
        "act_fn": 96,
        "lm_head": 512,
    }
    for layer in (*PER_LAYER, QK_NORM, *ONCE, *HEAD):
        calls = dense.calls(layer, 3, 5)
        out: Any = calls[0]()
        assert len(calls) == 5
        if layer in widths:
            assert out.shape == (3, widths[layer])
    with pytest.raises(ValueError, match="no kernel called gate"):
        dense.calls("gate", 3, 1)


def test_matrix_products_go_round_copies_that_outgrow_the_cache(dense: Dense) -> None:
    # 192 x 64 weights are 24,576 bytes: three copies are more than three caches of 20,000.
    assert dense._weights["qkv_proj"].shape == (3, 192, 64)
    first, second = (dense.calls("qkv_proj", 3, 2)[i]() for i in (0, 1))
    again: Any = dense.calls("qkv_proj", 3, 4)[3]()
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert first.data_ptr() == second.data_ptr() == again.data_ptr()
    noise = dense._noise[: 3 * 64].view(3, 64)
    torch.testing.assert_close(again, noise @ dense._weights["qkv_proj"][0].t())


def test_the_small_kernels_compute_what_their_layers_do(dense: Dense) -> None:
    x, residual, scale = torch.randn(2, 64), torch.randn(2, 64), torch.randn(64)
    normed, total = add_norm(x, residual, scale)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale)
    gates = torch.randn(2, 10)
    torch.testing.assert_close(silu_and_mul(gates), gates[:, :5] * gates[:, :5].sigmoid() * gates[:, 5:])


def test_rotary_turns_pairs_and_leaves_values_alone() -> None:
    shape = ModelShape(64, 2, 2, 1, 4, 96, 512)
    dense = Dense(
        shape, max_tokens=4, max_sequences=1, l2_bytes=0, dtype=torch.float32, device="cpu", fuse=False
    )
    qkv, angle = torch.randn(1, shape.qkv), math.pi / 2
    angles = torch.tensor([[math.cos(angle)] * 2 + [math.sin(angle)] * 2])
    turned = dense._rotate(qkv, angles)
    assert turned.shape == (1, 3, 4)
    x = qkv[:, :12].view(1, 3, 4)
    torch.testing.assert_close(turned, torch.cat((-x[..., 2:], x[..., :2]), dim=-1), atol=1e-6, rtol=1e-6)


# timing


def test_a_sample_is_the_median_of_the_repeats_over_the_launches() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    sample = CpuTimer(3).time([call, call])
    assert (sample.launches, sample.repeats, sample.how) == (2, 3, "wall clock")
    assert sample.us > 0
    assert count == 7


def test_torch_has_what_the_cuda_timer_calls() -> None:
    capture = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= capture.keys()
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    for name in ("set_stream", "Stream", "graph_pool_handle", "synchronize", "mem_get_info", "_sleep"):
        assert callable(getattr(torch.cuda, name))
    assert issubclass(torch.OutOfMemoryError, RuntimeError)

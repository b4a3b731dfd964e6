"""The step-time model: padding, monotony, agreement with its tables, counters. No vLLM needed.

Guards the arithmetic of a step. Does not guard that the tables themselves describe the GPU: that is what
`test_step_error.py` and `test_validate.py` are for.
"""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import StepTimeModel, load_profile
from harness.profiles.capture import capture_sizes
from harness.profiles.model import outside_shares, unmeasured_shares

NAMES = ("rtx4090-24g/llama-3.1-8b", "rtxpro6000-96g/llama-3.1-8b")
# Measured kernels are not monotone to the last per cent: a larger batch may take a better tiling.
DENSE_NOISE = 0.04
ATTENTION_NOISE = 0.15


@cache
def model_of(name: str) -> StepTimeModel:
    return StepTimeModel(load_profile(name))


def test_capture_sizes_follow_the_limits() -> None:
    wide = capture_sizes(256, 2048)
    assert wide[:5] == (1, 2, 4, 8, 16)
    assert wide[-1] == 512
    assert len(wide) == 51
    assert capture_sizes(1024, 8192) == wide
    assert capture_sizes(20, 2048)[-3:] == (24, 32, 40)
    assert 20 in capture_sizes(20, 2048)
    assert capture_sizes(256, 300)[-2:] == (288, 300)


@pytest.mark.parametrize(("seqs", "tokens"), [(256, 2048), (1024, 8192), (64, 512), (20, 2048), (256, 300)])
def test_capture_sizes_are_those_of_the_pin(seqs: int, tokens: int) -> None:
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from vllm.config import CUDAGraphMode
    from vllm.config.vllm import VllmConfig

    compilation = SimpleNamespace(
        max_cudagraph_capture_size=None,
        cudagraph_capture_sizes=None,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        pass_config=SimpleNamespace(enable_sp=False),
        post_init_cudagraph_sizes=lambda: None,
        compile_sizes=[],
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        performance_mode="balanced",
        uniform_decode_query_len=1,
    )
    VllmConfig._set_cudagraph_sizes(config)
    assert tuple(compilation.cudagraph_capture_sizes) == capture_sizes(seqs, tokens)


def test_batches_are_padded_to_captured_sizes() -> None:
    model = model_of(NAMES[0])
    assert [model.padded(t) for t in (1, 3, 5, 9, 250, 257, 512)] == [1, 4, 8, 16, 256, 272, 512]
    # Above the largest graph only GEMM tiles round up.
    assert [model.padded(t) for t in (513, 528, 2048)] == [528, 528, 2048]
    # 257 tokens run as 272: as slow as 272, slower than 256.
    assert model.dense_us(257) == model.dense_us(272) > model.dense_us(256)
    eager = StepTimeModel(load_profile(NAMES[0]), captured=())
    assert eager.padded(3) == 16


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_reproduced_at_their_own_points(name: str) -> None:
    profile, model = load_profile(name), model_of(name)
    tables = profile.tables
    mixed = tables.mixed
    assert mixed is not None
    index = 0
    for chunk in mixed.chunk:
        for kv in mixed.kv:
            for n in mixed.n:
                for ctx in mixed.ctx:
                    measured_us = mixed.us[index]
                    assert model.attention_us([(chunk, kv)], n, n * ctx) == pytest.approx(
                        measured_us, rel=0.01
                    )
                    index += 1
    for i, n in enumerate(tables.decode.n):
        for j, ctx in enumerate(tables.decode.ctx):
            measured_us = tables.decode.us[i * len(tables.decode.ctx) + j]
            assert model.attention_us([], n, n * ctx) == pytest.approx(measured_us, rel=0.01)
    for i, chunk in enumerate(tables.prefill.chunk):
        for j, kv in enumerate(tables.prefill.kv):
            measured_us = tables.prefill.us[i * len(tables.prefill.kv) + j]
            assert model.attention_us([(chunk, kv)], 0, 0) == pytest.approx(measured_us, rel=0.01)


def test_step_is_the_sum_of_its_parts() -> None:
    profile, model = load_profile(NAMES[0]), model_of(NAMES[0])
    tables = profile.tables
    dense, head = tables.dense, tables.per_sequence
    i, j = dense.tokens.index(512), head.sequences.index(1)
    expected = 32 * (dense.layer_us[i] + model.attention_us([(512, 0)], 0, 0)) + dense.once_us[i] + head.us[j]
    assert model.step_us([(512, 0)], 0, 0, 1) == pytest.approx(expected, rel=1e-12)
    # Logits are computed for an unfinished prefill too.
    assert model.step_us([(512, 0)], 0, 0, 0) == model.step_us([(512, 0)], 0, 0, 1)
    assert model.step_us([], 0, 0, 0) == 0.0


@given(
    name=st.sampled_from(NAMES),
    chunk=st.integers(0, 2048),
    more=st.integers(0, 2048),
    kv=st.integers(0, 16000),
    n=st.integers(0, 256),
    ctx=st.integers(16, 16000),
)
@settings(max_examples=300, deadline=None)
def test_more_tokens_take_no_less_time(name: str, chunk: int, more: int, kv: int, n: int, ctx: int) -> None:
    model = model_of(name)
    if chunk + n == 0:
        return
    small = model.step_us([(chunk, kv)] if chunk else [], n, n * ctx, n + 1)
    large = model.step_us([(chunk + more, kv)] if chunk + more else [], n, n * ctx, n + 1)
    attention = 32 * model.attention_us([(chunk, kv)] if chunk else [], n, n * ctx)
    assert large >= small - DENSE_NOISE * small - ATTENTION_NOISE * attention


@given(
    name=st.sampled_from(NAMES),
    chunk=st.sampled_from([0, 16, 256, 2048]),
    n=st.integers(1, 256),
    ctx=st.integers(16, 8000),
    factor=st.floats(1.0, 4.0),
)
@settings(max_examples=300, deadline=None)
def test_longer_contexts_take_no_less_time(name: str, chunk: int, n: int, ctx: int, factor: float) -> None:
    model = model_of(name)
    prefills = [(chunk, 0)] if chunk else []
    near = model.step_us(prefills, n, n * ctx, n)
    far = model.step_us(prefills, n, int(n * ctx * factor) + 1, n)
    assert far >= near - ATTENTION_NOISE * 32 * model.attention_us(prefills, n, n * ctx)


@given(
    name=st.sampled_from(NAMES),
    prefills=st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 30000)), max_size=20),
    n=st.integers(0, 1024),
    ctx=st.integers(1, 32768),
)
@settings(max_examples=300, deadline=None)
def test_any_batch_has_a_finite_positive_time(
    name: str, prefills: list[tuple[int, int]], n: int, ctx: int
) -> None:
    model = model_of(name)
    if prefills or n:
        us = model.step_us(prefills, n, n * ctx, n + len(prefills))
        assert 1_000 < us < 1e9
        assert model.attention_us(prefills, n, n * ctx) > 0


def test_short_prompts_together_are_not_one_long_prompt() -> None:
    model = model_of(NAMES[0])
    together = model.attention_us([(512, 0)] * 4, 0, 0)
    one = model.attention_us([(2048, 0)], 0, 0)
    alone = model.attention_us([(512, 0)], 0, 0)
    assert alone < together < 0.6 * one


def test_a_chunk_beyond_the_table_costs_what_its_pieces_cost() -> None:
    model = model_of(NAMES[1])
    pieces = sum(model.attention_us([(2048, kv)], 0, 0) for kv in (0, 2048, 4096, 6144))
    assert model.attention_us([(8192, 0)], 0, 0) == pytest.approx(pieces, rel=0.03)


def test_leaving_the_calibrated_domain_is_counted() -> None:
    model = StepTimeModel(load_profile(NAMES[1]))
    model.step_us([], 256, 256 * 1000, 256)
    assert model.steps_outside == 0
    model.step_us([], 300, 300 * 1000, 300)
    model.step_us([(4096, 0)], 0, 0, 1)
    model.step_us([(64, 20000)], 10, 10 * 100, 11)
    assert (model.steps, model.steps_outside) == (4, 3)
    assert model.outside == {"tokens": 1, "sequences": 1, "decodes": 1, "chunk": 1, "context": 1}
    assert outside_shares(model)["any"] == 0.75


def test_the_domain_is_that_of_the_tables() -> None:
    for name in NAMES:
        profile = load_profile(name)
        tables, domain = profile.tables, profile.domain
        assert tables.mixed is not None
        assert domain.max_tokens == tables.dense.tokens[-1]
        assert domain.max_sequences == tables.per_sequence.sequences[-1]
        assert domain.max_decodes == tables.decode.n[-1]
        assert domain.max_decodes_mixed == tables.mixed.n[-1]
        assert domain.max_chunk == tables.prefill.chunk[-1] == tables.mixed.chunk[-1]
        assert domain.max_context == tables.prefill.kv[-1] == tables.decode.ctx[-1] == tables.mixed.ctx[-1]


def test_without_a_mixed_table_parts_are_summed_and_flagged() -> None:
    profile = load_profile(NAMES[0])
    profile = profile.model_copy(update={"not_measured": ["mixed"]})
    profile.__dict__["tables"] = profile.tables.model_copy(update={"mixed": None})
    model = StepTimeModel(profile)
    both = model.attention_us([(512, 0)], 64, 64 * 1000)
    assert both == model.attention_us([(512, 0)], 0, 0) + model.attention_us([], 64, 64 * 1000)
    model.step_us([(512, 0)], 64, 64 * 1000, 65)
    model.step_us([], 64, 64 * 1000, 64)
    assert model.unmeasured == {"mixed": 1}
    assert unmeasured_shares(model) == {"any": 0.5, "mixed": 0.5}


@pytest.mark.parametrize("penalty", [1.0, 2.0])
def test_a_mixed_penalty_is_a_multiple_of_the_parts_and_leaves_other_steps_alone(penalty: float) -> None:
    plain, model = model_of(NAMES[0]), StepTimeModel(load_profile(NAMES[0]), mixed_penalty=penalty)
    for prefills in ([(512, 0)], [(64, 2048)], [(1024, 0), (300, 600)]):
        alone = plain.attention_us(prefills, 0, 0) + plain.attention_us([], 64, 64 * 1000)
        assert model.attention_us(prefills, 64, 64 * 1000) == pytest.approx(penalty * alone, rel=1e-2)
        assert model.attention_us(prefills, 0, 0) == plain.attention_us(prefills, 0, 0)
    assert model.step_us([], 64, 64 * 1000, 64) == plain.step_us([], 64, 64 * 1000, 64)


def test_a_step_is_looked_up_fast(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(NAMES[0])
    batches = {
        "decode 256": ([], 256, 256 * 1500, 256),
        "mixed 8+248": ([(256, 512)] * 8, 248, 248 * 1500, 256),
    }
    for what, batch in batches.items():
        times = 5000
        start = time.perf_counter()
        for _ in range(times):
            model.step_us(*batch)
        us = (time.perf_counter() - start) / times * 1e6
        with capsys.disabled():
            print(f"\nstep look-up, {what}: {us:.1f} us", end="")
        assert us < 500  # a sanity bound only: 4 to 10 us on an idle core

"""What is not modelled is refused by name, with exit code 2, wherever it can come in.

Guards the one table of refusals, and that each door asks it: a model's config.json, an arm's engine flags, a
row of a request, a measured run. Rows inside whole workload files: tests/profiles/test_validate_formats.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli import _run
from harness.engines.flags import EngineFlags
from harness.errors import UserError
from harness.profiles.known_models import MODELS
from harness.refusals import NOT_MODELLED, refuse_flags, refuse_model, refuse_row, refuse_run

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, ["MoE", "num_experts 128"]),
        ({"num_local_experts": 8}, ["MoE"]),
        ({"architectures": ["MixtralForCausalLM"]}, ["MoE", "MixtralForCausalLM"]),
        ({"n_routed_experts": 256, "kv_lora_rank": 512}, ["MoE", "MLA attention"]),
        ({"kv_lora_rank": 512, "q_lora_rank": 1536}, ["MLA attention"]),
        ({"vision_config": {"depth": 32}}, ["multimodal"]),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, ["multimodal"]),
        ({"text_config": {"num_experts": 16}}, ["MoE"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["quantised weights", "awq"]),
        ({"sliding_window": 4096}, ["sliding-window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding-window"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["state-space, linear or hybrid"]),
        ({"model_type": "mamba", "state_size": 16}, ["state-space"]),
        ({"architectures": ["JambaForCausalLM"]}, ["hybrid"]),
        ({"is_encoder_decoder": True}, ["encoder-decoder"]),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, ["encoder-decoder"]),
        ({"architectures": ["BertModel"]}, ["pooling"]),
        ({"architectures": ["GPTNeoXForCausalLM"]}, ["layers unlike Llama's"]),
        ({"hidden_act": "relu2"}, ["layers unlike Llama's"]),
        ({"num_kv_shared_layers": 10}, ["share or skip"]),
    ],
)
def test_a_model_that_is_not_modelled(change: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        refuse_model(LLAMA | change, "somewhere/config.json")
    text = str(refused.value)
    assert text.startswith("somewhere/config.json: ")
    assert text.endswith("not modelled by the virtual engine")
    assert "\n" not in text
    for name in named:
        assert name in text


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 131072, "use_sliding_window": False},
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 262144},
        {"layer_types": ["full_attention", "full_attention"]},
        {"num_experts": 0, "quantization_config": None, "vision_config": {}},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        {"architectures": ["GraniteForCausalLM"], "model_type": "granite"},
        {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"},
    ],
)
def test_dense_decoders_pass(change: dict[str, Any]) -> None:
    refuse_model(LLAMA | change, "config.json")


def test_the_models_that_come_with_the_project_pass() -> None:
    files = sorted(MODELS.glob("*/config.json"))
    assert files
    for file in files:
        refuse_model(json.loads(file.read_text(encoding="utf-8")), str(file))


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("enable_lora", "true", "LoRA: not modelled"),
        ("max_lora_rank", "16", "LoRA"),
        ("speculative_config", '{method = "ngram"}', "speculative decoding"),
        ("pipeline_parallel_size", "2", "pipeline parallelism"),
        ("data_parallel_size", "2", "data parallelism"),
        ("quantization", '"fp8"', "quantised weights"),
        ("kv_cache_dtype", '"fp8"', "a quantised KV cache"),
        ("kv_transfer_config", '{kv_connector = "x"}', "KV transfer"),
        ("structured_outputs_config", '{backend = "xgrammar"}', "grammar-guided"),
        ("guided_decoding_backend", '"xgrammar"', "grammar-guided"),
        ("limit_mm_per_prompt", "{image = 1}", "multimodal input"),
        ("enable_expert_parallel", "true", "MoE"),
        ("cpu_offload_gb", "4", "offloading to CPU memory"),
        ("scheduler_cls", '"my.Scheduler"', "a scheduler class"),
        ("enable-lora", "true", "LoRA"),
        ("tensor_parallel_size", "2", "belongs to the profile"),
    ],
)
def test_an_arm_that_asks_for_it(
    flag: str,
    value: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arms = tmp_path / "arms.toml"
    arms.write_text(f'[[arm]]\nname = "a"\n[arm.engine_flags]\n{flag} = {value}\n', encoding="utf-8")
    assert _run(["run", "--arms", str(arms), "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert len(shown.strip().splitlines()) == 1, shown
    assert f"engine flag '{flag}'" in shown
    assert says in shown
    assert not (tmp_path / "out").exists()


def test_no_flag_that_works_is_refused() -> None:
    refuse_flags(EngineFlags().model_dump(), "here")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"lora_name": "sql"}, "LoRA"),
        ({"images": ["a.png"]}, "multimodal"),
        ({"guided_regex": "a+"}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "grammar"),
        ({"sub_requests": [{}]}, "a session whose calls wait"),
        ({"n": 2}, "several samples"),
    ],
)
def test_a_request_that_asks_for_it(row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"^trace.jsonl: line 3: .*{says}.*not modelled"):
        refuse_row({"input_length": 5} | row, "trace.jsonl: line 3")


def test_a_plain_request_passes() -> None:
    refuse_row({"n": 1, "images": [], "response_format": {"type": "text"}, "lora_name": None}, "here")


def test_everything_that_a_run_used_is_named_at_once() -> None:
    meta = {
        "engine_kwargs": {"data_parallel_size": 2, "enable_expert_parallel": True, "kv_cache_dtype": "fp8"},
        "resolved_config": {"speculative_config": {"method": "mtp"}},
    }
    with pytest.raises(UserError) as refused:
        refuse_run(meta, "run_meta.json")
    for name in ("data parallelism", "MoE", "a quantised KV cache", "speculative decoding"):
        assert name in str(refused.value)


def test_the_table_is_in_order() -> None:
    names = [feature.name for feature in NOT_MODELLED]
    assert len(set(names)) == len(names)
    flags = [flag for feature in NOT_MODELLED for flag in (*feature.flags, *feature.beside)]
    assert len(set(flags)) == len(flags)
    assert not set(flags) & set(EngineFlags.model_fields)


def test_bench_validate_refuses_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"request_id": "r-0", "input_toks": 5, "output_toks": 2, "arrival_time": 1.0}
    times = {"queued_ts": 1.0, "scheduled_ts": 1.0, "first_token_ts": 1.1, "last_token_ts": 1.2}
    (tmp_path / "requests.jsonl").write_text(json.dumps(row | times), encoding="utf-8")
    meta = {"model": "m", "engine_kwargs": {"enable_lora": True, "pipeline_parallel_size": 2}}
    (tmp_path / "run_meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert _run(["validate", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert len(shown.strip().splitlines()) == 1
    assert "LoRA [enable_lora], pipeline parallelism [pipeline_parallel_size 2]: not modelled" in shown

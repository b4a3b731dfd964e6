"""What the virtual engine does not model, in one table, and where it can come in.

A feature of this table is refused by name wherever somebody asks for it: in a model's config.json, in an
arm's engine flags, in the description of a measured run, in a row of a workload or a trace. A guess in its
place would look like a figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError

# Parts of a run's description that hold settings, the most telling first.
SECTIONS = ("kv_cache", "resolved_config", "engine_kwargs", "engine_args", "hardware")
_PARTS = ("scheduler_config", "cache_config", "model_config", "parallel_config")


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that is not modelled, and the names by which it is asked for.

    Attributes:
        name: as it is known to users of vLLM.
        flags: arguments of vLLM's engine that ask for it, also where a run recorded them.
        beside: further arguments; recorded in a run they say nothing, since they have defaults.
        recorded: fields of vLLM's resolved configuration that are no arguments, or that only an arm may set.
        rows: fields of a request.
        model: keys of a model's config.json.
        classes: pattern of architectures and model types, searched in config.json and in a run.
        off: values that do not ask for it, beside None, false, and what is empty.
    """

    name: str
    flags: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    classes: str = ""
    off: tuple[Any, ...] = ()


_WINDOW = "sliding-window attention"
_HYBRID = "state-space, linear or hybrid layers"
_UNLIKE_LLAMA = "layers unlike Llama's (no gated MLP, or another order)"
_WINDOWED = {"sliding_attention", "local_attention", "chunked_attention"}
_PLAIN = {"full_attention", "attention"}
# Activations of a plain MLP, which has two matrices where Llama's has three.
_UNGATED = {"relu", "relu2", "gelu_new", "gelu_fast"}
# As vLLM 0.19 prints its offloading settings: any amount but 0.0.
_OFFLOADED = re.compile(r"cpu_offload_gb=(?!0(\.0*)?\b)")
# vLLM's own schedulers, and a value of which only the type was recorded.
_SILENT = re.compile(r"vllm\.v1\.core\.sched|^<(torch\.)?(dtype|str|int|type|Enum)>$")
# Belong to the GPU or the model, and so to the profile.
_OF_THE_PROFILE = (
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "model",
    "dtype",
)
_SIXTEEN_BIT = ("auto", "bfloat16", "float16", "half", "torch.bfloat16", "torch.float16")
NOT_MODELLED: tuple[Feature, ...] = (
    Feature(
        "LoRA",
        flags=("enable_lora", "lora_modules", "lora_config"),
        beside=(
            *("max_loras", "max_lora_rank", "max_cpu_loras", "fully_sharded_loras", "default_mm_loras"),
            *("lora_dtype", "lora_target_modules"),
        ),
        rows=("lora", "lora_name", "lora_request", "lora_path", "lora_int_id"),
    ),
    Feature(
        "multimodal input",
        flags=("limit_mm_per_prompt", "multimodal_config", "mm_encoder_only", "enable_mm_embeds"),
        beside=("mm_processor_kwargs", "mm_encoder_tp_mode", "media_io_kwargs"),
        recorded=("is_multimodal_model",),
        rows=(
            *("image", "images", "image_url", "image_data", "video", "videos", "audio", "audios"),
            *("multi_modal_data", "mm_features", "mm_hashes"),
        ),
        model=("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual"),
        classes=r"VL|Vision|Llava|Pixtral|Mllama|Audio|Omni|Multi[Mm]odal|OCR|_vl\b|4MM",
    ),
    Feature(
        "grammar-guided (structured) output",
        beside=("structured_outputs_config", "guided_decoding_backend", "guided_decoding_config"),
        rows=(
            *("structured_outputs", "guided_decoding", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "response_format", "json_schema", "grammar"),
        ),
        off=({"type": "text"},),
    ),
    Feature("pipeline parallelism", flags=("pipeline_parallel_size",), off=(1,)),
    Feature(
        "data parallelism",
        flags=("data_parallel_size",),
        beside=("data_parallel_size_local", "data_parallel_rank", "data_parallel_backend"),
        off=(0, 1),
    ),
    Feature(
        "context parallelism",
        flags=("decode_context_parallel_size", "prefill_context_parallel_size"),
        off=(1,),
    ),
    Feature(
        "MoE (mixture of experts)",
        flags=("enable_expert_parallel", "enable_eplb"),
        beside=("moe_backend", "all2all_backend", "eplb_config", "expert_placement_strategy"),
        recorded=("is_moe_model",),
        model=("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"),
        classes=r"(?i)moe|mixtral|dbrx|gpt_?oss|deepseek|llama4|arctic|grok|minimax|longcat|kimi",
        off=(0, 1),
    ),
    Feature(
        "quantised weights",
        flags=("quantization", "quantization_config"),
        recorded=("quant_config",),
        model=("quantization_config", "compression_config"),
    ),
    Feature(
        "a quantised KV cache",
        flags=("kv_cache_dtype",),
        beside=("kv_cache_dtype_skip_layers", "calculate_kv_scales"),
        recorded=("cache_dtype",),
        off=_SIXTEEN_BIT,
    ),
    Feature("weights that are not 16-bit", recorded=("dtype",), off=_SIXTEEN_BIT),
    Feature(
        "speculative decoding",
        flags=("speculative_config", "speculative_model", "num_speculative_tokens"),
        beside=("spec_method", "spec_model", "spec_tokens"),
        off=(0,),
    ),
    Feature(
        "KV transfer",
        flags=("ec_transfer_config",),
        recorded=("kv_transfer_config",),
        rows=("kv_transfer_params",),
    ),
    Feature(
        "offloading to CPU memory",
        flags=("cpu_offload_gb",),
        recorded=("kv_offloading_size",),
        beside=("kv_offloading_backend", "offload_backend", "offload_group_size"),
        off=(0, 0.0),
    ),
    Feature("dual-batch overlap", flags=("enable_dbo",)),
    Feature("a scheduler class of one's own", flags=("scheduler_cls",)),
    Feature("prompt embeddings", flags=("enable_prompt_embeds",), rows=("prompt_embeds",)),
    Feature(
        "pooling (embedding, scoring)",
        beside=("runner", "convert", "pooler_config"),
        recorded=("runner_type",),
        rows=("pooling_params",),
        classes=r"Bert|Roberta|SequenceClassification|RewardModel|EmbeddingModel",
        off=("auto", "generate"),
    ),
    Feature(
        "several samples of one prompt", rows=("n", "best_of", "beam_width", "use_beam_search"), off=(1,)
    ),
    Feature("a session whose calls wait for one another", rows=("sub_requests",)),
    Feature("MLA attention", model=("kv_lora_rank", "q_lora_rank"), classes=r"MLA|MiniCPM3", off=(0,)),
    Feature(
        _HYBRID,
        model=(
            *("mamba_d_state", "mamba_expand", "mamba_d_ssm", "mamba_num_heads", "ssm_cfg", "ssm_state_size"),
            *("state_size", "linear_num_key_heads", "linear_attn_config", "full_attention_interval"),
            *("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "conv_L_cache"),
        ),
        classes=r"(?i)mamba|jamba|bamba|zamba|falcon_?h1|nemotron_?h|rwkv|recurrent|qwen3_?next|qwen3_5"
        r"|hybrid|lfm2|plamo2|kimi_?linear",
    ),
    Feature(
        "an encoder-decoder",
        recorded=("is_encoder_decoder",),
        model=("is_encoder_decoder", "num_encoder_layers", "encoder_layers"),
        classes=r"(?i)\bm?t5|bart|whisper|pegasus|marian",
    ),
    Feature("layers that share or skip keys and values", model=("num_kv_shared_layers", "block_configs")),
    Feature(
        _UNLIKE_LLAMA,
        model=("alibi",),
        classes=r"GPT2|GPTNeoX|GPTJ|GPTBigCode|CodeGen|OPT(ForCausalLM|Config)|Bloom|^Falcon(ForCausalLM|Config)"
        r"|RWForCausalLM|^Phi(ForCausalLM|Config)|Phi3Small|Starcoder2|M[Pp][Tt](ForCausalLM|Config)|Persimmon"
        r"|Nemotron(ForCausalLM|Config)|DeciLM|Gemma3n|^Arcee|^Apertus|Jais",
    ),
)


def refuse_model(config: Mapping[str, Any], where: str) -> None:
    """UserError when a model's config.json describes what is not modelled; `where` is the file."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    called = [str(name) for part in parts for name in _as_list(part.get("architectures"))]
    called += [str(part["model_type"]) for part in parts if part.get("model_type")]
    found: dict[str, str] = {}
    for feature in NOT_MODELLED:
        for evidence in _in_model(feature, parts, called):
            found.setdefault(feature.name, evidence)
    for part in parts:
        window = _window(part)
        if window:
            found.setdefault(_WINDOW, window)
        other = {str(kind) for kind in _as_list(part.get("layer_types"))} - _PLAIN - _WINDOWED
        if other:
            found.setdefault(_HYBRID, f"layer_types {', '.join(sorted(other))}")
        if part.get("hidden_act") in _UNGATED:
            found.setdefault(_UNLIKE_LLAMA, f"hidden_act {part['hidden_act']}")
    _refuse(found, where)


def refuse_flags(flags: Mapping[str, Any], where: str) -> None:
    """UserError when engine flags name what is not modelled, whatever their value."""
    known = {flag: feature.name for feature in NOT_MODELLED for flag in (*feature.flags, *feature.beside)}
    for flag in flags:
        name = str(flag).replace("-", "_")
        if name in known:
            raise UserError(
                f"{where}: engine flag {flag!r}: {known[name]}: not modelled by the virtual engine; "
                "take the flag out"
            )
        if name in _OF_THE_PROFILE:
            raise UserError(
                f"{where}: engine flag {flag!r} belongs to the profile, not to an arm: "
                "choose another with --profile (GPU/MODEL-tpN for N GPUs)"
            )


def refuse_row(row: Mapping[str, Any], where: str) -> None:
    """UserError when a request of a workload or trace asks for what is not modelled."""
    _refuse(
        {
            feature.name: _shown(field, row[field])
            for feature in NOT_MODELLED
            for field in feature.rows
            if field in row and _asks(row[field], feature.off)
        },
        where,
    )


def refuse_run(meta: Mapping[str, Any], where: str) -> None:
    """UserError when a run's description (run_meta.json) shows that it used what is not modelled."""
    found: dict[str, str] = {}
    tags = [
        tag.strip("<>")
        for name in ("hf_config", "hf_text_config", "architectures", "architecture", "model_type")
        for value in settings(meta, name)
        for tag in (value if isinstance(value, list) else [value])
        if isinstance(tag, str)
    ]
    for feature in NOT_MODELLED:
        for name in (*feature.flags, *feature.recorded):
            for value in settings(meta, name):
                if _asks(value, feature.off) and not _SILENT.search(str(value)):
                    found.setdefault(feature.name, _shown(name, value))
        for tag in tags:
            if feature.classes and re.search(feature.classes, tag):
                found.setdefault(feature.name, tag[:60])
    for value in settings(meta, "sliding_window"):
        if _asks(value, ()):
            found.setdefault(_WINDOW, _shown("sliding_window", value))
    for value in settings(meta, "uva"):
        if _OFFLOADED.search(str(value)):
            found.setdefault("offloading to CPU memory", str(value)[:60])
    _refuse(found, where)


def settings(meta: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Every value that a run's description holds under that name, the most telling first."""
    for section in SECTIONS:
        part = meta.get(section)
        if not isinstance(part, Mapping):
            continue
        first = [part[key] for key in _PARTS if key in part]
        for inner in (*first, *(value for key, value in part.items() if key not in _PARTS)):
            if isinstance(inner, Mapping) and name in inner:
                yield inner[name]
        if name in part:
            yield part[name]
    if name in meta:
        yield meta[name]


def _in_model(feature: Feature, parts: list[Mapping[str, Any]], called: list[str]) -> Iterator[str]:
    for part in parts:
        for key in feature.model:
            if key in part and _asks(part[key], feature.off):
                yield _shown(key, part[key])
    if feature.classes:
        yield from (name for name in called if re.search(feature.classes, name))


def _window(config: Mapping[str, Any]) -> str:
    kinds = {str(kind) for kind in _as_list(config.get("layer_types"))} & _WINDOWED
    if kinds:
        return f"layer_types {', '.join(sorted(kinds))}"
    size = config.get("sliding_window")
    longest = config.get("max_position_embeddings")
    used = isinstance(size, int) and size > 0 and config.get("use_sliding_window") is not False
    if not used or (isinstance(longest, int) and isinstance(size, int) and size >= longest):
        return ""
    return f"sliding_window {size}"


def _asks(value: Any, off: tuple[Any, ...]) -> bool:
    if value is None or value is False or value in ("", "None", "null", "none", "False", [], {}):
        return False
    return not any(type(value) is type(other) and value == other for other in off)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("quant_method"), str):
        return f"{name} {value['quant_method']}"
    plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    return f"{name} {str(value)[:40]}" if plain else name


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse(found: Mapping[str, str], where: str) -> None:
    if found:
        named = ", ".join(f"{name} [{evidence}]" for name, evidence in found.items())
        raise UserError(f"{where}: {named}: not modelled by the virtual engine")

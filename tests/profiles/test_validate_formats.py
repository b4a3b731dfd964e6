"""The many ways in which a measured run may be written down: read the same, or refused with a line that says why.

Guards that a run of another vLLM, GPU or model is not misread. It does not guard that the replay is right.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import UserError
from harness.measured_config import (
    blocks_of,
    captured_sizes,
    fitted,
    flags_of,
    refuse_unmodelled,
    tensor_parallel,
)
from harness.measured_profile import profile_for
from harness.measured_run import MeasuredRun, read_measured_run
from harness.validate import validate

COUNT = 20
Meta = dict[str, Any]


class Recorded:
    """The first requests of the public run, to be altered and written to a folder."""

    def __init__(self, source: Path) -> None:
        def lines(name: str) -> list[dict[str, Any]]:
            with (source / name).open(encoding="utf-8") as handle:
                return [json.loads(line) for _, line in zip(range(COUNT), handle, strict=False)]

        self.requests = lines("requests.jsonl")
        self.workload = lines("workload.jsonl")
        self.meta: Meta = json.loads((source / "run_meta.json").read_text(encoding="utf-8"))

    def copy(self) -> Recorded:
        return copy.deepcopy(self)

    @property
    def resolved(self) -> Meta:
        return self.meta["resolved_config"]

    def write(self, folder: Path, meta_name: str = "run_meta.json") -> Path:
        folder.mkdir(exist_ok=True)
        for name, rows in (("requests.jsonl", self.requests), ("workload.jsonl", self.workload)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name).write_text(text, encoding="utf-8")
        (folder / meta_name).write_text(json.dumps(self.meta), encoding="utf-8")
        return folder


@pytest.fixture(scope="module")
def source(shared_dir: Path) -> Recorded:
    return Recorded(shared_dir / "data" / "rtx4090-llama31-8b")


@pytest.fixture
def recorded(source: Recorded) -> Recorded:
    return source.copy()


def same_requests(a: MeasuredRun, b: MeasuredRun) -> None:
    assert [r.request_id for r in a.requests] == [r.request_id for r in b.requests]
    for one, other in zip(a.requests, b.requests, strict=True):
        assert np.array_equal(one.prompt, other.prompt), one.request_id
        assert one.output_tokens == other.output_tokens
        assert one.arrival_s == pytest.approx(other.arrival_s)
        assert one.first_token_s - one.queued_s == pytest.approx(other.first_token_s - other.queued_s)


def configured(folder: Path) -> tuple[Any, list[str], int, tuple[int, ...] | None]:
    """Flags, notes, blocks and captured sizes of a folder."""
    run = read_measured_run(folder)
    refuse_unmodelled(run)
    notes: list[str] = []
    profile = profile_for(run, None, None, notes)
    flags = flags_of(run, profile, notes)
    blocks = blocks_of(run, profile, flags, notes)
    flags = fitted(run, profile, flags, blocks, notes)
    return flags, notes, blocks, captured_sizes(run, flags)


# Files and rows.


def _shuffled(r: Recorded) -> None:
    r.requests.reverse()


def _opaque_ids_in_completion_order(r: Recorded) -> None:
    r.requests.sort(key=lambda row: row["last_token_ts"])
    for i, row in enumerate(r.requests):
        row["request_id"] = f"cmpl-{i:02d}ab"


def _ids_from_one(r: Recorded) -> None:
    r.requests.reverse()
    for row in r.requests:
        row["request_id"] = f"req-{int(row['request_id'].split('-')[1]) + 1}"


def _hex_ids_that_end_in_digits(r: Recorded) -> None:
    for i, row in enumerate(r.requests):
        row["request_id"] = f"chatcmpl-9f{7 * i % 20}"


def _ids_in_the_workload(r: Recorded) -> None:
    for i, row in enumerate(r.workload):
        row["request_id"] = r.requests[i]["request_id"] = f"id-{100 - i}"
    r.workload.reverse()


def _number_ids(r: Recorded) -> None:
    for i, row in enumerate(r.requests):
        row["request_id"] = i


def _no_ids(r: Recorded) -> None:
    for row in r.requests:
        del row["request_id"]


def _extra_rows_and_fields(r: Recorded) -> None:
    r.workload += [{"input_toks": 5, "output_toks": 5, "arrival_time_ns": 10**12, "tenant": "x"}] * 3
    for row in r.requests:
        row["colour"] = None


def _sessions_between(r: Recorded) -> None:
    # The recorder numbers the rows that it sends, and sends no session.
    r.workload.insert(3, {"session_id": "s", "arrival_time_ns": 0, "sub_requests": [{"input_toks": 3}]})


@pytest.mark.parametrize(
    "change",
    [
        _shuffled,
        _opaque_ids_in_completion_order,
        _ids_from_one,
        _hex_ids_that_end_in_digits,
        _ids_in_the_workload,
        _number_ids,
        _no_ids,
        _extra_rows_and_fields,
        _sessions_between,
    ],
)
def test_rows_find_what_was_sent(
    source: Recorded, recorded: Recorded, tmp_path: Path, change: Callable[[Recorded], None]
) -> None:
    plain = read_measured_run(source.write(tmp_path / "plain"))
    change(recorded)
    run = read_measured_run(recorded.write(tmp_path / "changed"))
    assert len(run.requests) == COUNT
    for one, other in zip(plain.requests, run.requests, strict=True):
        assert np.array_equal(one.prompt, other.prompt)
        assert one.arrival_s == other.arrival_s


def test_other_names_zipped_files_and_marks(source: Recorded, tmp_path: Path) -> None:
    plain = read_measured_run(source.write(tmp_path / "plain"))
    folder = source.write(tmp_path / "other", meta_name="meta.json")
    for name in ("requests.jsonl", "workload.jsonl"):
        text = (folder / name).read_text(encoding="utf-8").replace("\n", "\r\n\r\n")
        (folder / name).unlink()
        (folder / f"{name}.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    same_requests(plain, read_measured_run(folder))
    (folder / "requests.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 broken")
    with pytest.raises(UserError, match=r"requests\.jsonl\.gz: cannot be read"):
        read_measured_run(folder)


def test_a_run_without_workload_or_ids_shares_no_prefix(recorded: Recorded, tmp_path: Path) -> None:
    folder = recorded.write(tmp_path / "run")
    (folder / "workload.jsonl").unlink()
    run = read_measured_run(folder)
    assert not run.prompts_known
    assert any("no workload.jsonl" in note for note in run.notes)
    assert len({int(r.prompt[0]) for r in run.requests}) == COUNT
    for row in recorded.workload:
        del row["input_tok_ids"], row["output_tok_ids"]
    assert not read_measured_run(recorded.write(tmp_path / "lengths")).prompts_known


def test_rows_without_times_are_left_out(recorded: Recorded, tmp_path: Path) -> None:
    never = dict.fromkeys(
        ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"), None
    )
    recorded.requests[2] |= never
    recorded.requests[3] |= dict.fromkeys(never, 0.0)  # as vLLM's statistics begin
    recorded.requests[4] |= {"output_toks": 0}
    del recorded.requests[5]["first_token_ts"]
    run = read_measured_run(recorded.write(tmp_path))
    assert (len(run.requests), run.skipped) == (COUNT - 4, 4)


def test_one_token_needs_no_last(recorded: Recorded, tmp_path: Path) -> None:
    recorded.requests[0] |= {"output_toks": 1, "last_token_ts": None}
    run = read_measured_run(recorded.write(tmp_path))
    assert run.requests[0].last_token_s == run.requests[0].first_token_s


def test_arrivals_that_were_not_recorded(recorded: Recorded, tmp_path: Path) -> None:
    for row in recorded.requests:
        row["arrival_time"] = None
    run = read_measured_run(recorded.write(tmp_path / "planned"))
    assert run.requests[1].arrival_s == pytest.approx((347938951 - 46926808) / 1e9)
    assert any("arrival_time_ns" in note for note in run.notes)
    for row in recorded.workload:
        del row["arrival_time_ns"]
    run = read_measured_run(recorded.write(tmp_path / "queued"))
    assert run.requests[1].arrival_s == pytest.approx(0.3869, abs=1e-3)
    assert any("when the engine took them" in note for note in run.notes)


def test_a_client_s_clock_alone(recorded: Recorded, tmp_path: Path) -> None:
    for row in recorded.requests:
        shift = row["arrival_time"] - row["queued_ts"]
        row["first_token_ts"] += shift
        row["last_token_ts"] += shift
        del row["queued_ts"], row["scheduled_ts"]
    result = validate(recorded.write(tmp_path / "client"))
    assert any("count from arrival" in note for note in result.notes)
    assert not result.unqueued_recorded
    assert result.unqueued_with_warm_up is None
    # Nobody waits for the end of a step before the clock starts.
    assert result.pairs[0].replayed.ttft == pytest.approx(0.232, rel=0.05)
    recorded.requests[0]["first_token_ts"] += 1e6
    recorded.requests[0]["last_token_ts"] += 1e6
    with pytest.raises(UserError, match="line 1: no queued_ts, and arrival_time is not on the clock"):
        read_measured_run(recorded.write(tmp_path / "two"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.workload.pop(), "20 requests, but .*workload.jsonl has 19 rows"),
        (lambda r: r.workload[7].update(input_toks=1), "line 8: 'bench-7' has 1379 input tokens, but line 8"),
        (lambda r: r.workload[7].update(input_tok_ids=[1.5] * 1379), "'bench-7': token ids must be"),
        (lambda r: r.workload[7].update(input_tok_ids=[2**40] * 1379), "'bench-7': token ids must lie"),
        (lambda r: r.workload[7].update(input_tok_ids="text"), "'bench-7': token ids must be"),
        (lambda r: r.requests[7].update(arrival_time=float("nan")), "line 8: arrival_time: .*finite"),
        (lambda r: r.requests[7].update(input_toks=10**12), "line 8: input_toks"),
        (lambda r: r.requests[7].update(output_toks="many"), "line 8: output_toks"),
        (
            lambda r: [row.update(arrival_time=row["arrival_time"] * 1e3) for row in r.requests],
            "all are seconds",
        ),
        (
            lambda r: r.workload[7].update(sub_requests=[{"input_toks": 3}]),
            "line 8: a session whose calls wait",
        ),
        (lambda r: r.workload[7].update(guided_json={"type": "object"}), "line 8: grammar-guided"),
        (lambda r: r.workload[7].update(images=["a.png"]), "line 8: multimodal input"),
        (lambda r: r.workload[7].update(lora_name="sql"), "line 8: LoRA .lora_name sql.: not modelled"),
        (lambda r: r.workload[7].update(n=4), "line 8: several samples"),
    ],
)
def test_rows_that_cannot_be_replayed_say_where(
    recorded: Recorded, tmp_path: Path, change: Callable[[Recorded], Any], says: str
) -> None:
    change(recorded)
    with pytest.raises(UserError, match=says):
        read_measured_run(recorded.write(tmp_path))


def test_a_row_that_is_no_object_says_where(recorded: Recorded, tmp_path: Path) -> None:
    folder = recorded.write(tmp_path)
    (folder / "workload.jsonl").write_text("[1, 2]\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"workload.jsonl: line 1: must be a JSON object"):
        read_measured_run(folder)


# Configuration.


def test_the_run_as_it_is(recorded: Recorded, tmp_path: Path) -> None:
    flags, notes, blocks, sizes = configured(recorded.write(tmp_path))
    assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.max_model_len) == (256, 2048, 32768)
    assert (flags.async_scheduling, flags.scheduler_reserve_full_isl) == (True, True)
    assert blocks == 2588
    assert sizes is not None
    assert sizes[-1] == 512
    assert notes == []


def test_limits_in_one_place_only(recorded: Recorded, tmp_path: Path) -> None:
    recorded.resolved["scheduler_config"]["max_num_seqs"] = None
    del recorded.resolved["scheduler_config"]["max_num_batched_tokens"]
    recorded.meta["engine_kwargs"] |= {"max_num_seqs": 128, "max_num_batched_tokens": "1024"}
    flags, *_ = configured(recorded.write(tmp_path))
    assert (flags.max_num_seqs, flags.max_num_batched_tokens) == (128, 1024)


def test_a_run_from_before_the_configuration_was_recorded(recorded: Recorded, tmp_path: Path) -> None:
    for key in ("resolved_config", "kv_cache"):
        recorded.meta[key] = {}
    recorded.meta["engine_kwargs"]["max_model_len"] = None
    flags, notes, blocks, sizes = configured(recorded.write(tmp_path / "new"))
    assert flags.async_scheduling
    assert sizes is None
    assert 2000 < blocks < 3200
    said = " ".join(notes)
    for what in ("max_model_len is not recorded", "async_scheduling is not recorded: on", "KV blocks: "):
        assert what in said
    recorded.meta["vllm_version"] = "0.11.0"
    flags, *_ = configured(recorded.write(tmp_path / "old"))
    assert (flags.async_scheduling, flags.scheduler_reserve_full_isl) == (False, False)


def test_what_a_version_does_not_know_is_off(recorded: Recorded, tmp_path: Path) -> None:
    for flag in ("async_scheduling", "scheduler_reserve_full_isl"):
        del recorded.resolved["scheduler_config"][flag]
    flags, notes, *_ = configured(recorded.write(tmp_path))
    assert (flags.async_scheduling, flags.scheduler_reserve_full_isl) == (False, False)
    assert notes == []


def test_switches_that_are_off(recorded: Recorded, tmp_path: Path) -> None:
    recorded.resolved["scheduler_config"] |= {"async_scheduling": False, "enable_chunked_prefill": False}
    recorded.resolved["scheduler_config"]["max_num_batched_tokens"] = 40000
    recorded.resolved["cache_config"] |= {
        "enable_prefix_caching": False,
        "block_size": 32,
        "num_gpu_blocks": 1294,
    }
    recorded.meta["kv_cache"] = {}
    result = validate(recorded.write(tmp_path))
    flags = result.flags
    assert (flags.async_scheduling, flags.enable_chunked_prefill, flags.enable_prefix_caching) == (False,) * 3
    assert (flags.block_size, result.blocks) == (32, 1294)
    # A whole prompt in one step: more than the tables hold.
    assert result.extrapolated["chunk"] > 0
    assert result.steps > 0


def test_captured_sizes(recorded: Recorded, tmp_path: Path) -> None:
    compilation = recorded.resolved["compilation_config"]
    compilation["cudagraph_capture_sizes"] = "<list len=83>"
    compilation["max_cudagraph_capture_size"] = 256
    *_, sizes = configured(recorded.write(tmp_path / "tag"))
    assert sizes is not None
    assert sizes[-1] == 256
    compilation["cudagraph_capture_sizes"] = [8, 4, 2, 1]
    assert configured(recorded.write(tmp_path / "down"))[-1] == (1, 2, 4, 8)
    recorded.resolved["model_config"]["enforce_eager"] = True
    assert configured(recorded.write(tmp_path / "eager"))[-1] == ()
    recorded.resolved["model_config"]["enforce_eager"] = False
    compilation["cudagraph_mode"] = "NONE"
    assert configured(recorded.write(tmp_path / "none"))[-1] == ()


@pytest.mark.parametrize(
    ("cache", "blocks", "says"),
    [
        ({"num_gpu_blocks_override": 2000}, 2000, "from num_gpu_blocks_override"),
        ({"num_kv_tokens": 16 * 2222 + 5}, 2222, "from num_kv_tokens"),
        ({"kv_cache_memory_bytes": 2100 * 16 * 131072}, 2100, "set aside"),
        ({"gpu_memory_utilization": 0.9}, 2588, "derived from 0.9 of 25.3 GB"),
        ({}, 2588, "the share is not recorded either"),
    ],
)
def test_blocks_that_are_not_recorded(
    recorded: Recorded, tmp_path: Path, cache: Meta, blocks: int, says: str
) -> None:
    recorded.meta["kv_cache"] = {}
    recorded.resolved["cache_config"] = cache
    _, notes, found, _ = configured(recorded.write(tmp_path))
    assert found == blocks
    assert any(says in note for note in notes), notes


def test_a_length_that_the_cache_cannot_hold_is_lowered(recorded: Recorded, tmp_path: Path) -> None:
    recorded.meta["kv_cache"]["num_gpu_blocks"] = 2048  # just enough for the vLLM that was measured
    flags, notes, *_ = configured(recorded.write(tmp_path))
    assert flags.max_model_len == 2047 * 16
    assert any("lowered" in note for note in notes)


# Which profile.


@pytest.mark.parametrize(
    "model", ["/models/Llama-3.1-8B/", "meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"]
)
def test_a_model_by_path_or_name(recorded: Recorded, tmp_path: Path, model: str) -> None:
    recorded.meta["model"] = recorded.resolved["model_config"]["model"] = model
    recorded.meta["engine_kwargs"]["model"] = model
    run = read_measured_run(recorded.write(tmp_path))
    assert profile_for(run, None, None, []).name == "rtx4090-24g/llama-3.1-8b"


def test_a_model_that_is_not_known_asks_for_its_shape(recorded: Recorded, tmp_path: Path) -> None:
    for part in (recorded.meta, recorded.resolved["model_config"], recorded.meta["engine_kwargs"]):
        part["model"] = "acme/Acme-5B"
    recorded.resolved["model_config"]["served_model_name"] = "acme"
    run = read_measured_run(recorded.write(tmp_path / "run"))
    with pytest.raises(UserError, match="'acme/Acme-5B' is not known; give --model DIR"):
        profile_for(run, None, None, [])
    shape = tmp_path / "acme-5b"
    shape.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 64000,
        "max_position_embeddings": 20480,
        "hidden_act": "silu",
    }
    (shape / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = validate(tmp_path / "run", model=str(shape))
    assert result.profile == "rtx4090-24g/acme-5b"
    # Other blocks than the model's own would hold, but those that the run recorded.
    assert result.blocks == 2588
    assert result.metrics["ttft"]["mean"].replayed > 0
    assert result.flags.max_model_len == 20480
    assert any("what the model's config.json allows" in note for note in result.notes)
    config["max_position_embeddings"] = 1024
    (shape / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"'bench-\d+' has \d+ tokens, more than the 1024 positions"):
        validate(tmp_path / "run", model=str(shape))


def test_another_gpu_and_several_of_them(recorded: Recorded, tmp_path: Path) -> None:
    recorded.meta["hardware"] |= {
        "device_name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "device_total_memory_bytes": 101_973_385_216,
        "device_count": 2,
    }
    for part in (recorded.meta, recorded.resolved["model_config"], recorded.meta["engine_kwargs"]):
        part["model"] = "Qwen/Qwen3-32B"
    recorded.resolved["parallel_config"]["tensor_parallel_size"] = 2
    recorded.meta["engine_kwargs"]["tensor_parallel_size"] = 2
    recorded.meta["kv_cache"]["num_gpu_blocks"] = 20000
    run = read_measured_run(recorded.write(tmp_path))
    assert tensor_parallel(run) == 2
    result = validate(tmp_path)
    assert result.profile == "rtxpro6000-96g/qwen3-32b-tp2"
    assert result.unmeasured["any"] > 0
    with pytest.raises(UserError, match=r"the run used 2 GPUs, but the profile .* is for 1"):
        profile_for(run, "rtxpro6000-96g/llama-3.1-8b", None, [])


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("GeForce RTX 4090", "rtx4090-24g"),
        ("NVIDIA-GeForce-RTX-4090", "rtx4090-24g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000-96g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA L4", "l4-24g"),
        ("NVIDIA A10", "a10-24g"),
    ],
)
def test_gpus_by_the_names_that_drivers_use(
    recorded: Recorded, tmp_path: Path, device: str, gpu: str
) -> None:
    recorded.meta["hardware"] = {"device_name": device}
    run = read_measured_run(recorded.write(tmp_path))
    assert profile_for(run, None, None, []).name == f"{gpu}/llama-3.1-8b"


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "is a slice of a GPU"),
        ("NVIDIA Unheard 9000", "no profile of the GPU 'NVIDIA Unheard 9000'; choose one with --profile GPU"),
        ("NVIDIA A100 80GB PCIe", "the nearest is a100-80g; choose"),
        (None, "does not say which GPU"),
    ],
)
def test_a_gpu_that_has_no_profile(recorded: Recorded, tmp_path: Path, device: Any, says: str) -> None:
    recorded.meta["hardware"]["device_name"] = device
    run = read_measured_run(recorded.write(tmp_path))
    with pytest.raises(UserError, match=says):
        profile_for(run, None, None, [])
    # Whoever knows what it is like can say so.
    notes: list[str] = []
    assert profile_for(run, "rtx4090-24g", None, notes).name == "rtx4090-24g/llama-3.1-8b"
    assert bool(notes) == (device is not None)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            ("parallel_config", "pipeline_parallel_size"),
            2,
            r"pipeline parallelism \[pipeline_parallel_size 2\]",
        ),
        (("parallel_config", "data_parallel_size"), 2, "data parallelism"),
        (("parallel_config", "decode_context_parallel_size"), 2, "context parallelism"),
        (("parallel_config", "is_moe_model"), True, "MoE"),
        (("parallel_config", "enable_dbo"), True, "dual-batch overlap"),
        (("model_config", "hf_config"), "<Qwen3MoeConfig>", r"MoE \(mixture of experts\) \[Qwen3MoeConfig\]"),
        (("model_config", "hf_config"), "<Qwen2_5_VLConfig>", "multimodal"),
        (("model_config", "multimodal_config"), "<MultiModalConfig>", "multimodal"),
        (("model_config", "quantization"), "fp8", "quantised weights"),
        (("model_config", "dtype"), "torch.float32", "not 16-bit"),
        (("cache_config", "cache_dtype"), "fp8_e4m3", "a quantised KV cache"),
        (("cache_config", "sliding_window"), 4096, "sliding-window"),
        (("cache_config", "kv_offloading_size"), 8.0, "offloading"),
        (("offload_config", "uva"), "UVAOffloadConfig(cpu_offload_gb=8.0, x)", "offloading"),
        (("scheduler_config", "scheduler_cls"), "my.Scheduler", "a scheduler class"),
        (("scheduler_config", "policy"), "lottery", "scheduling policy 'lottery'"),
        (("speculative_config",), {"method": "eagle"}, "speculative decoding"),
        (("lora_config",), "<LoRAConfig>", "LoRA"),
        (("kv_transfer_config",), {"kv_connector": "X"}, "KV transfer"),
    ],
)
def test_what_is_not_modelled_is_named(
    recorded: Recorded, tmp_path: Path, path: tuple[str, ...], value: Any, says: str
) -> None:
    part = recorded.resolved
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    run = read_measured_run(recorded.write(tmp_path))
    with pytest.raises(UserError, match=says):
        refuse_unmodelled(run)


def test_values_that_ask_for_nothing_pass(recorded: Recorded, tmp_path: Path) -> None:
    recorded.resolved["model_config"] |= {"dtype": "bfloat16", "quantization": ""}
    recorded.resolved["cache_config"]["cache_dtype"] = "bfloat16"
    recorded.resolved["draft"] = {"dtype": "<dtype>"}
    recorded.resolved["scheduler_config"]["scheduler_cls"] = (
        "<class 'vllm.v1.core.sched.scheduler.Scheduler'>"
    )
    # A dump of every argument holds defaults that ask for nothing.
    recorded.meta["engine_kwargs"] |= {
        "dtype": "auto",
        "enable_lora": False,
        "max_loras": 1,
        "limit_mm_per_prompt": {},
        "cpu_offload_gb": 0,
        "speculative_config": None,
        "runner": "auto",
        "moe_backend": "auto",
    }
    refuse_unmodelled(read_measured_run(recorded.write(tmp_path)))


def test_a_quantised_model_is_known_by_its_name(recorded: Recorded, tmp_path: Path) -> None:
    recorded.meta |= {"model": "acme/Llama-3.1-8B-Instruct-FP8", "resolved_config": {}}
    recorded.meta["engine_kwargs"]["model"] = recorded.meta["model"]
    with pytest.raises(UserError, match="quantised weights"):
        refuse_unmodelled(read_measured_run(recorded.write(tmp_path)))

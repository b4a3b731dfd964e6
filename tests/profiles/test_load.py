"""Finding profiles: any GPU with any model, what does not fit, overrides, and folders of one's own.

Guards names, memory and limits; the composed numbers are guarded by test_compose.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness import capacity
from harness.capacity import Capacity
from harness.cli import main
from harness.errors import UserError
from harness.profiles import list_profiles, load_profile
from harness.profiles.gpu import list_gpus
from harness.profiles.known_models import MODELS, list_models
from harness.profiles.load import STANDARD_PAIR


def run(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


@pytest.mark.parametrize("gpu", list_gpus())
def test_each_gpu_goes_with_each_model_that_fits_it(gpu: str) -> None:
    fitting, refused = 0, list[str]()
    for model in list_models():
        for gpus in (1, 2, 4):
            try:
                profile = load_profile(gpu, model, gpus)
            except UserError as error:
                refused.append(str(error))
                continue
            fitting += 1
            assert profile.name == f"{gpu}/{model}" + (f"-tp{gpus}" if gpus > 1 else "")
            assert load_profile(profile.name).sha256 == profile.sha256
            assert (profile.kv_blocks - 1) * profile.block_size >= profile.max_model_len
            assert ("communication" in profile.not_measured) == (gpus > 1)
            if "data sheet" in profile.source.measured_with:
                assert not profile.measured
                assert {"decode", "prefill", "context", "mixed"} <= set(profile.not_measured)
    assert fitting >= 3
    assert all("--tensor-parallel" in text or "cannot be shared" in text for text in refused)


def test_more_gpus_hold_more_blocks_than_twice_as_many() -> None:
    one, two = load_profile("h100-80g", "llama-3.1-8b"), load_profile("h100-80g", "llama-3.1-8b", 2)
    assert two.kv_blocks > 2 * one.kv_blocks
    assert two.tables.dense.layer_us[0] < one.tables.dense.layer_us[-1]


def test_a_model_that_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"141\.1 GB of weights on each in 0\.9 of .*--tensor-parallel"):
        load_profile("h100-80g/llama-3.1-70b")
    with pytest.raises(UserError, match="28 attention heads cannot be shared by 8"):
        load_profile("h100-80g/qwen2.5-7b-tp8")


def test_stock_limits_follow_memory_with_the_a100_as_exception() -> None:
    limits = {
        gpu: (
            load_profile(gpu, "qwen3-0.6b").stock["max_num_batched_tokens"],
            load_profile(gpu, "qwen3-0.6b").stock["max_num_seqs"],
        )
        for gpu in ("t4-16g", "a100-80g", "h100-80g", "h200-141g")
    }
    assert limits == {
        "t4-16g": (2048, 256),
        "a100-80g": (2048, 256),
        "h100-80g": (8192, 1024),
        "h200-141g": (8192, 1024),
    }


def test_blocks_can_be_given_and_change_the_hash() -> None:
    profile = load_profile("tight", kv_blocks=4000)
    assert (profile.kv_blocks, profile.memory.kv_blocks_from) == (4000, "given")
    assert profile.sha256 != load_profile("tight").sha256
    assert load_profile(**profile.ref.to_json()).sha256 == profile.sha256
    with pytest.raises(UserError, match="needs 2049; vLLM would not start"):
        load_profile("tight", kv_blocks=100)


def test_the_standard_pair_is_built_in_measured_and_sized() -> None:
    for full in STANDARD_PAIR.values():
        assert full in list_profiles()
    rich, tight = load_profile("rich"), load_profile("tight")
    assert rich.kv_blocks > 10 * tight.kv_blocks
    assert rich.sized and tight.sized
    assert not rich.not_measured and not tight.not_measured


def test_a_model_of_ones_own_needs_a_config_alone_and_is_found_again_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "My Model"
    shutil.copytree(MODELS / "qwen3-8b", folder)
    monkeypatch.chdir(tmp_path)
    profile = load_profile("h100-80g", "My Model", 2)
    assert profile.name == "h100-80g/my-model-tp2"
    monkeypatch.chdir("/")
    assert load_profile(**profile.ref.to_json()).sha256 == profile.sha256
    with pytest.raises(UserError, match="go with a GPU alone"):
        load_profile("rtx4090-24g/llama-3.1-8b", str(folder))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_local_experts": 8}, "MoE"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_what_a_config_cannot_say_or_is_not_modelled_is_one_line(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    config = json.loads((MODELS / "qwen3-8b" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    with pytest.raises(UserError, match=says) as error:
        load_profile("h100-80g", str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_folder_written_for_a_composed_profile_is_complete(tmp_path: Path) -> None:
    composed = load_profile("l4-24g", "qwen3-0.6b")
    assert not composed.sized
    found = [Capacity(p, 0.1, 1.0, load) for p, load in enumerate(capacity.LOADS, start=1)]
    capacity.write(composed, found, 1.0, tmp_path / "mine")
    mine = load_profile(str(tmp_path / "mine"))
    assert mine.sized
    assert (mine.name, mine.kv_blocks, mine.tables) == (composed.name, composed.kv_blocks, composed.tables)


def test_profiles_lists_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profiles"]) == 0
    listed = capsys.readouterr().out
    for name in list_profiles():
        assert name in listed
    assert run(["profiles", "a10-24g"]) == 0
    shown = capsys.readouterr().out
    assert "not measured" in shown and "spec sheet" in shown


def test_a_run_on_a_profile_without_rates_says_how_to_find_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--profile", "l4-24g/qwen3-8b", "--phase", "1"]) == 2
    assert "bench capacity --profile l4-24g/qwen3-8b --write" in capsys.readouterr().err

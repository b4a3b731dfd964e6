"""Loading profiles: what a person may get wrong must give one clear line.

Guards schema, names, hash and the memory sum; not the numbers in the tables.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.profiles import list_profiles, load_profile, model_dir
from harness.profiles.known_models import load_model
from harness.profiles.memory import derive_kv_blocks
from harness.profiles.shape import ModelShape

NAME = "rtx4090-24g/llama-3.1-8b"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A profile folder of one's own."""
    folder = tmp_path / "mine"
    shutil.copytree(load_profile(NAME).path, folder)
    return folder


def edit(folder: Path, old: str, new: str) -> None:
    file = folder / "profile.toml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_every_built_in_profile_loads() -> None:
    names = list_profiles()
    assert {NAME, "rtxpro6000-96g/llama-3.1-8b"} <= set(names)
    for name in names:
        profile = load_profile(name)
        assert profile.name == name
        assert (profile.model_dir / "config.json").is_file()
        assert "Copyright" in profile.source.notice
        assert "Copyright" in profile.tables.source
        assert profile.layers == profile.model_shape.shape.layers
        assert len(profile.five_phase.rate_scale) == 5


def test_stock_flags_are_what_the_pin_resolves() -> None:
    assert load_profile(NAME).stock["max_num_batched_tokens"] == 2048
    assert load_profile(NAME).stock["max_num_seqs"] == 256
    big = load_profile("rtxpro6000-96g/llama-3.1-8b").stock
    assert (big["max_num_batched_tokens"], big["max_num_seqs"]) == (8192, 1024)


def test_memory_sum_reproduces_the_recorded_run() -> None:
    config = load_model("llama-3.1-8b").config
    shape = ModelShape.from_config(config, "config.json")
    assert shape.parameters == 8_030_261_248
    assert shape.kv_bytes_per_token == 131_072
    small, big = load_profile(NAME), load_profile("rtxpro6000-96g/llama-3.1-8b")
    assert derive_kv_blocks(config, small.memory.device_bytes, 0.9, 2048, 256) == 2588 == small.kv_blocks
    assert derive_kv_blocks(config, big.memory.device_bytes, 0.9, 8192, 1024) == big.kv_blocks
    assert derive_kv_blocks(config, 8 * 2**30, 0.9, 2048, 256) == 0


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"no profile 'rtx4090/llama'; did you mean rtx4090-24g/llama-3.1-8b\?"
    ):
        load_profile("rtx4090/llama")
    with pytest.raises(UserError, match="it is GPU/MODEL of"):
        load_profile("zzz")
    with pytest.raises(UserError, match="no model shape 'gpt'"):
        model_dir("gpt")


def test_a_folder_is_a_profile_too(copy: Path) -> None:
    mine, built_in = load_profile(str(copy)), load_profile(NAME)
    assert mine.sha256 == built_in.sha256
    edit(copy, "kv_blocks = 2588", "kv_blocks = 3000")
    assert load_profile(str(copy)).kv_blocks == 3000
    assert load_profile(str(copy)).sha256 != built_in.sha256


def test_the_hash_ignores_line_ends(copy: Path) -> None:
    file = copy / "tables.json"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert load_profile(str(copy)).sha256 == load_profile(NAME).sha256


def test_tuned_flags_and_their_comment(copy: Path) -> None:
    text = (copy / "profile.toml").read_text(encoding="utf-8")
    start, end = text.index("[tuned]"), text.index("[five_phase]")
    table = '[tuned]\ncomment = "a sweep"\nmax_num_batched_tokens = 512\n\n'
    (copy / "profile.toml").write_text(text[:start] + table + text[end:], encoding="utf-8")
    profile = load_profile(str(copy))
    assert profile.tuned == {"max_num_batched_tokens": 512}
    assert profile.tuned_comment == "a sweep"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("block_size = 16\nmax_model_len", "block_sise = 16\nmax_model_len", r"block_sise: Extra inputs"),
        ("kv_blocks = 2588", 'kv_blocks = "many"', r"memory.kv_blocks: Input should be a valid integer"),
        ("kv_blocks = 2588", "kv_blocks = 0", r"memory.kv_blocks: .*greater than 0"),
        ("rate_scale = [", "rate_scale = [1.0, ", r"five_phase: .*rate_scale must be 5"),
        ("[memory]", "[memory", r"not valid TOML"),
        ('name = "rtx', 'path = "x"\nname = "rtx', r"path and sha256 are not fields"),
    ],
)
def test_a_malformed_profile_says_where(copy: Path, old: str, new: str, says: str) -> None:
    edit(copy, old, new)
    with pytest.raises(UserError, match=says) as error:
        load_profile(str(copy))
    assert "profile.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_malformed_tables_say_where(copy: Path) -> None:
    file = copy / "tables.json"
    good = json.loads(file.read_text(encoding="utf-8"))
    for change, says in (
        (
            {"decode": good["decode"] | {"us": good["decode"]["us"][:-1]}},
            "decode: .*89 values where n x ctx needs 90",
        ),
        (
            {"prefill": good["prefill"] | {"kv": good["prefill"]["kv"][::-1]}},
            "prefill: .*kv must be ascending",
        ),
        ({"dense": good["dense"] | {"layer_us": [-1.0] * 87}}, "dense: .*us must be positive"),
        ({"surprise": 1}, "surprise: Extra inputs"),
    ):
        file.write_text(json.dumps(good | change), encoding="utf-8")
        with pytest.raises(UserError, match=says):
            _ = load_profile(str(copy)).tables
    file.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="not a table file"):
        _ = load_profile(str(copy)).tables
    file.unlink()
    with pytest.raises(UserError, match="is the profile complete"):
        load_profile(str(copy))

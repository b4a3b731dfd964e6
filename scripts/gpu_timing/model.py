"""The model's shape, read without the rest of the project: a bare GPU machine may have torch and little else."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.profiles.shape import ModelShape

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "harness" / "profiles" / "models"


def load_shape(model: str, gpus: int) -> ModelShape:
    """What one of `gpus` holds of a model: a config.json, a folder with one, or a name under the profiles' models.

    Raises:
        UserError: there is no such file, or it is no dense decoder's.
    """
    tried = (Path(model), Path(model) / "config.json", MODELS / model / "config.json")
    file = next((path for path in tried if path.is_file()), None)
    if file is None:
        raise UserError(
            f"--model {model}: no config.json there; name its folder, or one of {', '.join(_known())}"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not a config.json ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a config.json (an object is expected)")
    shape: ModelShape = _shape_module().ModelShape.from_config(config, str(file))
    return shape.shard(gpus) if gpus > 1 else shape


def _known() -> list[str]:
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def _shape_module() -> Any:
    # By its path: the package `harness.profiles` imports pydantic, which this does not need.
    name = "gpu_timing_shape"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "harness" / "profiles" / "shape.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]

"""The shapes of models: those that come with the project, and any folder with a config.json."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.profiles.shape import ModelShape
from harness.refusals import refuse_model

MODELS = Path(__file__).resolve().parent / "models"


@dataclass(frozen=True, slots=True)
class Model:
    """A model as far as its shape goes; no weights.

    Attributes:
        name: as it stands in a profile's name, `llama-3.1-8b`.
        title: as a person writes it.
        hub_names: hub names with this shape.
        folder: where its config.json lies; vLLM builds its configuration from it.
        config_bytes: the file, line ends normalised, for hashes.
    """

    name: str
    title: str
    hub_names: tuple[str, ...]
    folder: Path
    config: Mapping[str, Any]
    config_bytes: bytes

    @property
    def shape(self) -> ModelShape:
        """The sizes that decide what a step costs; UserError for a config that lacks one."""
        return ModelShape.from_config(self.config, str(self.folder / "config.json"))

    def is_called(self, name: str) -> bool:
        """Whether a hub name, or the last part of a local path, means this model."""
        last = name.rstrip("/").rsplit("/", 1)[-1].lower()
        return last in {
            self.name,
            self.title.lower(),
            *(n.rsplit("/", 1)[-1].lower() for n in self.hub_names),
        }


def list_models() -> list[str]:
    """Names of the shapes that come with the project, sorted."""
    return sorted(p.parent.name for p in MODELS.glob("*/config.json"))


def load_model(name: str) -> Model:
    """A known shape by its name, or any folder with a config.json by its path.

    Raises UserError for an unknown name, a damaged file, and an architecture that is not modelled.
    """
    known = name in list_models()
    folder = MODELS / name if known else Path(name)
    file = folder / "config.json"
    if not file.is_file():
        near = difflib.get_close_matches(name, list_models(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known shapes are {', '.join(list_models())}"
        raise UserError(f"no model shape {name!r}; {hint}; or give a folder that holds a config.json")
    content = file.read_bytes().replace(b"\r\n", b"\n")
    try:
        config = json.loads(content)
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: must be a JSON object, as the model hub serves it")
    refuse_model(config, str(file))
    title, hub_names = _names(folder) if known else (folder.resolve().name, ())
    label = name if known else _as_name(folder.resolve().name)
    return Model(label, title, hub_names, folder, config, content)


def model_dir(name: str) -> Path:
    """Folder of a model's config.json."""
    return load_model(name).folder


def model_called(name: str) -> Model | None:
    """The known shape that a hub name means, or None."""
    for known in list_models():
        model = load_model(known)
        if model.is_called(name):
            return model
    return None


def _names(folder: Path) -> tuple[str, tuple[str, ...]]:
    raw = tomllib.loads((folder / "names.toml").read_text(encoding="utf-8"))
    return raw["title"], tuple(raw["hub"])


def _as_name(text: str) -> str:
    """A folder's name in the letters that a profile's name may have."""
    return (
        "".join(c if c.isascii() and (c.isalnum() or c in ".+_-") else "-" for c in text.lower()) or "model"
    )

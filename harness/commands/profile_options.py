"""The options that choose a profile, the same in every command that takes one."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_PROFILE = "rtxpro6000-96g-shared/llama-3.1-8b"

ProfileName = Annotated[
    str, typer.Option(help="GPU/MODEL[-tpN], a GPU alone, rich, tight, or a folder with a profile.toml")
]
ModelName = Annotated[
    str | None, typer.Option(help="with a GPU alone: a known model, or a folder with a config.json")
]
TensorParallel = Annotated[
    int | None, typer.Option(help="with a GPU alone: GPUs that share the model", min=1, max=64)
]
KvBlocks = Annotated[int | None, typer.Option(help="KV blocks, in place of the profile's", min=1)]

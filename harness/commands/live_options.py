"""The options of `bench run` that choose the engine and belong to live runs."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.errors import UserError

ENGINES = ("virtual", "emulated", "live")

Engine = Annotated[
    str,
    typer.Option(
        help="virtual: the real scheduler on a profile's virtual clock; emulated: a real server with the profile's step "
        "times; live: a real server with a real model"
    ),
]
TimeScale = Annotated[
    float | None,
    typer.Option(
        help="factor on the length of the phases (default 1; live on a CPU 0.4)",
        min=0.001,
        show_default=False,
    ),
]
LengthScale = Annotated[
    float | None,
    typer.Option(
        help="factor on prompt and output lengths (default 1; live on a CPU 0.15)",
        min=0.001,
        show_default=False,
    ),
]
WarmupSeconds = Annotated[
    float,
    typer.Option(
        "--warmup-s", help="live and emulated: seconds that each server is warmed up at least", min=0
    ),
]
AgainOption = Annotated[
    bool,
    typer.Option(
        "--aa/--no-aa",
        help="live and emulated: measure a baseline twice, which shows how small an effect can be seen",
    ),
]
Recalibrate = Annotated[
    bool, typer.Option("--recalibrate", help="live on a CPU: measure anew how fast the machine is")
]
VllmFlags = Annotated[
    list[str] | None,
    typer.Option(
        "--vllm-flag", help="live: a flag for every vllm serve, as --vllm-flag=--seed=1; may be repeated"
    ),
]


def check_engine(engine: str) -> None:
    """UserError for an engine that there is not."""
    if engine not in ENGINES:
        raise UserError(f"--engine {engine}: it is one of {', '.join(ENGINES)}")


def refuse_in_virtual(**given: object) -> None:
    """UserError for an option that only a run on a real server has."""
    for name, value in given.items():
        if value:
            raise UserError(f"--{name.replace('_', '-')} goes with --engine live")


def scales(
    time_scale: float | None, length_scale: float | None, defaults: tuple[float, float]
) -> tuple[float, float]:
    """Factors on time and lengths, where the user left them to the engine."""
    time, length = defaults
    return (time if time_scale is None else time_scale), (length if length_scale is None else length_scale)

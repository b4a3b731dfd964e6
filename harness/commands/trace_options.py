"""The options of `bench run` that replay a trace, and what they do not go with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import UserError

TracePath = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="replay this trace in place of the five phases; see bench trace"),
]
TenantsPath = Annotated[
    Path | None,
    typer.Option(metavar="MAP", help="with --trace: TOML of who sends what (docs/TRACES.md)"),
]
TraceFrom = Annotated[
    float, typer.Option(metavar="S", help="with --trace: begin so many seconds after its start", min=0)
]
TraceSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="S", help="with --trace: so many seconds of it; 0 is to its end (default 300)", min=0
    ),
]
TraceLimit = Annotated[
    int | None, typer.Option(metavar="N", help="with --trace: read only its first N requests", min=1)
]
TraceFormat = Annotated[
    str | None, typer.Option(metavar="NAME", help="with --trace: its format, where two would fit")
]
TraceSkipLong = Annotated[
    bool, typer.Option("--trace-skip-long", help="with --trace: leave out requests that an arm cannot serve")
]


def refuse_without_trace(given: dict[str, object]) -> None:
    """UserError for an option of a trace where there is no trace; `given` maps options to what was typed."""
    for option, value in given.items():
        if value:
            raise UserError(f"{option} goes with --trace FILE")


def refuse_with_trace(phase: str, time_scale: float) -> None:
    """UserError for options of the five phases."""
    if phase.strip() != "all":
        raise UserError(
            "--phase is of the five phases; choose a part of a trace with --trace-from, --trace-seconds"
        )
    if time_scale != 1:
        raise UserError(
            "--time-scale is of the five phases; a trace has its own times: use --rate-scale or --trace-seconds"
        )

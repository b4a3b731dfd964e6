"""`bench step-error`: how far a profile is off on rows of measured tables that it does not hold."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harness.profiles import Profile


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("step-error")(step_error)


def step_error(
    tables: Annotated[Path, typer.Argument(help="folder of measured kernel tables (csv or parquet)")],
    profile: Annotated[
        str | None,
        typer.Option(help="GPU/MODEL[-tpN], GPU, or a path; default: the GPU and model that the tables name"),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the figures to this file")
    ] = None,
) -> None:
    """Compare a profile with rows of measured tables that it does not hold, by regime."""
    from rich.console import Console
    from rich.table import Table

    from harness.atomic import check_writable, write_json
    from harness.errors import UserError
    from harness.profiles import load_profile
    from harness.profiles.aic_tables import is_aic_folder
    from harness.profiles.step_error import STEP_REGIMES
    from harness.profiles.step_error import step_error as errors_of

    check_writable(json_path)
    if not tables.is_dir():
        raise UserError(f"{tables}: no such folder; give a folder of kernel tables (docs/PROFILES.md)")
    loaded = load_profile(profile) if profile is not None else _profile_named_by(tables)
    errors = errors_of(loaded, tables)
    console = Console()
    view = Table(title=f"{loaded.name}, rows that it does not hold")
    for column in ("regime", "rows", "median", "p90", "bias"):
        view.add_column(column, justify="left" if column == "regime" else "right")
    for regime in (*STEP_REGIMES, *(r for r in errors if r not in STEP_REGIMES)):
        if regime in errors:
            e = errors[regime]
            figures = (str(e.rows), f"{e.median_pct:.2f}%", f"{e.p90_pct:.2f}%", f"{e.bias_pct:+.2f}%")
            view.add_row(regime, *figures)
        else:
            view.add_row(regime, "", "not measured", "", "")
    console.print(view)
    if is_aic_folder(tables):
        console.print(
            "Steps here are the products and attention of a layer, on a GPU's share of models whose products are all "
            "in the tables; several prompts at once follow the rule that the same work takes the same time.",
            highlight=False,
        )
    if json_path is not None:
        write_json(
            json_path,
            {
                "profile": loaded.name,
                "sha256": loaded.sha256,
                "regimes": {regime: asdict(e) for regime, e in errors.items()},
                "not_measured": [regime for regime in STEP_REGIMES if regime not in errors],
            },
        )


def _profile_named_by(tables: Path) -> Profile:
    from harness.errors import UserError
    from harness.profiles import load_profile, profile_for_device
    from harness.profiles.aic_tables import device_of, is_aic_folder
    from harness.profiles.kernel_tables import measured_on
    from harness.profiles.load import gpu_called

    if is_aic_folder(tables):
        device = device_of(tables)
        gpu = gpu_called(device)
        if gpu is None:
            raise UserError(f"{tables}: taken on {device!r}, which no GPU file names; give --profile")
        return load_profile(gpu.name)
    found = measured_on(tables)
    profile = profile_for_device(*found) if found is not None else None
    if profile is None:
        if found is None:
            raise UserError(f"{tables}: no profile_meta.yaml names its GPU and model; give --profile")
        raise UserError(
            f"{tables}: taken of {found[1]} on {found[0]}, for which there is no profile; give --profile"
        )
    return profile

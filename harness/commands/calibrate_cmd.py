"""`bench calibrate`: a profile of the machine and the model that a live run was on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate")(calibrate)


def calibrate(
    run: Annotated[Path, typer.Argument(help="folder of a live run")],
    out: Annotated[Path, typer.Argument(help="folder to write the profile into")],
    arm: Annotated[list[str] | None, typer.Option(help="only this arm's steps; may be repeated")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the figures to this file")
    ] = None,
) -> None:
    """Fit a profile to the steps of a live run, and say how far it is off on steps that it did not see."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from harness.atomic import check_writable, write_json
    from harness.calibrate import calibrate as fitted
    from harness.step_fit import KINDS

    check_writable(json_path)
    found = fitted(run, out, tuple(arm or ()))
    console = Console()
    view = Table(title=f"{found.profile.name} from {found.records} servers; error on steps held out")
    for column in ("regime", "fitted to", "held out", "median", "p90", "bias", "all their time"):
        view.add_column(column, justify="left" if column == "regime" else "right")
    fitted_to: dict[str, int] = {**found.fitted, "all": sum(found.fitted.values())}
    for kind in (*KINDS, "all"):
        if kind in found.held_out:
            e = found.held_out[kind]
            steps = fitted_to.get(kind, 0)
            figures = (
                f"{e.median_pct:.1f}%",
                f"{e.p90_pct:.1f}%",
                f"{e.bias_pct:+.1f}%",
                f"{e.total_pct:+.1f}%",
            )
            view.add_row(kind, f"{steps:,}", f"{e.rows:,}", *figures)
        else:
            view.add_row(kind, "not seen", "", "", "", "", "")
    console.print(view)
    console.print(f"{found.cpu_step_us:.0f} us between steps; wrote {out}", highlight=False, soft_wrap=True)
    console.print(f"next: bench run --profile {out} ...", highlight=False, markup=False, soft_wrap=True)
    if json_path is not None:
        write_json(
            json_path,
            {
                "profile": found.profile.name,
                "sha256": found.profile.sha256,
                "cpu_step_us": found.cpu_step_us,
                "fitted": dict(found.fitted),
                "held_out": {name: asdict(e) for name, e in found.held_out.items()},
            },
        )

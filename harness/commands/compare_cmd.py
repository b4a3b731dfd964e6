"""`bench compare`: does a candidate run keep what a base run had?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import GateFailed


def register(app: typer.Typer) -> None:
    """Add `compare` to the command line."""
    app.command("compare")(compare)


def compare(
    base: Annotated[Path, typer.Argument(help="A run's folder or its summary.json.", metavar="BASE")],
    candidate: Annotated[
        Path, typer.Argument(help="The run to judge, in the same form.", metavar="CANDIDATE")
    ],
    gate: Annotated[
        Path,
        typer.Option(
            "--gate",
            metavar="FILE",
            help="TOML with one [[gate]] a figure: metric, scope (default all), arm (default every arm of BASE), "
            'margin_pct (default 2), better ("lower" or "higher", for a patch\'s own figure).',
        ),
    ],
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the result as JSON to this file.")
    ] = None,
    markdown_path: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="PATH", help="Write the table as Markdown to this file."),
    ] = None,
) -> None:
    """Hold a candidate run against a base run; exit code 3 when a gated figure got worse.

    Worse means beyond its margin and beyond chance: the 95% interval of the change excludes zero. A gate
    whose figure is missing, or whose arm is invalid, fails too; one on a scope that neither run has is bad input.
    """
    # pandas and pyarrow are not needed to print the help.
    from harness.atomic import check_writable, write_json, write_text
    from reports.gate import check, markdown, read_gates, read_side

    check_writable(json_path, markdown_path)
    gates = read_gates(gate)
    old, new = read_side(base), read_side(candidate)
    checked = check(old, new, gates)
    table = markdown(old, new, checked)
    failed = [one for one in checked if one.state != "ok"]
    typer.echo(table, nl=False)
    if markdown_path is not None:
        write_text(markdown_path, table)
    if json_path is not None:
        write_json(
            json_path,
            {
                "schema": 1,
                "base": str(old.summary.get("run")),
                "candidate": str(new.summary.get("run")),
                "passed": not failed,
                "gates": [one.json() for one in checked],
            },
        )
    if failed:
        first = failed[0]
        raise GateFailed(
            f"{len(failed)} of {len(checked)} gates failed; the first: {first.arm}, {first.gate.metric} in "
            f"{first.gate.scope}: {first.text}"
        )

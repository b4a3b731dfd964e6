"""`bench patches`, `bench explain`, `bench plan`, `bench doctor`: what there is, and whether it can run here."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from harness import doctor
from harness.atomic import check_writable, write_json
from harness.errors import RunFailed, UserError
from patches.catalogue import CATALOGUE
from patches.seam import registry
from patches.seam.knob_values import type_name
from patches.seam.patch import Patch
from patches.seam.plan import PatchPlan, resolve
from patches.seam.seams import SEAMS

Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write it as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the four commands to the command line."""
    app.command("patches")(patches)
    app.command("explain")(explain)
    app.command("plan")(plan)
    app.command("doctor")(run_doctor)


def patches(json_path: Json = None) -> None:
    """List all 29 optimisations and fixes with their state."""
    check_writable(json_path)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("no.", "name", "state", "what it does"):
        table.add_column(column, no_wrap=column != "what it does")
    for entry in CATALOGUE:
        style = "" if entry.built else "dim"
        table.add_row(entry.number, entry.name, entry.state, entry.summary, style=style)
    console = Console()
    console.print(table)
    built = sum(entry.built for entry in CATALOGUE)
    console.print(
        f"{built} built, {len(CATALOGUE) - built} planned. `bench explain NAME` says more of a built one."
    )
    if json_path is not None:
        rows = [
            {"number": e.number, "name": e.name, "area": e.area, "state": e.state, "summary": e.summary}
            for e in CATALOGUE
        ]
        write_json(json_path, {"patches": rows})


def explain(
    name: Annotated[str, typer.Argument(help="A patch's name, or the import path of one of your own.")],
    json_path: Json = None,
) -> None:
    """Say why and how of one patch, its knobs, seams and ranks, its baseline and its mechanism metric."""
    check_writable(json_path)
    patch = registry.find(name)
    console = Console(highlight=False)
    console.print(f"[bold]{patch.name}[/] {patch.number} ({patch.area}): {patch.summary}")
    for title, text in (
        ("why", patch.why),
        ("how", patch.how),
        ("measured against", patch.baseline),
        ("mechanism", f"{patch.mechanism} (must move for a win to count)"),
        ("goes with", _goes_with(patch)),
        ("changes outputs", "yes" if patch.changes_outputs else "no, only when things happen"),
        ("can go when", patch.removable_when),
    ):
        console.print(f"\n[bold]{title}[/]")
        for paragraph in _paragraphs(text):
            console.print(Padding(paragraph, (0, 0, 0, 2)), markup=False)
    console.print("\n[bold]knobs[/]  (--set patch.knob=value)")
    console.print(Padding(_knob_table(patch), (0, 0, 0, 2)))
    console.print("\n[bold]seams[/]")
    console.print(Padding(_seam_table(patch), (0, 0, 0, 2)))
    if patch.references:
        console.print("\n[bold]references[/]")
        for reference in patch.references:
            console.print(Padding(reference, (0, 0, 0, 2)), markup=False)
    if json_path is not None:
        write_json(json_path, description(patch))


def plan(
    enable: Annotated[
        str,
        typer.Option("--enable", metavar="NAME,NAME", help="Patches: names, or import paths of your own."),
    ],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATCH.KNOB=VALUE", help="One knob; may be repeated.")
    ] = None,
    knobs_file: Annotated[
        Path | None, typer.Option("--knobs", metavar="FILE", help="TOML with one table of knobs a patch.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Resolve a set of patches: check that they go together, print the order on each seam and the knobs."""
    check_writable(json_path)
    resolved = resolve(enable, sets or [], read_knobs(knobs_file))
    console = Console(highlight=False)
    console.print(f"[bold]{resolved.label}[/]  plan {resolved.sha256()[:16]}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("seam", "kind", "order (rank)"):
        table.add_column(column, no_wrap=column == "seam")
    for seam, names in resolved.order().items():
        ranks = {c.patch.name: c.patch.ranks.get(seam) for c in resolved.patches}
        order = " > ".join(n if ranks[n] is None else f"{n} ({ranks[n]})" for n in names)
        table.add_row(seam, SEAMS[seam].kind, order)
    console.print(table)
    for name, values in resolved.knobs.items():
        console.print(f"[bold]{name}[/]: " + (", ".join(f"{k}={v}" for k, v in values.items()) or "no knobs"))
    if resolved.replaces:
        console.print(f"in place of: {', '.join(sorted(resolved.replaces))}")
    for flag, value in resolved.engine_flags.items():
        said = "must stay unset" if value is None else json.dumps(value)
        console.print(
            f"engine flag {flag} ({resolved.brought_by(flag)}): {said}", markup=False, soft_wrap=True
        )
    if json_path is not None:
        write_json(json_path, plan_json(resolved))


def run_doctor(
    write_lock: Annotated[
        bool, typer.Option("--write-lock", help="Write upstream.lock anew, for the vLLM that is installed.")
    ] = False,
    json_path: Json = None,
) -> None:
    """Check the pin, the lock, the entry point, Python, torch and GPU; each problem with its fix."""
    check_writable(json_path)
    if write_lock:
        from patches.seam import upstream_lock

        upstream_lock.write_lock()
        Console().print("wrote upstream.lock; read what changed before you commit it", highlight=False)
    checks = doctor.run_checks()
    console = Console(highlight=False)
    for check in checks:
        state, style = (
            ("ok", "green") if check.ok else ("problem", "red") if check.required else ("note", "yellow")
        )
        console.print(f"[{style}]{state:<8}[/]{check.name}: ", end="")
        console.print(check.found, markup=False)
        if not check.ok:
            console.print(Padding(check.fix, (0, 0, 0, 8)), markup=False)
    if json_path is not None:
        write_json(
            json_path, {"ok": doctor.all_well(checks), "checks": [check.to_json() for check in checks]}
        )
    if not doctor.all_well(checks):
        failed = ", ".join(check.name for check in checks if check.required and not check.ok)
        raise RunFailed(f"not fit to run: {failed}")


def read_knobs(path: Path | None) -> dict[str, Any]:
    """Knob tables from a TOML file; UserError if it cannot be read."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--knobs {path}: {error.strerror}; give a TOML file with one table a patch, as [qos]"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--knobs {path}: not TOML: {error}") from error


def plan_json(resolved: PatchPlan) -> dict[str, Any]:
    """A plan as `--json` writes it. Its `plan` is what PATCHBENCH_PLAN takes."""
    return {
        "label": resolved.label,
        "sha256": resolved.sha256(),
        "patches": list(resolved.names),
        "knobs": resolved.knobs,
        "order": {seam: list(names) for seam, names in resolved.order().items()},
        "replaces": sorted(resolved.replaces),
        "engine_flags": resolved.engine_flags,
        "plan": resolved.to_json(),
    }


def description(patch: Patch) -> dict[str, Any]:
    """Everything that a patch declares, JSON-able."""
    return {
        "name": patch.name,
        "number": patch.number,
        "area": patch.area,
        "summary": patch.summary,
        "why": patch.why,
        "how": patch.how,
        "baseline": patch.baseline,
        "mechanism": patch.mechanism,
        "removable_when": patch.removable_when,
        "requires": list(patch.requires),
        "conflicts": list(patch.conflicts),
        "replaces": list(patch.replaces),
        "changes_outputs": patch.changes_outputs,
        "references": list(patch.references),
        "seams": [{"name": s, "kind": SEAMS[s].kind, "rank": patch.ranks.get(s)} for s in patch.seams],
        "knobs": [
            {
                "name": name,
                "type": type_name(patch, name),
                "unit": patch.unit(name),
                "default": info.get_default(call_default_factory=True),
                "description": info.description,
            }
            for name, info in patch.knobs.model_fields.items()
        ],
    }


def _goes_with(patch: Patch) -> str:
    parts = [
        f"{label} {', '.join(names)}"
        for label, names in (
            ("requires", patch.requires),
            ("conflicts with", patch.conflicts),
            ("takes the place of the engine's", patch.replaces),
        )
        if names
    ]
    return "; ".join(parts) or "any other patch"


def _paragraphs(text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def _knob_table(patch: Patch) -> Table | str:
    if not patch.knobs.model_fields:
        return "none"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("knob", "default", "unit", "meaning"):
        table.add_column(column, no_wrap=column in ("default", "unit"), overflow="fold")
    for knob in description(patch)["knobs"]:
        table.add_row(knob["name"], str(knob["default"]), knob["unit"], knob["description"])
    return table


def _seam_table(patch: Patch) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("seam", "kind", "rank", "what it is"):
        table.add_column(column, no_wrap=column != "what it is")
    for seam in patch.seams:
        table.add_row(seam, SEAMS[seam].kind, str(patch.ranks.get(seam, "")), SEAMS[seam].summary)
    return table

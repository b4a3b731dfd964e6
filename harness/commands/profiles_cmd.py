"""`bench profiles`: which GPUs and models the virtual engine knows, and how well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.commands.profile_options import ModelName, TensorParallel

if TYPE_CHECKING:
    from harness.profiles import Profile


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("profiles")(profiles)


def profiles(
    name: Annotated[
        str, typer.Argument(help="one profile in full: GPU/MODEL[-tpN], a GPU alone, or a folder")
    ] = "",
    model: ModelName = None,
    tensor_parallel: TensorParallel = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the figures to this file")
    ] = None,
) -> None:
    """List the profiles, or show one: memory, limits, what was measured and what is only modelled."""
    from rich.console import Console

    from harness.atomic import check_writable, write_json
    from harness.profiles import list_profiles, load_profile

    check_writable(json_path)
    console = Console()
    chosen = (
        [load_profile(name, model, tensor_parallel)] if name else [load_profile(n) for n in list_profiles()]
    )
    if name:
        _show_one(console, chosen[0])
    else:
        _show_all(console, chosen)
    if json_path is not None:
        write_json(json_path, {"profiles": [_facts(p) for p in chosen]})


def _facts(profile: Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "gpu": profile.gpu,
        "model": profile.model,
        "measured": profile.measured,
        "not_measured": list(profile.not_measured),
        "beyond": list(profile.beyond),
        "kv_blocks": profile.kv_blocks,
        "kv_blocks_from": profile.memory.kv_blocks_from,
        "max_num_batched_tokens": profile.stock["max_num_batched_tokens"],
        "max_num_seqs": profile.stock["max_num_seqs"],
        "rate_scale": profile.five_phase.rate_scale if profile.sized else None,
        "slo_factor": profile.five_phase.slo_factor if profile.sized else None,
        "source": f"{profile.source.project} @ {profile.source.revision}",
        "sha256": profile.sha256,
    }


def _show_all(console: Any, listed: list[Profile]) -> None:
    from rich.table import Table

    from harness.profiles.gpu import list_gpus
    from harness.profiles.known_models import list_models
    from harness.profiles.load import STANDARD_PAIR

    table = Table(title="limits: tokens and requests a step of stock vLLM", title_justify="left")
    for column in ("profile", "KV blocks", "limits", "not measured", "rates"):
        table.add_column(
            column, justify="right" if column == "KV blocks" else "left", no_wrap=column == "profile"
        )
    alias = {full: short for short, full in STANDARD_PAIR.items()}
    for profile in listed:
        label = f"{profile.name}\n({alias[profile.name]})" if profile.name in alias else profile.name
        table.add_row(
            label,
            f"{profile.kv_blocks:,}",
            f"{profile.stock['max_num_batched_tokens']:,}, {profile.stock['max_num_seqs']:,}",
            ", ".join(profile.not_measured) or "-",
            "yes" if profile.sized else "-",
        )
    console.print(table)
    console.print(
        f"Any of {', '.join(list_gpus())} goes with any of {', '.join(list_models())}, as GPU/MODEL or GPU/MODEL-tpN "
        "for N GPUs, or with --model FOLDER (a config.json). `bench profiles NAME` shows one in full.",
        soft_wrap=True,
        highlight=False,
    )


def _show_one(console: Any, profile: Profile) -> None:
    memory = profile.memory
    how = {"measured": "timed on this GPU", "modelled": "from the GPU's spec sheet: not measured"}
    lines = [
        ("profile", profile.name),
        ("GPU, model", f"{profile.gpu}, {profile.model}, {profile.dtype}"),
        ("kernel times", how["measured" if profile.measured else "modelled"]),
        ("not measured", ", ".join(profile.not_measured) or "nothing of what a step rests on"),
        *(("beyond the sizes measured", sentence) for sentence in profile.beyond),
        (
            "KV blocks",
            f"{profile.kv_blocks:,} of {profile.block_size} tokens, {memory.kv_blocks_from}: {memory.kv_blocks_how}",
        ),
        ("stock flags", ", ".join(f"{k}={v}" for k, v in profile.stock.items())),
        ("tuned flags", ", ".join(f"{k}={v}" for k, v in profile.tuned.items()) or "as stock"),
        ("", profile.tuned_comment),
        (
            "five-phase rates",
            f"{profile.five_phase.rate_scale} times the table, SLO factor {profile.five_phase.slo_factor:g}"
            if profile.sized
            else f"not found yet: bench capacity --profile {profile.name} --write",
        ),
        (
            "source",
            f"{profile.source.project} @ {profile.source.revision}, {profile.source.licence}; {profile.source.measured_with}",
        ),
        ("sha256", profile.sha256),
    ]
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        if text:
            console.print(f"{label:<{width}}  {text}", soft_wrap=True, highlight=False, markup=False)

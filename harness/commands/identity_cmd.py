"""`bench identity`: do patches change what a real model writes?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("identity")(identity)


def identity(
    enable: Annotated[str, typer.Option(help="patches to switch on, comma separated")],
    model: Annotated[
        Path | None, typer.Option(help="folder of the model to ask (default: SmolLM2-135M-Instruct)")
    ] = None,
) -> None:
    """Compare greedy answers of a real model with patches on and off, prompt by prompt (two servers, a few minutes)."""
    from rich.console import Console

    from harness.engines.live.identity import compare
    from harness.engines.live.model import ensure_model
    from harness.engines.live.served import served_model
    from harness.errors import RunFailed, UserError
    from patches.seam.plan import resolve

    plan = resolve(enable)
    if not plan.patches:
        raise UserError("--enable: name at least one patch")
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    found = compare(plan, served_model(model or ensure_model(say=say)), say)
    for line in found.lines:
        say(line)
    if not found.explained:
        raise RunFailed(f"{plan.label} changes what the model writes, beyond rounding")

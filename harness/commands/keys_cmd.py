"""`bench keys`: API keys of tenants, for `bench serve --identity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("keys")(keys)


def keys(
    file: Annotated[Path, typer.Argument(help="identity file; made if it is not there")],
    tenant: Annotated[str, typer.Argument(help="whose key to make")],
    tier: Annotated[str | None, typer.Option(help="name of the tenant's class of service")] = None,
    weight: Annotated[float | None, typer.Option(help="its share under contention")] = None,
    priority: Annotated[
        int | None, typer.Option(help="vLLM's priority of its requests; the smaller is served first")
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="its target for the first token, ms")] = None,
    revoke: Annotated[
        bool, typer.Option("--revoke", help="take all its keys away in place of a new one")
    ] = False,
) -> None:
    """Make a key of a tenant, print it once, and keep only its hash; a tenant may have several.

    What is given of a tenant is changed, the rest stays (tier none, weight 1, priority 0, no deadline at first).
    A running server takes up the changed file within a second or two.
    """
    from harness import tenant_keys

    given: dict[str, Any] = {"tier": tier, "weight": weight, "priority": priority, "slo_ttft_ms": slo_ttft_ms}
    changes = {name: value for name, value in given.items() if value is not None}
    if revoke:
        if changes:
            raise UserError("--revoke: it takes keys away, and changes nothing else of a tenant")
        had = tenant_keys.revoke(file, tenant)
        print(f"{tenant}: {had} {'key' if had == 1 else 'keys'} revoked in {file}")
        return
    # The key alone goes to standard output, so that it can be piped to where it is kept.
    print(tenant_keys.add_key(file, tenant, changes))
    typer.echo(f"{tenant}: this key is not kept anywhere; {file} holds its hash", err=True)

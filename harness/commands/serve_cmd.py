"""`bench serve`: vLLM's API server with patches, in the foreground, for a person."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.engines.live.command import ServeSpec
    from harness.engines.live.server import Server

_INTERRUPTED = 130
_LOOK_EVERY_S = 0.5


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    vllm_flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM FLAGS]", help="words for `vllm serve`, after --")
    ] = None,
    enable: Annotated[
        str, typer.Option(help="patches to switch on, comma separated: names, or import paths of your own")
    ] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="a knob: PATCH.KNOB=VALUE; may be repeated")
    ] = None,
    knobs: Annotated[Path | None, typer.Option(help="TOML file of knobs, one table a patch")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="a model's folder or its name on the hub (default: SmolLM2-135M-Instruct, fetched)"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen at; other than loopback needs a key")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="port; 0 for any that is free", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="VLLM_API_KEY",
            help="what requests must show; better given in the environment, where no other user sees it",
            show_default=False,
            show_envvar=True,
        ),
    ] = "",
    identity: Annotated[
        Path | None,
        typer.Option(
            help="file of API keys and tenants (bench keys); each request is served as its key's tenant"
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="file for vLLM's output (default: a temporary one, kept on failure)")
    ] = None,
    receipts: Annotated[
        Path | None, typer.Option(help="folder in which each process says how often its patches fired")
    ] = None,
) -> None:
    """Serve a model with any set of patches: vLLM's own API server, until Ctrl-C."""
    from rich.console import Console

    from harness.arms import read_toml
    from harness.atomic import check_writable
    from harness.engines.live import command, ports
    from harness.engines.live.server import new_key
    from harness.engines.live.server import serve as run_server
    from patches.seam.plan import resolve

    values: dict[str, dict[str, Any]] = read_toml(knobs) if knobs is not None else {}
    plan = resolve(enable, set_ or [], values)
    flags = tuple(vllm_flags or ())
    if flags and not flags[0].startswith("-"):
        raise UserError(f"{flags[0]!r}: flags of vLLM follow a --, as in bench serve -- --max-num-seqs 32")
    _check_key(api_key, host, loopback=ports.is_loopback(host) or identity is not None)
    if identity is not None:
        from patches.front.tenants import read_entries

        read_entries(identity)
    check_writable(log)
    if model is not None:
        command.check_model(model, None)
    # Before the model, which may take minutes to fetch.
    ports.choose(host, port)
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    folder = Path(tempfile.mkdtemp(prefix="bench-serve-"))
    try:
        spec = command.ServeSpec(
            model=model if model is not None else _small_model(say),
            plan=plan,
            extra=flags,
            host=host,
            port=port,
            # With tenants there is an operator too, if only for the first completion.
            api_key=api_key or (new_key() if identity is not None else ""),
            identity=identity,
            control=False,
            online=model is not None and not Path(model).is_dir(),
        )
        log_path = log if log is not None else folder / "server.log"
        say(f"log: {log_path}")
        kept = receipts if receipts is not None else folder / "receipts"
        with run_server(spec, log_path=log_path, receipts_dir=kept, say=say) as server:
            _tell(server, spec, say)
            while True:
                server.check()
                time.sleep(_LOOK_EVERY_S)
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        say("stopped: none of its processes is left")
        raise SystemExit(_INTERRUPTED) from None


def _tell(server: Server, spec: ServeSpec, say: Any) -> None:
    plan = spec.plan
    say(f"serving {server.model_name} at {server.base_url}/v1 (ready after {server.start_s:.0f} s)")
    if plan is not None and plan.patches:
        places = ", ".join(f"{one.role} {one.pid}" for one in server.processes)
        say(f"patches: {plan.label}, in force in {places}")
    else:
        say("patches: none; this is vLLM as it is")
    if spec.identity is not None:
        say(f"requests need a tenant's key: {spec.identity}")
    else:
        say(
            "requests need the key"
            if spec.api_key
            else "requests need no key; only this machine can send any"
        )
    say("Ctrl-C ends it")


def _check_key(api_key: str, host: str, *, loopback: bool) -> None:
    if not api_key and not loopback:
        raise UserError(
            f"--host {host}: others can reach it, so it needs a key: set VLLM_API_KEY, or give --api-key"
        )
    if any(not 32 < ord(c) < 127 for c in api_key):
        raise UserError("--api-key: a header cannot carry it; use printable ASCII without spaces")


def _small_model(say: Any) -> str:
    from harness.engines.live.model import ensure_model

    return os.fspath(ensure_model(say=say))

"""`bench top`: what the prefix cache does, from a server that runs or a run that has ended."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from harness.cache_view import CacheView

PAGE = "/patchbench/cache"
_TIMEOUT_S = 10.0
_PREFIXES = 8
_PLAIN_WIDTH = 140
_TENANT_WIDTH = 6
# Shown only where there is so much that it is not printed as nothing: a terminal of 80 characters has room for the others.
_RARE = ("below", "cut", "unlanded", "other_salt")
_RARE_SHARE = 0.0005
_MOST_BYTES = 16 << 20
_NAMES = ("device", "below", "evicted", "cut", "unlanded", "other_salt", "never")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top")(top)


def top(
    source: Annotated[
        str, typer.Argument(metavar="URL|RUN", help="a server (http://127.0.0.1:8000) or a run's folder")
    ],
    every: Annotated[
        float, typer.Option(help="seconds between two looks at a server", min=1.0, max=3600.0)
    ] = 2.0,
    times: Annotated[int, typer.Option(help="looks at a server; 0 goes on until Ctrl-C", min=0)] = 0,
    key: Annotated[
        str,
        typer.Option(help="the operator's key, where the server has an identity file", envvar="VLLM_API_KEY"),
    ] = "",
) -> None:
    """Show hits, misses by cause and waste by tenant, as the patch cachedash counts them.

    Of a server: a table that is drawn anew on a terminal, elsewhere a line a tenant and look, each with the counts since
    the look before. Of a run: a table for each arm that had cachedash.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    if source.startswith(("http://", "https://")):
        _watch(source.rstrip("/").removesuffix(PAGE).removesuffix("/v1"), every, times, key, console)
    else:
        _show_run(Path(source), console)


# a run


def _show_run(path: Path, console: Console) -> None:
    from harness.cache_limits import pooled
    from harness.cache_view import CacheView
    from harness.records import load_run

    if not path.is_dir():
        raise UserError(f"{path} is neither a run's folder nor a URL; as in bench top http://127.0.0.1:8000")
    shown = False
    for name, records in load_run(path).arms.items():
        tables = [table for record in records if (table := record.cache) is not None]
        if not tables:
            continue
        shown = True
        seen = CacheView.of_frames(tables)
        console.print(_table(seen, f"{name}: {len(tables)} seed{'s' * (len(tables) != 1)}"))
        bound = pooled([r.manifest["cache_bounds"] for r in records if r.manifest.get("cache_bounds")])
        if bound is not None:
            rates = ", ".join(f"{key.replace('_', ' ')} {value:.1%}" for key, value in bound["all"].items())
            console.print(f"prompt tokens: {rates}", highlight=False)
            for why in bound["estimate"]:
                console.print(f"an estimate, no bound: {why}", highlight=False)
        console.print(_prefixes(seen))
    if not shown:
        raise UserError(f"{path}: no arm had the patch cachedash; run it with --enable cachedash,...")


# a server


def _watch(url: str, every: float, times: int, key: str, console: Console) -> None:
    looks = _looks(url, every, times, key)
    if not console.is_terminal:
        for number, (seen, answer) in enumerate(looks):
            _plain(seen, answer, number, console)
        return
    from rich.live import Live

    with Live(console=console, refresh_per_second=4) as live:
        for seen, answer in looks:
            live.update(_screen(url, seen, answer))


def _looks(url: str, every: float, times: int, key: str) -> Iterator[tuple[CacheView, dict[str, Any]]]:
    """What was counted since the look before (at first: since the server started), and the whole answer."""
    from harness.cache_view import CacheView

    before: CacheView | None = None
    number = 0
    while True:
        answer = _fetch(url, key)
        try:
            seen = CacheView.of_answer(answer)
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{url}{PAGE} gave an answer of another kind; is it a server of this project?"
            ) from None
        yield (seen if before is None else seen.since(before)), answer
        before, number = seen, number + 1
        if number == times:
            return
        time.sleep(every)


def _fetch(url: str, key: str) -> dict[str, Any]:
    # Nothing of the environment's proxies, and the key goes to nobody else.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        request = urllib.request.Request(url + PAGE)
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            found = json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}{PAGE}: {_refused(error.code)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise UserError(f"{url}{PAGE} cannot be read ({why}); is the server up?") from None
    if not isinstance(found, dict):
        raise UserError(f"{url}{PAGE} gave an answer of another kind; is it a server of this project?")
    return found


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _refused(code: int) -> str:
    if code in (401, 403):
        return "the server wants the operator's key: --key, or VLLM_API_KEY"
    if code == 404:
        return "no such page; serve with the patch, as in bench serve --enable cachedash,..."
    return f"the server answered {code}"


# what is shown


def _screen(url: str, seen: CacheView, answer: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from harness.cache_view import CacheView

    state = f"{float(answer['usage']):.0%} of {int(answer['pool_blocks']):,} blocks of {answer['block_tokens']} tokens in use"
    whole = CacheView.of_answer(answer)
    return Group(
        Text(f"{url}   {state}"),
        _table(seen, "since the last look"),
        _table(whole, "since the server started"),
        _prefixes(whole),
    )


def _table(seen: CacheView, title: str) -> RenderableType:
    from rich.text import Text

    table = _bare_table(Text(title))
    whole = seen.outcomes()
    least = _RARE_SHARE * sum(whole.values())
    named = [name for name in _NAMES[1:] if name not in _RARE or whole[name] > least]
    table.add_column("tenant", no_wrap=True, min_width=_TENANT_WIDTH)
    for name in ("requests", "blocks", "hit", *named, "recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    for tenant in ("", *seen.tenants):
        table.add_row(
            Text(_safe(tenant) or "all"), *_cells(seen, tenant or None, named), end_section=not tenant
        )
    return table


def _bare_table(title: str | Text) -> Table:
    """Without bars: ten columns are to fit into 80 characters."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        collapse_padding=True,
        pad_edge=False,
    )


def _cells(seen: CacheView, tenant: str | None, named: list[str]) -> list[str]:
    """Requests, blocks, share found, shares by outcome, tokens computed again."""
    outcomes = seen.outcomes(tenant)
    asked = sum(outcomes.values())
    found = outcomes["device"] + outcomes["below"]
    shares = [found, *(outcomes[name] for name in named)]
    return [
        f"{seen.total('requests', tenant=tenant):,}",
        f"{asked:,}",
        *(f"{n / asked:.1%}" if asked else "-" for n in shares),
        f"{seen.total('recomputed_tokens', tenant=tenant):,}",
    ]


def _prefixes(seen: CacheView) -> RenderableType:
    from rich.text import Text

    table = _bare_table("most asked prefixes")
    for name, justify in (
        ("first block", "left"),
        ("last asked by", "left"),
        ("requests", "right"),
        ("blocks", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("hit", justify="right")
    for one in seen.prefixes[:_PREFIXES]:
        hit = f"{one.found / one.asked:.1%}" if one.asked else "-"
        table.add_row(
            Text(_safe(one.name)), Text(_safe(one.tenant)), f"{one.requests:,}", f"{one.asked:,}", hit
        )
    return table


def _safe(name: str) -> str:
    """A name that came from outside, without what a terminal would obey."""
    return name if name.isprintable() else json.dumps(name)[1:-1]


def _plain(seen: CacheView, answer: dict[str, Any], number: int, console: Console) -> None:
    """A line a tenant; names as JSON, so that none can look like something else."""
    since = "start" if number == 0 else "last look"
    for tenant in ("", *seen.tenants):
        outcomes = seen.outcomes(tenant or None)
        asked = sum(outcomes.values())
        found = outcomes["device"] + outcomes["below"]
        parts = [
            f"t={float(answer['t_s']):.1f}s",
            f"since={since.replace(' ', '_')}",
            f"tenant={json.dumps(tenant) if tenant else 'all'}",
            f"requests={seen.total('requests', tenant=tenant or None)}",
            f"blocks={asked}",
            f"hit={found / asked:.4f}" if asked else "hit=-",
            *(f"{name}={outcomes[name]}" for name in _NAMES),
        ]
        console.print(" ".join(parts), highlight=False, markup=False, soft_wrap=True)

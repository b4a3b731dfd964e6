"""What `cachedash` counted in a server's engine, as the record table `cache`; asked once, before the server ends."""

from __future__ import annotations

import json
import urllib.request

import pyarrow as pa

from harness.schema import arrow_schema

PATCH = "cachedash"
_PAGE = "/patchbench/cache?table"
_TIMEOUT_S = 10.0


def fetch(base_url: str, api_key: str, epoch_ns: int) -> tuple[pa.Table | None, str]:
    """The table from the run's start on, and why there is none.

    Args:
        base_url: of the server, with or without `/v1`. api_key: the operator's.
        epoch_ns: the run's start on the engine's clock (CLOCK_MONOTONIC).
    """
    request = urllib.request.Request(base_url.rstrip("/").removesuffix("/v1") + _PAGE)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    # Nothing of the environment's proxies: the server is on this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            columns = json.loads(answer.read())["table"]
        table = pa.Table.from_pydict(columns, schema=arrow_schema("cache"))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        return None, f"{type(error).__name__}: {error}"
    return since(table, epoch_ns), ""


def since(table: pa.Table, epoch_ns: int) -> pa.Table:
    """The windows that end after the run's start, their times counted from it."""
    frame = table.to_pandas()
    frame["t_ns"] -= epoch_ns
    kept = frame[frame["t_ns"] > 0]
    return pa.Table.from_pandas(kept, schema=table.schema, preserve_index=False)

"""Three witnesses of one run: the client, the engine's telemetry, and the server's own counters.

What all of them must agree on is compared; what cannot be known to the token gets the bounds that follow from how
vLLM counts. Its front end counts a token when it hands it on, so tokens of a request that was given up may or may not
have been counted: the sum without them is the lower bound, the sum with all of them the upper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from harness.engines.live.prometheus import Metrics
from harness.engines.live.telemetry.collect import Telemetry
from harness.engines.live.telemetry.join import client_id, join


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Two witnesses contradict each other.

    Attributes:
        what: output_tokens, prompt_tokens, prefix_hits, preemptions, finished, unseen, unended or metrics.
        detail: who says what, with the numbers.
    """

    what: str
    detail: str


def reconcile(
    telemetry: Telemetry, requests: pd.DataFrame | None = None, metrics: Metrics | None = None
) -> list[Disagreement]:
    """What the witnesses do not agree on; empty if all is well.

    Args:
        telemetry: of the run.
        requests: the table `requests` of `harness.schema`, with what the *client* counted: request_id, status,
            output_tokens and, where the server told it, prompt_tokens_counted.
        metrics: scraped before the first request and after the last; differences that span one of its faults are
            not compared, for they mean nothing.
    """
    found = [] if requests is None else list(_client(telemetry, requests))
    if metrics is not None:
        if not metrics.whole:
            why = metrics.errors[0] if metrics.errors else "it was read less than twice"
            found.append(
                Disagreement("metrics", f"/metrics did not answer at the start or at the end ({why})")
            )
        elif not metrics.faults:
            found += _metrics(telemetry, requests, metrics)
    return found


def _client(telemetry: Telemetry, requests: pd.DataFrame) -> Iterator[Disagreement]:
    joined = join(telemetry, list(requests["request_id"]))
    engine = joined.requests.to_pandas()
    theirs = requests.reset_index(drop=True)
    served = theirs["status"] == "ok"
    seen = engine["engine_id"].notna()
    yield from _rows("unseen", theirs, served & ~seen, "served, says the client; the engine never saw it")
    yield from _rows(
        "unseen",
        theirs,
        (theirs["status"] == "rejected") & seen,
        "refused, says the client; the engine has it",
    )
    both = served & seen
    ours = engine["output_tokens"].fillna(0)
    differs = both & (ours != theirs["output_tokens"])
    yield from _rows("output_tokens", theirs, differs, _pair(theirs["output_tokens"], ours))
    # A client that left may have missed some, but cannot have got more than there were.
    more = ~served & seen & engine["finish_reason"].notna() & (theirs["output_tokens"] > ours)
    yield from _rows("output_tokens", theirs, more, _pair(theirs["output_tokens"], ours))
    if "prompt_tokens_counted" in theirs:
        counted = theirs["prompt_tokens_counted"]
        differs = both & counted.notna() & (counted != engine["prompt_tokens_counted"])
        yield from _rows("prompt_tokens", theirs, differs, _pair(counted, engine["prompt_tokens_counted"]))


def _pair(client: pd.Series, engine: pd.Series) -> pd.Series:
    return "the client counted " + client.astype(str) + ", the engine " + engine.astype(str)


def _rows(
    what: str, requests: pd.DataFrame, wrong: pd.Series, why: pd.Series | str
) -> Iterator[Disagreement]:
    if not wrong.any():
        return
    row = int(wrong.to_numpy().argmax())
    text = why if isinstance(why, str) else why.iloc[row]
    more = f" (and {int(wrong.sum()) - 1} more)" if wrong.sum() > 1 else ""
    yield Disagreement(what, f"{requests['request_id'].iloc[row]}: {text}{more}")


def _metrics(telemetry: Telemetry, requests: pd.DataFrame | None, metrics: Metrics) -> Iterator[Disagreement]:
    seen = telemetry.window(metrics.points[0].t_ns, metrics.points[-1].t_ns).requests.to_pandas()
    unended = int(seen["finish_reason"].isna().sum())
    if unended:
        yield Disagreement("unended", f"{unended} requests were still in the engine at the last scrape")
    given_up = seen["finish_reason"].isna() | (seen["finish_reason"] == "abort")
    if requests is not None:
        not_ok = set(requests["request_id"][requests["status"] != "ok"])
        given_up |= seen["engine_id"].map(client_id).isin(not_ok)
    begun = seen["first_token_ns"].notna()
    ended = seen["finish_reason"].isin(["length", "stop"])
    checks = (
        ("output_tokens", "vllm:generation_tokens", seen["output_tokens"]),
        ("prompt_tokens", "vllm:prompt_tokens", seen["prompt_tokens_counted"].where(begun, 0)),
        ("preemptions", "vllm:num_preemptions", seen["preemptions"]),
        ("finished", "vllm:request_success", ended.astype(int)),
    )
    for what, name, values in checks:
        counted = metrics.increase(name)
        if name.endswith("success"):
            by_reason = [metrics.increase(name, finished_reason=reason) for reason in ("length", "stop")]
            counted = None if counted is None else sum(value or 0.0 for value in by_reason)
        least, most = int(values[~given_up].sum()), int(values.sum())
        yield from _total(what, name, counted, least, most)
    # Counted as a request is admitted, whatever becomes of it.
    hits = int(seen["cached_tokens"].fillna(0).sum())
    counted = metrics.increase("vllm:prefix_cache_hits")
    if counted is not None:
        # What a KV connector brought is a hit of the engine's, and upstream counts it apart.
        counted += metrics.increase("vllm:external_prefix_cache_hits") or 0.0
    yield from _total("prefix_hits", "vllm:prefix_cache_hits", counted, hits, hits)


def _total(what: str, name: str, counted: float | None, least: int, most: int) -> Iterator[Disagreement]:
    if counted is None:
        yield Disagreement("metrics", f"the server does not show {name}: serve without --disable-log-stats")
    elif not least <= counted <= most:
        expected = f"{least}" if least == most else f"between {least} and {most}"
        yield Disagreement(what, f"the server counted {counted:g} ({name}), the engine {expected}")

"""Write a list of prompts for `warmup`: what the operator knows, or what the requests of an earlier run asked for.

    .venv/bin/python scripts/prompt_list.py prompts.jsonl
    .venv/bin/python scripts/prompt_list.py prompts.jsonl --run results/yesterday --seeds 7 --tokens 20000
    bench run --enable warmup --set warmup.list_file=prompts.jsonl

Without a run: the five-phase workload's system prompts as they are before the switch (the new one is not known
beforehand), the most important tenants first.

With one: prefixes that requests of an arm had in common, the most asked first, as many tokens as asked for. Asked most
is what was asked in most half minutes, then most often: a conversation is over soon, a popular document is not. Nothing
is known of the run's seeds but what its requests sent. A list that is to be judged must not come from the requests that
judge it: take another seed, or (`--phases`) other phases. In the five phases what is popular differs between seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness import plan as plans  # noqa: E402
from harness.atomic import write_text  # noqa: E402
from harness.errors import UserError, told  # noqa: E402
from harness.records import RunRecord, load_run  # noqa: E402
from harness.worker import build_workload  # noqa: E402
from workloads.five_phase import phrases  # noqa: E402
from workloads.five_phase.context import Context  # noqa: E402
from workloads.five_phase.corpus import load_corpus  # noqa: E402
from workloads.five_phase.tenants import TENANTS  # noqa: E402
from workloads.request import PlannedRequest, TokenIds  # noqa: E402

_DOMAINS = {"chat": phrases.CHAT, "completion": phrases.COMPLETION, "rag": phrases.READING}
_WINDOW_NS = 30_000_000_000
Prompts = list[tuple[str, list[int]]]


def system_prompts(vocab_size: int = 128_256, length_scale: float = 1.0) -> dict[str, list[int]]:
    """Each tenant's system prompt (token ids) at the start of the run, by tenant; the same for every seed."""
    context = Context(load_corpus(vocab_size), 0, length_scale)
    return {
        tenant.name: context.system_part(tenant, _DOMAINS[tenant.kind][tenant.name]).ids.tolist()
        for tenant in sorted(TENANTS, key=lambda tenant: tenant.priority)
    }


@dataclass
class _Prefix:
    """What some requests begin with: its names, its tokens, what it extends, and when it was asked for."""

    name: str
    tokens: TokenIds
    parent: str
    windows: set[tuple[int, int]] = field(default_factory=set)
    count: int = 0


def asked_prefixes(seeds: Iterable[tuple[int, Sequence[PlannedRequest]]], tokens: int) -> Prompts:
    """Prefixes of whole segments that were asked for in two half minutes at least, by name; the most asked first.

    Args:
        seeds: by seed the requests that were served. tokens: the most that all of them may need, what they share once.
    """
    found: dict[str, _Prefix] = {}
    for seed, requests in seeds:
        for request in requests:
            digest, end, parent, names = hashlib.sha256(), 0, "", []
            # The last segment is what this request alone has to say.
            for segment in request.segments[:-1]:
                part = request.prompt[end : end + segment.tokens]
                end += segment.tokens
                digest.update(part.tobytes())
                names.append(f"{segment.kind} {segment.name}")
                key = digest.hexdigest()
                one = found.setdefault(key, _Prefix(", ".join(names), request.prompt[:end], parent))
                one.windows.add((seed, request.intended_ns // _WINDOW_NS))
                one.count += 1
                parent = key
    # What another one extends stands before it, however their digests sort.
    order = sorted(
        found.items(), key=lambda item: (-len(item[1].windows), -item[1].count, len(item[1].tokens), item[0])
    )
    taken: dict[str, _Prefix] = {}
    for key, one in order:
        # What it extends was asked for at least as often, and is there already unless there was no room for it.
        begins = len(found[one.parent].tokens) if one.parent else 0
        if len(one.windows) < 2 or (one.parent and one.parent not in taken):
            continue
        if len(one.tokens) - begins <= tokens:
            tokens -= len(one.tokens) - begins
            taken[key] = one
    extended = {one.parent for one in taken.values()}
    return [(one.name, one.tokens.tolist()) for key, one in taken.items() if key not in extended]


def observed(
    run: RunRecord, arm: str, seeds: Sequence[int], phases: Sequence[int]
) -> list[tuple[int, list[PlannedRequest]]]:
    """By seed, each once, the requests that an arm admitted; all seeds and phases where none are named.

    Raises:
        UserError: the arm or a seed is not there, or the run's traffic cannot be made again.
    """
    plan = plans.read(run.path, same_code=False)
    records = {record.seed: record for record in run.arms.get(arm, ())}
    missing = [seed for seed in seeds if seed not in records]
    if not records or missing:
        what = f"seed {missing[0]} of the arm {arm!r}" if missing else f"finished arm {arm!r}"
        raise UserError(
            f"{run.path} has no {what}; it has {', '.join(name for name in run.arms if run.arms[name])}"
        )
    out = []
    for seed in dict.fromkeys(seeds or sorted(records)):
        workload = build_workload(plan, seed)
        if workload.sha256 != records[seed].manifest["workload"]["sha256"]:
            raise UserError(
                f"{run.path}: seed {seed} cannot be made again; the workload's code has changed since"
            )
        rows = records[seed].requests
        rows = rows[rows["cached_tokens"].notna() & (rows["phase"].isin(phases) if phases else True)]
        served = set(rows["request_id"])
        out.append((seed, [one for one in workload.requests if one.request_id in served]))
    return out


def main() -> None:
    """Write the list."""
    with told("prompt_list"):
        _write()


def _write() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--length-scale", type=float, default=1.0)
    parser.add_argument("--run", type=Path, help="a finished run; its most asked prefixes are listed")
    parser.add_argument("--arm", default="tuned", help="whose requests; `tuned` if not given")
    parser.add_argument("--seeds", default="", help="of these seeds, as in 7,8; all if not given")
    parser.add_argument("--phases", default="", help="sent in these phases, as in 2,3; all if not given")
    parser.add_argument("--tokens", type=int, default=20_000, help="most tokens of the list (20,000)")
    options = parser.parse_args()
    if not 0 < options.length_scale < math.inf:
        raise UserError(f"--length-scale must be above 0, not {options.length_scale}")
    if options.tokens < 1:
        raise UserError(f"--tokens must be at least 1, not {options.tokens}")
    prompts: Prompts
    if options.run is None:
        prompts = list(system_prompts(options.vocab_size, options.length_scale).items())
    else:
        if not (options.run / "plan.json").is_file():
            raise UserError(f"{options.run} is no run's folder: `bench run` makes one")
        seeds, phases = (_numbers(getattr(options, name), f"--{name}") for name in ("seeds", "phases"))
        prompts = asked_prefixes(observed(load_run(options.run), options.arm, seeds, phases), options.tokens)
        if not prompts:
            raise UserError(
                f"{options.run}: no prefix of at most {options.tokens} tokens was asked for in two half minutes; "
                "name more --seeds or --phases, or raise --tokens"
            )
    lines = [
        json.dumps({"name": name, "prompt_token_ids": tokens}, separators=(",", ":"))
        for name, tokens in prompts
    ]
    write_text(options.out, "\n".join(lines) + "\n")


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{option} must be numbers joined by commas, as in 2,3, not {text!r}") from None


if __name__ == "__main__":
    main()

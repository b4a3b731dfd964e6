"""Write the five-phase workload's system prompts as a list for `warmup`: what the operator of these tenants would know.

    .venv/bin/python scripts/prompt_list.py prompts.jsonl
    bench run --enable warmup --set warmup.list_file=prompts.jsonl

The prompts as they are before the switch; the new one is not known beforehand. The most important tenants first.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from harness.atomic import write_text
from harness.errors import UserError, told
from workloads.five_phase import phrases
from workloads.five_phase.context import Context
from workloads.five_phase.corpus import load_corpus
from workloads.five_phase.tenants import TENANTS

_DOMAINS = {"chat": phrases.CHAT, "completion": phrases.COMPLETION, "rag": phrases.READING}


def system_prompts(vocab_size: int = 128_256, length_scale: float = 1.0) -> dict[str, list[int]]:
    """Each tenant's system prompt (token ids) at the start of the run, by tenant; the same for every seed."""
    context = Context(load_corpus(vocab_size), 0, length_scale)
    return {
        tenant.name: context.system_part(tenant, _DOMAINS[tenant.kind][tenant.name]).ids.tolist()
        for tenant in sorted(TENANTS, key=lambda tenant: tenant.priority)
    }


def main() -> None:
    """Write the list."""
    with told("prompt_list"):
        _write()


def _write() -> None:
    parser = argparse.ArgumentParser(description="Write the five-phase workload's system prompts as a list.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--length-scale", type=float, default=1.0)
    options = parser.parse_args()
    if not 0 < options.length_scale < math.inf:
        raise UserError(f"--length-scale must be above 0, not {options.length_scale}")
    prompts = system_prompts(options.vocab_size, options.length_scale)
    lines = [
        json.dumps({"name": name, "prompt_token_ids": tokens}, separators=(",", ":"))
        for name, tokens in prompts.items()
    ]
    write_text(options.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Whether patches change what a real model writes: greedy answers with and without them, prompt by prompt.

Three passes over the same prompts: without patches one at a time, without patches all at once, and with patches all at
once. A patch of scheduling changes which requests share a step, and with the batch's shape the rounding of floating
point: where the two likeliest tokens are nearly equal, another one may come out. That happens without any patch too,
which the second pass shows. So a difference counts as rounding only where the answer without patches had such a near
tie at the first token that differs; any other one is a change of what is generated, that is, a bug.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.arms import Arm
from harness.engines.flags import EngineFlags
from harness.engines.live.served import ServedModel
from harness.engines.live.server import Server, launch
from harness.errors import RunFailed
from patches.seam.plan import PatchPlan

Say = Callable[[str], None]

# Logprobs of the two likeliest tokens nearer than this are a tie: float32 sums of a few thousand products differ by
# some 1e-5 of the logits with their order, and logits are of the order of 10.
TIE = 1e-3
PROMPTS, OUTPUT_TOKENS = 24, 32
FLAGS = EngineFlags(max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=16, block_size=32)
KV_CACHE_BYTES = 2**28
_TENANTS = (("gold-a", "gold", 4), ("silver-0", "silver", 2), ("bronze-0", "bronze", 1))
_TIMEOUT_S = 600.0
_SEED = 11
_FIRST_ID = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer: its tokens, and by how much the chosen one's logprob led the runner-up's (None: unknown)."""

    ids: tuple[int, ...]
    leads: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two answers to one prompt that part at `position`; `tie` where the first one had a near tie there."""

    prompt: int
    position: int
    lead: float | None

    @property
    def tie(self) -> bool:
        """Rounding explains it."""
        return self.lead is not None and abs(self.lead) < TIE


def differences(before: Sequence[Answer], after: Sequence[Answer]) -> list[Difference]:
    """Where answers part, prompt by prompt."""
    found = []
    for prompt, (one, other) in enumerate(zip(before, after, strict=True)):
        if one.ids == other.ids:
            continue
        pairs = zip(one.ids, other.ids, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.ids), len(other.ids)))
        lead = one.leads[position] if position < len(one.leads) else None
        found.append(Difference(prompt, position, lead))
    return found


def report(
    alone: Sequence[Answer], off: Sequence[Answer], on: Sequence[Answer], label: str
) -> tuple[list[str], bool]:
    """What was found, a line each, and whether rounding explains all of it."""
    lines = []
    for what, found in (
        ("no patches, one at a time against all at once", differences(alone, off)),
        (f"all at once, no patches against {label}", differences(off, on)),
    ):
        bugs = [one for one in found if not one.tie]
        lines.append(
            f"{what}: {len(off) - len(found)} of {len(off)} answers equal, {len(found) - len(bugs)} part at a near tie, "
            f"{len(bugs)} part elsewhere"
        )
        lines += [
            f"  prompt {one.prompt}, token {one.position}: "
            + ("the lead is not known" if one.lead is None else f"the first led by {one.lead:.2g}")
            for one in found
        ]
    return lines, all(one.tie for one in differences(off, on))


def prompts_of(model: ServedModel) -> list[list[int]]:
    """Prompts of mixed length that share prefixes in groups; the same for the same vocabulary."""
    rng = np.random.Generator(np.random.PCG64(_SEED))
    shared = [rng.integers(_FIRST_ID, model.vocab_size, 64).tolist() for _ in _TENANTS]
    lengths = rng.integers(8, 200, PROMPTS).tolist()
    return [
        shared[i % len(shared)] + rng.integers(_FIRST_ID, model.vocab_size, length).tolist()
        for i, length in enumerate(lengths)
    ]


def answers(server: Server, prompts: Sequence[Sequence[int]], *, at_once: bool) -> list[Answer]:
    """Ask a server; RunFailed where it does not answer."""

    def ask(number: int) -> Answer:
        tenant, tier, weight = _TENANTS[number % len(_TENANTS)]
        body = {
            "model": server.model_name,
            "prompt": list(prompts[number]),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "vllm_xargs": {
                "tenant": tenant,
                "tier": tier,
                "weight": weight,
                # All prompts at once take a small machine minutes, and a refused answer cannot be compared.
                "slo_ttft_ms": _TIMEOUT_S * 1e3,
            },
        }
        status, text = server.endpoint.call("POST", "/v1/completions", body, _TIMEOUT_S)
        if status != 200:
            raise RunFailed(f"prompt {number} got no answer: {status} {' '.join(text.split())[:200]}")
        return _answer(json.loads(text)["choices"][0])

    with ThreadPoolExecutor(len(prompts) if at_once else 1) as pool:
        return list(pool.map(ask, range(len(prompts))))


def _answer(choice: Mapping[str, Any]) -> Answer:
    told = choice["logprobs"]
    leads: list[float | None] = []
    for chosen, top in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
        # The chosen token may stand there twice, under its own name and as one of the likeliest.
        others = sorted((value for value in top.values() if value != chosen), reverse=True)
        leads.append(chosen - others[0] if others else 0.0 if len(top) > 1 else None)
    return Answer(tuple(choice["token_ids"]), tuple(leads))


@dataclass(frozen=True, slots=True)
class Identity:
    """What was found: a line each, and whether rounding explains all of it."""

    lines: tuple[str, ...]
    explained: bool


def compare(plan: PatchPlan, model: ServedModel, say: Say) -> Identity:
    """Start two servers, one after the other, and compare their answers.

    Raises:
        UserError, RunFailed: as `launch` does; RunFailed where a prompt got no answer.
    """
    prompts = prompts_of(model)
    with tempfile.TemporaryDirectory(prefix="bench-identity-") as scratch:
        say("without patches: one prompt at a time, then all at once")
        alone, off = _passes(model, None, Path(scratch) / "off", prompts, alone=True)
        say(f"with {plan.label}: all at once")
        _, on = _passes(model, plan, Path(scratch) / "on", prompts, alone=False)
    lines, good = report(alone, off, on, plan.label)
    return Identity(tuple(lines), good)


def _passes(
    model: ServedModel, plan: PatchPlan | None, folder: Path, prompts: Sequence[Sequence[int]], *, alone: bool
) -> tuple[list[Answer], list[Answer]]:
    """Answers one at a time (where wanted) and all at once, each with an empty cache."""
    arm = Arm("identity", "tuned", FLAGS, plan)
    with launch(
        arm,
        model.folder,
        log_path=folder / "server.log",
        receipts_dir=folder / "receipts",
        kv_cache_bytes=KV_CACHE_BYTES,
    ) as server:
        first = answers(server, prompts, at_once=False) if alone else []
        server.reset_prefix_cache()
        return first, answers(server, prompts, at_once=True)

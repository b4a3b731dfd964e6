"""`warmup`: prefixes that will be wanted are in the cache before the first request that wants them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from patches.kv.hot import HotPrefixes
from patches.kv.prompt_list import read_prompt_list, tokens_of
from patches.seam.own import Share
from patches.seam.patch import Hooks, Knobs, Patch
from patches.seam.worth import Worths

if TYPE_CHECKING:
    from patches.seam.context import Context

# Below everything that somebody has asked for, above what holds nothing: given up first of all that is cached.
_UNPROVEN = -1e-3


class WarmupKnobs(Knobs):
    """What is warmed, and how much of a step it may take."""

    list_file: str = Field(
        default="",
        description="JSON Lines file of prompts to compute before the engine is ready, the most important first: "
        '{"prompt_token_ids": [...]}, {"text": "..."} or {"messages": [...]} a line, with an optional cache_salt. '
        "Empty: none.",
        json_schema_extra={"input_file": True},
    )
    pool_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Most of the KV cache that the list may fill at the start; what comes later in it is left out.",
    )
    from_traffic: bool = Field(
        default=True,
        description="Whether prefixes that many requests share are computed again in idle moments when they have "
        "left the cache.",
    )
    hot_requests: int = Field(
        default=8,
        ge=2,
        le=100_000,
        description="Requests within two windows that make the prefix which they share worth that.",
    )
    window_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Length of such a window.",
    )
    hot_blocks: int = Field(
        default=128,
        ge=1,
        le=4096,
        description="Blocks from a prompt's beginning that are looked at for a shared prefix.",
    )
    look_s: float = Field(
        default=1.0,
        gt=0,
        le=3600,
        description="How often, at most, it is looked whether a shared prefix has left the cache.",
    )
    idle_tokens: int = Field(
        default=128,
        ge=0,
        le=65_536,
        description="Tokens warmed in one step while nothing else runs. A request that comes meanwhile waits for the "
        "end of that step, so this is the bound of what warming can cost it. 0: never once there is traffic.",
    )
    beside_tokens: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="Tokens warmed beside decodes in one step, which then takes longer by what they cost. 0: never.",
    )

    @field_validator("list_file")
    @classmethod
    def _readable(cls, value: str) -> str:
        if value:
            read_prompt_list(Path(value))
        return value


class Warmer:
    """What one engine's warm-up knows: what it asked for, and what of that nobody has used yet."""

    def __init__(self, knobs: WarmupKnobs, context: Context) -> None:
        self._knobs, self._context = knobs, context
        self._share = Share(knobs.idle_tokens, knobs.beside_tokens)
        self._hot = HotPrefixes(
            window_s=knobs.window_s, hot_requests=knobs.hot_requests, most_blocks=knobs.hot_blocks
        )
        self._asked: set[str] = set()
        self._look_s = float("-inf")
        self.unproven = Worths(demotes=True)
        self.used_blocks = self.listed = self.left_out = self.warmed = 0

    # from the list

    def warm_list(self) -> None:
        """Ask for the list's prompts; before the scheduler's first pass."""
        scheduler = self._context.scheduler
        room = int(self._knobs.pool_share * scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
        room *= scheduler.block_size

        def tokenizer() -> Any:
            from vllm.tokenizers import cached_tokenizer_from_config

            return cached_tokenizer_from_config(scheduler.vllm_config.model_config)

        for number, prompt in enumerate(read_prompt_list(Path(self._knobs.list_file)), start=1):
            tokens = tokens_of(prompt, tokenizer)
            if len(tokens) > room or not self._ask(tokens, f"list-{number}", prompt.cache_salt):
                self.left_out += 1
                continue
            room -= len(tokens)
            self.listed += 1

    # from traffic

    def on_add(self, request: Any, now: float) -> None:
        """A request came: what it begins with is counted."""
        if request.prompt_token_ids is None or request.mm_features or request.lora_request is not None:
            return
        hashes = request.block_hashes
        if hashes:
            size = self._context.scheduler.hash_block_size
            self._hot.see(hashes, request.prompt_token_ids, size, request.cache_salt, now)

    def before_schedule(self, now: float) -> None:
        """In an idle moment, look whether something that is wanted has left the cache."""
        knobs = self._knobs
        if not knobs.from_traffic or now < self._look_s or not (knobs.idle_tokens or knobs.beside_tokens):
            return
        if self._context.waiting_requests() or (self._context.scheduler.running and not knobs.beside_tokens):
            return
        self._look_s = now + knobs.look_s
        for prefix in self._hot.hot(now):
            name = prefix.last_hash.hex()
            if name not in self._asked and not self._cached(prefix.last_hash):
                self._ask(prefix.tokens, name, prefix.cache_salt)

    def on_own(self, name: str, outcome: str, now: float) -> None:
        """A prefix is there, or given up."""
        self._asked.discard(name)
        if outcome == "cached":
            self.warmed += 1
            self._context.count("warmed_prefixes")

    # what nobody has used yet

    def on_touch(self, blocks: Any) -> None:
        """Requests found blocks in the cache: those of ours among them have proved their worth."""
        unproven = self.unproven
        if not unproven:
            return
        used = sum(unproven.pop(block.block_hash, None) is not None for block in blocks)
        if used:
            self.used_blocks += used
            self._context.count("warmed_blocks_used", used)

    def on_evict(self, blocks: list[Any], names: list[Any]) -> None:
        """Blocks leave the cache."""
        if self.unproven:
            for name in names:
                self.unproven.pop(name, None)

    # inside

    def _ask(self, tokens: Any, name: str, salt: str | None) -> bool:
        asked = self._context.inject(
            tokens, name=name, cache_salt=salt, share=self._share, computing=self._computing
        )
        if asked:
            self._asked.add(name)
        return asked

    def _computing(self, keys: list[bytes]) -> None:
        self.unproven.update(dict.fromkeys(keys, _UNPROVEN))

    def _cached(self, last_hash: bytes) -> bool:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        pool = self._context.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        name: Any = last_hash
        return pool.get_one_block(make_block_hash_with_group_id(name, 0)) is not None


def build(knobs: WarmupKnobs, context: Context) -> Hooks:
    """The hooks for one engine. On a bare block pool there is no engine to warm."""
    warmer = Warmer(knobs, context)
    if context.scheduler is not None:
        if knobs.list_file:
            context.at_start(warmer.warm_list)
        own = context.own_requests()
        context.gauge("listed_prompts", lambda: float(warmer.listed))
        context.gauge("left_out_prompts", lambda: float(warmer.left_out))
        context.gauge("warmed_prefixes", lambda: float(warmer.warmed))
        context.gauge("warmed_blocks_used", lambda: float(warmer.used_blocks))
        context.gauge("warmed_blocks_unproven", lambda: float(len(warmer.unproven)))
        context.gauge("own_tokens", lambda: float(own.computed_tokens))
        context.gauge("own_steps", lambda: float(own.steps))
        context.gauge("own_traffic_steps", lambda: float(own.traffic_steps))
        context.gauge("own_withdrawn", lambda: float(own.withdrawn))
        context.gauge("own_longest_chunk_tokens", lambda: float(own.longest_chunk_tokens))
    return Hooks(
        on_own=warmer.on_own,
        on_add=warmer.on_add,
        before_schedule=warmer.before_schedule,
        eviction_hint=warmer.unproven,
        on_touch=warmer.on_touch,
        on_evict=warmer.on_evict,
    )


PATCH = Patch(
    name="warmup",
    number="K4",
    area="kv",
    summary="Known prompts are computed before the engine is ready, shared ones again in idle moments",
    knobs=WarmupKnobs,
    build=build,
    seams=("on_own", "on_add", "before_schedule", "eviction_hint", "on_touch", "on_evict"),
    ranks={"eviction_hint": 40},
    why="""\
After a start (or a reset of the prefix cache) the first request of each tenant computes the system prompt that all
later ones find, and those which come meanwhile queue behind it. The operator knows these prompts, and an engine that
has not said it is ready has nothing else to do. Upstream's own warm-up runs made-up tokens, whose blocks nobody asks
for.""",
    how="""\
From a list (`scripts/prompt_list.py` writes one, of known prompts or of what an earlier run's requests asked for most; a
run with another list is another run): the prompts are computed as requests of our own (one output token, which goes
nowhere) while the engine starts, before it answers that it is ready. The clock of the virtual engine starts after that; how long it took is in
the run's record. From traffic: a prefix that many requests of the last two windows began with, and that has left
the cache, is computed again in steps in which nothing runs and nobody waits, in chunks of `idle_tokens`.

Why no request is delayed. Time: at the start there is none to delay. Later one of ours enters a pass only when nobody
waits and nothing runs (or, with `beside_tokens`, only decodes do), one at a time, and one that is under way when
somebody waits is ended before the pass. So a request that comes can wait for one step that it would not have waited for, that
with at most `idle_tokens` of prefill, and no two of them follow each other while it waits; with `idle_tokens=0` for none. Seats: those
of ours are given back before a pass with somebody waiting. Blocks: one of ours takes only blocks that hold nothing, and only
while the longest prompt and a whole step fit beside it. What was warmed and not used yet is given up before any block that
some request filled, so as many of those stay in the cache as without warming. A block proves its worth with its first
hit, and is then one like any other. Our own hits do not count as use, but what is left of a shared prefix is the youngest
once its rest was computed again, so blocks that nobody shares may go before it.""",
    baseline="none: upstream warms kernels and graphs, not the cache",
    mechanism="warmed_blocks_used",
    removable_when="vLLM can be given prompts to compute before it is ready, and computes them again when they are lost",
    references=(
        "L. Zheng et al.: SGLang: efficient execution of structured language model programs. NeurIPS 2024 (shared "
        "prefixes as a tree of blocks)",
    ),
)

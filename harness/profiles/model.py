"""What one engine step costs on a profile's GPU: a pure function of the batch.

    step = layers * (dense(padded tokens) + attention) + once(padded tokens) + head(requests)

- The token count is padded to the captured CUDA-graph sizes, as vLLM runs it. Above the largest one GEMM
  tiles still round it up, so tables are read at the next multiple of 16.
- A mixed step's attention is read from its own grid: it is not the sum of prefill and decode.
- Several prefills in one step are one chunk with the same number of tokens and the same attention work,
  sum(q * kv + q^2 / 2): without that, four prompts of 512 tokens would cost what one of 2,048 costs.
- Outside the tables a step is extrapolated and counted, see `StepTimeModel.outside`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from harness.profiles.capture import capture_sizes
from harness.profiles.grid import Axis, Grid2, Grid4
from harness.profiles.profile import Profile

GEMM_TILE_TOKENS = 16
# The baseline over which attention's slope in kv is taken: long enough that launch noise cancels.
SLOPE_KV_TOKENS = 2048

OUTSIDE = ("tokens", "sequences", "decodes", "chunk", "context")


class StepTimeModel:
    """Step time of one profile under given batch limits.

    Attributes:
        steps: calls so far.
        steps_outside: calls for which at least one quantity was outside the profile's domain.
        outside: the same by quantity.
        steps_unmeasured: calls that rest on a regime of which the profile holds no measurement.
        unmeasured: the same by regime (see `profile.REGIMES`).
    """

    def __init__(
        self,
        profile: Profile,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        captured: Sequence[int] | None = None,
        mixed_penalty: float | None = None,
    ) -> None:
        """Limits default to the profile's stock flags; they decide which sizes are captured.

        `captured` overrides that choice: ascending token counts, or () for an eager engine.
        `mixed_penalty` makes the attention of a mixed step that multiple of what its prefill and its decodes
        take alone, whatever the tables say (for sensitivity).
        """
        tables, domain = profile.tables, profile.domain
        seqs = max_num_seqs or int(profile.stock["max_num_seqs"])
        tokens = max_num_batched_tokens or int(profile.stock["max_num_batched_tokens"])
        if captured is None:
            captured = capture_sizes(seqs, tokens, profile.max_capture)
        self.capture_sizes = tuple(captured)
        self.layers = profile.layers
        self.max_tokens, self.max_sequences = domain.max_tokens, domain.max_sequences
        self.max_decodes, self.max_decodes_mixed = domain.max_decodes, domain.max_decodes_mixed
        self.max_chunk, self.max_context = domain.max_chunk, domain.max_context

        dense = tables.dense
        whole = [profile.layers * a + b for a, b in zip(dense.layer_us, dense.once_us, strict=True)]
        self._dense = _Curve(dense.tokens, whole)
        self._head = _Curve(tables.per_sequence.sequences, tables.per_sequence.us)
        # One look-up a step: everything that depends on the token count alone, padding included.
        self._dense_us = [0.0] + [self._dense.at(self.padded(t)) for t in range(1, tokens + 1)]
        self._head_us = [self._head.at(n) for n in range(seqs + 1)]
        self._prefill = Grid2(tables.prefill.chunk, tables.prefill.kv, tables.prefill.us)
        self._decode = Grid2(tables.decode.n, tables.decode.ctx, tables.decode.us)
        mixed = tables.mixed
        # Without a grid, or with a penalty in its place, a mixed step is a multiple of its parts.
        gridded = mixed is not None and mixed_penalty is None
        self._mixed = (
            Grid4(mixed.chunk, mixed.kv, mixed.n, mixed.ctx, mixed.us) if gridded and mixed else None
        )

        self._sum_factor = 1.0 if mixed_penalty is None else mixed_penalty

        self.steps = 0
        self.steps_outside = 0
        self.outside = dict.fromkeys(OUTSIDE, 0)
        self.steps_unmeasured = 0
        self.unmeasured = dict.fromkeys(profile.not_measured, 0)

    def padded(self, tokens: int) -> int:
        """Tokens that the GEMMs run for a batch of that many."""
        sizes = self.capture_sizes
        if sizes and tokens <= sizes[-1]:
            return sizes[bisect_left(sizes, tokens)]
        return -(-tokens // GEMM_TILE_TOKENS) * GEMM_TILE_TOKENS

    def step_us(
        self,
        prefills: Sequence[tuple[int, int]],
        n_decode: int,
        sum_ctx_decode: int,
        n_sampled: int,
    ) -> float:
        """GPU time of one step, us.

        Args:
            prefills: (new tokens, tokens computed before) of each request that prefills.
            n_decode: requests with one new token.
            sum_ctx_decode: their contexts together, the new tokens included.
            n_sampled: rows of the output head. At least one a request counts, since vLLM computes logits
                for unfinished prefills too.
        """
        chunk = work = 0.0
        deepest = 0
        for new, before in prefills:
            chunk += new
            work += new * before + 0.5 * new * new
            if before > deepest:
                deepest = before
        tokens = int(chunk) + n_decode
        if not tokens:
            return 0.0
        n_sampled = max(n_sampled, n_decode + len(prefills))
        ctx = sum_ctx_decode / n_decode if n_decode else 0.0
        self._count(tokens, n_sampled, chunk, n_decode, max(deepest, ctx))
        if self.unmeasured:
            self._count_unmeasured(chunk, n_decode, deepest)
        dense_us = (
            self._dense_us[tokens] if tokens < len(self._dense_us) else self._dense.at(self.padded(tokens))
        )
        head_us = self._head_us[n_sampled] if n_sampled < len(self._head_us) else self._head.at(n_sampled)
        return dense_us + head_us + self.layers * self._attention_us(chunk, work, n_decode, ctx)

    def dense_us(self, tokens: int) -> float:
        """Everything of a step that depends on its token count alone, us; uncounted."""
        return self._dense.at(self.padded(tokens)) if tokens else 0.0

    def attention_us(self, prefills: Sequence[tuple[int, int]], n_decode: int, sum_ctx_decode: int) -> float:
        """Attention of one layer, us; uncounted, for error reports."""
        chunk = float(sum(new for new, _ in prefills))
        work = sum(new * before + 0.5 * new * new for new, before in prefills)
        return self._attention_us(chunk, work, n_decode, sum_ctx_decode / n_decode if n_decode else 0.0)

    def _attention_us(self, chunk: float, work: float, n: int, ctx: float) -> float:
        if not chunk:
            return self._decode.at(n, ctx)
        # A chunk beyond the table runs as equal pieces, each one behind those before it.
        pieces = 1
        if chunk > self.max_chunk:
            pieces = int(-(-chunk // self.max_chunk))
        piece = chunk / pieces
        # The prior context at which one chunk of this size does the batch's attention work.
        kv = work / chunk - 0.5 * piece
        us = 0.0
        prefill = self._prefill
        if n == 0:
            us = pieces * prefill.at(piece, max(kv, 0.0))
        elif self._mixed is None:
            us = pieces * prefill.at(piece, max(kv, 0.0)) + self._decode.at(n, ctx)
        else:
            us = self._mixed_us(piece, max(kv, 0.0), n, ctx)
            if pieces > 1:
                us += (pieces - 1) * prefill.at(piece, max(kv, 0.0))
        if kv < 0.0:  # several short prompts: less work than one chunk of that size has by itself
            slope = (prefill.at(piece, SLOPE_KV_TOKENS) - prefill.at(piece, 0.0)) / SLOPE_KV_TOKENS
            us += pieces * kv * max(slope, 0.0)
        return us * self._sum_factor if n and self._mixed is None else us

    def _mixed_us(self, chunk: float, kv: float, n: int, ctx: float) -> float:
        grid = self._mixed
        assert grid is not None
        us = grid.at(chunk, kv, n, ctx)
        # Past the mixed grid, add what the missing part costs in the grid of its own kind.
        top_kv, top_n, top_ctx = grid.b.last, grid.c.last, grid.d.last
        if kv > top_kv:
            us += max(self._prefill.at(chunk, kv) - self._prefill.at(chunk, top_kv), 0.0)
        if n > top_n or ctx > top_ctx:
            us += max(self._decode.at(n, ctx) - self._decode.at(min(n, top_n), min(ctx, top_ctx)), 0.0)
        return us

    def _count(self, tokens: int, sequences: int, chunk: float, n: int, context: float) -> None:
        self.steps += 1
        limit = self.max_decodes_mixed if chunk else self.max_decodes
        if (
            tokens <= self.max_tokens
            and sequences <= self.max_sequences
            and n <= limit
            and chunk <= self.max_chunk
            and context <= self.max_context
        ):
            return
        self.steps_outside += 1
        outside = self.outside
        outside["tokens"] += tokens > self.max_tokens
        outside["sequences"] += sequences > self.max_sequences
        outside["decodes"] += n > (limit or self.max_decodes)
        outside["chunk"] += chunk > self.max_chunk
        outside["context"] += context > self.max_context

    def _count_unmeasured(self, chunk: float, n: int, deepest: int) -> None:
        rests_on = {
            "decode": n > 0 and not chunk,
            "prefill": chunk > 0 and not n,
            "context": deepest > 0,
            "mixed": chunk > 0 and n > 0,
            "communication": True,
        }
        hit = False
        for regime in self.unmeasured:
            if rests_on[regime]:
                self.unmeasured[regime] += 1
                hit = True
        self.steps_unmeasured += hit


class _Curve:
    """A table over one axis; past its end it grows in proportion, as compute-bound kernels do."""

    def __init__(self, nodes: Sequence[int], us: Sequence[float]) -> None:
        self.axis, self.us = Axis(nodes), list(us)

    def at(self, x: int) -> float:
        if x <= 0:
            return 0.0
        if x >= self.axis.last:
            return self.us[-1] * x / self.axis.last
        i, w = self.axis.place(x)
        return self.us[i] + w * (self.us[i + 1] - self.us[i])


def outside_shares(model: StepTimeModel) -> Mapping[str, float]:
    """Share of steps outside the domain, by quantity, and `any`; zeros before the first step."""
    steps = max(model.steps, 1)
    return {"any": model.steps_outside / steps} | {k: v / steps for k, v in model.outside.items()}


def unmeasured_shares(model: StepTimeModel) -> Mapping[str, float]:
    """Share of steps that rest on a regime without measurements, by regime, and `any`."""
    steps = max(model.steps, 1)
    return {"any": model.steps_unmeasured / steps} | {k: v / steps for k, v in model.unmeasured.items()}

"""Token ids for prompts and answers that a trace describes without saying what is in them.

Whole-number arithmetic alone, so the ids are the same on every machine: a counter, mixed by the finaliser of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workloads.request import TokenIds

# As the tokenizer of the five phases: ids below are bytes.
FIRST_ID = 256
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
Words = npt.NDArray[np.uint64]
# What a stream of tokens stands for; equal numbers in two kinds must not give equal tokens.
BLOCK, UNNAMED, ANSWER = range(1, 4)


def mix(values: Words) -> Words:
    """Each 64-bit word scrambled, one to one; shape as given."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
        values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    scrambled: Words = values ^ (values >> _SHIFTS[2])
    return scrambled


def keys(seed: int, kind: int, names: Sequence[int]) -> Words:
    """A 64-bit key for each name; the seed and the kind tell equal names apart."""
    with np.errstate(over="ignore"):
        salt = mix(np.array([seed & (2**64 - 1)], dtype=np.uint64) + np.uint64(kind) * _GAMMA)
    return mix(np.array(names, dtype=np.uint64) ^ salt)


def tokens(streams: Words, lengths: Sequence[int], vocab_size: int) -> TokenIds:
    """The first tokens of each stream, one stream after the other, read-only.

    Args:
        streams: keys, shape (n,).
        lengths: tokens of each, shape (n,).
        vocab_size: ids are below this, and at least `FIRST_ID`.
    """
    sizes = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    places = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) - np.repeat(ends - sizes, sizes)
    with np.errstate(over="ignore"):
        words = mix(np.repeat(streams, sizes) + places.astype(np.uint64) * _GAMMA)
        # The upper half of each word, scaled to the range: as even as a remainder, and four times as fast.
        scaled = (words >> np.uint64(32)) * np.uint64(vocab_size - FIRST_ID) >> np.uint64(32)
    ids: TokenIds = scaled.astype(np.int32) + np.int32(FIRST_ID)
    ids.setflags(write=False)
    return ids


def prefix_keys(block_ids: Sequence[int]) -> Words:
    """A 64-bit key for each prefix of the blocks, shape (blocks,): the sum of its blocks' keys, each by its place."""
    names = np.array(block_ids, dtype=np.uint64)
    with np.errstate(over="ignore"):
        places = mix(np.arange(1, len(names) + 1, dtype=np.uint64) * _GAMMA)
        sums: Words = np.cumsum(mix(names + places), dtype=np.uint64)
    return sums


def concatenate(first: Words, second: Words) -> Words:
    """Two runs of keys as one."""
    joined: Words = np.concatenate([first, second])
    return joined

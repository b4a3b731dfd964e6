"""Document tenants: a long document first, a question at the end, an answer that quotes the document.

Which document is asked about follows Zipf's law over a pool that is larger than the KV cache of
any one GPU: a few documents are always warm, the many others come once in a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from workloads.five_phase import phrases
from workloads.five_phase.arrivals import poisson_ns
from workloads.five_phase.context import ARRIVALS, CONTENT, POPULARITY, Context
from workloads.five_phase.corpus import Corpus, load_corpus
from workloads.five_phase.draft import Draft, Part, frozen
from workloads.five_phase.randomness import draw_length, scaled, stream, zipf_cumulative
from workloads.five_phase.tenants import TenantSpec
from workloads.request import Phase, TokenIds

# 300 documents of 4,000 tokens: 1.2 million tokens, twice what 80 GB hold of an 8B model's KV.
POOL_DOCUMENTS = 300
DOCUMENT_TOKENS = (2_000, 8_000)
# The longest document, its heading and question, and the longest answer (four times its tenant's mean of 300).
LONGEST_REQUEST_TOKENS = 10_000
ZIPF_EXPONENT = 0.9
# Words of the passage that the question repeats.
CUE_TOKENS = 8
# The pool is part of the corpus: the same for every seed of the workload.
_POOL_SEED = 20


@dataclass(frozen=True, slots=True)
class Document:
    """A stretch of the corpus under a heading, and where its lines begin (indices into `part.ids`)."""

    part: Part
    lines: tuple[int, ...]


@lru_cache(maxsize=4)
def document_pool(vocab_size: int, length_scale: float) -> tuple[Document, ...]:
    """The documents that all document tenants read; made once a process."""
    corpus = load_corpus(vocab_size)
    low, high = (scaled(tokens, length_scale) for tokens in DOCUMENT_TOKENS)
    # 1 - sqrt(1 - u) has a mean of 1/3: most documents are short, and 2,000 to 8,000 average 4,000.
    shares = 1 - np.sqrt(1 - stream(_POOL_SEED).random(POOL_DOCUMENTS))
    newline = int(corpus.tokenizer.encode("\n")[0])
    documents = []
    start = 0
    for number, share in enumerate(shares.tolist(), start=1):
        length = round(low + (high - low) * share)
        documents.append(_document(corpus, number, start, length, newline))
        start = (start + length) % len(corpus.documents.ids)
    return tuple(documents)


def _document(corpus: Corpus, number: int, start: int, length: int, newline: int) -> Document:
    path = corpus.documents.name_at(start)
    heading = corpus.tokenizer.encode(phrases.DOCUMENT.format(number=number, path=path))
    body = np.take(corpus.documents.ids, np.arange(start, start + length), mode="wrap")
    ids = frozen(np.concatenate([heading, body])[:length])
    lines = np.flatnonzero(ids == newline) + 1
    return Document(Part("document", str(number), ids), tuple(lines[lines < length].tolist()) or (0,))


class Reader:
    """Writes one tenant's requests in one phase."""

    def __init__(self, context: Context, tenant: TenantSpec, phase: Phase, vocab_size: int) -> None:
        self._context, self._tenant, self._phase = context, tenant, phase
        self._rng = context.stream(tenant, CONTENT, phase.number)
        self._system = context.system_part(tenant, phrases.READING[tenant.name])
        pool = document_pool(vocab_size, context.length_scale)
        # What is popular differs between tenants and seeds, but not between phases.
        order = context.stream(tenant, POPULARITY).permutation(len(pool))
        self._ranked = [pool[i] for i in order.tolist()]
        self._cumulative = zipf_cumulative(len(pool), ZIPF_EXPONENT)
        self._quote_end = context.encode(phrases.QUOTE_END)
        self._found = context.encode(phrases.FOUND)
        self._user, self._assistant = context.encode(phrases.USER), context.encode(phrases.ASSISTANT)

    def drafts(self, rate_rps: float) -> Iterator[Draft]:
        """All requests of the phase, in order of their send times."""
        arrivals = self._context.stream(self._tenant, ARRIVALS, self._phase.number)
        for number, now_ns in enumerate(poisson_ns(arrivals, rate_rps, self._phase), start=1):
            document = self._ranked[int(np.searchsorted(self._cumulative, self._rng.random(), side="right"))]
            passage, answer = self._passage(document)
            yield Draft(
                tenant=self._tenant.name,
                phase=self._phase.number,
                intended_ns=now_ns,
                parts=(self._system, document.part, self._question(number, passage)),
                output=answer,
            )

    def _passage(self, document: Document) -> tuple[TokenIds, TokenIds]:
        """Where the question points to, and the answer: the text from there on."""
        ids = document.part.ids
        start = document.lines[int(self._rng.integers(len(document.lines)))]
        length = draw_length(self._rng, self._context.scaled(self._tenant.output_tokens))
        # A passage near the end goes on at the top, so that answers keep their planned lengths.
        quote = np.take(ids, np.arange(start, start + length), mode="wrap")
        return quote[:CUE_TOKENS], frozen(np.concatenate([self._found, quote])[:length])

    def _question(self, number: int, passage: TokenIds) -> Part:
        """The question on a passage; its number makes it one of a kind."""
        opening = self._context.encode(phrases.QUOTE.format(number=number))
        ids = np.concatenate([self._user, opening, passage, self._quote_end, self._assistant])
        name = f"{self._tenant.name}/p{self._phase.number}/{number}"
        return Part("question", name, frozen(ids))

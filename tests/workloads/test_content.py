"""Is the content shared where it should be, and is the true output the true one? Read back as text."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from workloads.five_phase.context import Context
from workloads.five_phase.corpus import load_corpus
from workloads.five_phase.phases import timetable
from workloads.five_phase.rag import POOL_DOCUMENTS, ZIPF_EXPONENT, Reader, document_pool
from workloads.five_phase.randomness import zipf_cumulative
from workloads.five_phase.tenants import TENANTS, TenantSpec
from workloads.request import PlannedRequest, Workload

VOCAB = 128_256


def spans(request: PlannedRequest) -> dict[str, list[int]]:
    """Tokens by segment kind; kinds that come several times are joined."""
    found: dict[str, list[int]] = defaultdict(list)
    start = 0
    for segment in request.segments:
        found[segment.kind] += request.prompt[start : start + segment.tokens].tolist()
        start += segment.tokens
    return found


def test_segments_add_up_and_name_the_same_tokens_everywhere(thin: Workload) -> None:
    content: dict[tuple[str, str], bytes] = {}
    shared = 0
    for request in thin.requests:
        assert sum(segment.tokens for segment in request.segments) == len(request.prompt)
        start = 0
        for segment in request.segments:
            data = request.prompt[start : start + segment.tokens].tobytes()
            start += segment.tokens
            shared += (segment.kind, segment.name) in content
            assert content.setdefault((segment.kind, segment.name), data) == data
    assert shared > len(thin.requests)


def test_every_prompt_begins_with_its_tenants_system_prompt(thin: Workload) -> None:
    prompts: dict[str, set[bytes]] = defaultdict(set)
    for request in thin.requests:
        first = request.segments[0]
        assert first.kind == "system"
        assert first.name.startswith(f"{request.tenant}/v")
        prompts[first.name].add(request.prompt[: first.tokens].tobytes())
    assert all(len(found) == 1 for found in prompts.values())
    # Seven tenants, one of them with two versions, no two alike.
    assert len({next(iter(found)) for found in prompts.values()}) == len(prompts) == 8


@pytest.mark.parametrize("tenant", ["gold-a", "silver-1"])
def test_a_turn_begins_with_the_turn_before_and_its_answer(dense: Workload, tenant: str) -> None:
    conversations: dict[str, list[PlannedRequest]] = defaultdict(list)
    for request in dense.requests:
        if request.tenant == tenant:
            conversations[request.session].append(request)
    followed = 0
    for turns in conversations.values():
        for before, after in pairwise(turns):
            assert (after.intended_ns - before.intended_ns) / 1e9 >= 4.0
            if before.segments[0] == after.segments[0]:
                said = np.concatenate([before.prompt, before.output])
                assert after.prompt[: len(said)].tolist() == said.tolist()
                followed += 1
    assert followed > 200
    histories = [sum(s.kind == "turn" for s in r.segments) for v in conversations.values() for r in v]
    assert set(histories) == {1, 2, 3, 4, 5, 6}


def test_gold_a_changes_its_prompt_in_phase_2_and_nobody_else_does(dense: Workload) -> None:
    shares: dict[str, list[bool]] = defaultdict(list)
    for request in dense.requests:
        new = request.segments[0].name.endswith("/v2")
        if request.tenant == "gold-a":
            half = "first" if request.intended_ns < 90e9 else "second"
            shares[f"{request.phase} {half}"].append(new)
        else:
            assert not new
    assert not any(shares["1 first"])
    assert 0.04 < np.mean(shares["2 first"]) < 0.2
    assert all(shares["2 second"])


def test_keystrokes_cancel_the_one_before(dense: Workload) -> None:
    sessions: dict[str, list[PlannedRequest]] = defaultdict(list)
    for request in dense.requests:
        if request.tenant == "gold-b":
            sessions[request.session].append(request)
        else:
            assert request.cancel_ns is None
    users: dict[str, list[list[PlannedRequest]]] = defaultdict(list)
    for name, keys in sessions.items():
        for before, after in pairwise(keys):
            assert before.cancel_ns == after.intended_ns
            assert 0.2 <= (after.intended_ns - before.intended_ns) / 1e9 <= 0.3 + 1e-6
        assert keys[-1].cancel_ns is None
        users[name.rsplit("/", 1)[0]].append(keys)
    requests = [request for keys in sessions.values() for request in keys]
    assert 0.65 < np.mean([request.cancel_ns is not None for request in requests]) < 0.74
    # Several users in each of the two phases, with a pause after each session.
    assert len(users) >= 6
    for worked in users.values():
        for one, two in pairwise(worked):
            assert two[0].intended_ns - one[-1].intended_ns >= 1e9


def test_a_completion_continues_its_file(dense: Workload) -> None:
    corpus = load_corpus(VOCAB)
    code = corpus.tokenizer.decode(corpus.code.ids)
    contexts = []
    for request in [r for r in dense.requests if r.tenant == "gold-b"][::7]:
        parts = spans(request)
        context = parts["file"] + parts["edit"]
        contexts.append(len(context))
        file = np.array(context + parts["typed"] + request.output.tolist(), dtype=np.int32)
        assert corpus.tokenizer.decode(file) in code
    assert 500 <= min(contexts) < max(contexts) <= 2_000


def test_the_next_session_goes_on_where_the_last_one_ended(dense: Workload) -> None:
    files = [
        tuple(segment for segment in request.segments if segment.kind in ("file", "edit"))
        for request in dense.requests
        if request.session.startswith("gold-b/p1/u0/")
    ]
    grown = sum(after[:-1] == before for before, after in pairwise(files))
    assert grown > 10


def test_an_answer_quotes_its_document(dense: Workload) -> None:
    found = load_corpus(VOCAB).tokenizer.encode(" The document says:\n").tobytes()
    asked = [r for r in dense.requests if r.tenant == "bronze-1"]
    assert len(asked) > 200
    for request in asked:
        parts = spans(request)
        document = np.array(2 * parts["document"], dtype=np.int32).tobytes()
        assert request.output.tobytes()[: len(found)] == found[: request.output.nbytes]
        assert request.output.tobytes()[len(found) :] in document
        # The question comes last and is one of a kind.
        assert request.segments[-1].kind == "question"
    assert len({r.segments[-1].name for r in asked}) == len(asked)


def test_documents_are_long_and_more_than_a_cache_holds() -> None:
    lengths = np.array([len(document.part.ids) for document in document_pool(VOCAB, 1.0)])
    assert 2_000 <= lengths.min() < lengths.max() <= 8_000
    assert np.mean(lengths) == pytest.approx(4_000, rel=0.1)
    # What 80 GB hold of Llama-3.1-8B's KV beside its weights.
    assert lengths.sum() > 570_000


@pytest.mark.parametrize("tenant", [tenant for tenant in TENANTS if tenant.kind == "rag"])
def test_documents_are_popular_by_zipfs_law(tenant: TenantSpec) -> None:
    context = Context(load_corpus(VOCAB), 0, 1.0)
    asked = [draft.parts[1].name for draft in Reader(context, tenant, timetable([1])[0], VOCAB).drafts(100)]
    assert len(asked) == pytest.approx(6_000, rel=0.1)
    counts = np.sort(np.unique(asked, return_counts=True)[1])[::-1]
    law = zipf_cumulative(POOL_DOCUMENTS, ZIPF_EXPONENT)
    for rank in (1, 10, 100):
        assert counts[:rank].sum() / len(asked) == pytest.approx(law[rank - 1], abs=0.03)


def test_tenants_do_not_agree_on_what_is_popular(dense: Workload) -> None:
    top = {}
    for tenant in ("bronze-0", "bronze-1"):
        asked = [r.segments[1].name for r in dense.requests if r.tenant == tenant]
        names, counts = np.unique(asked, return_counts=True)
        top[tenant] = str(names[np.argmax(counts)])
    assert top["bronze-0"] != top["bronze-1"]


def test_tokens_cannot_be_changed_by_who_reads_them(thin: Workload) -> None:
    with pytest.raises(ValueError, match="read-only"):
        thin.requests[0].prompt[0] = 0

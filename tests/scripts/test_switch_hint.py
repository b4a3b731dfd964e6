"""`scripts/switch_hint.py`: who says that the prompt has changed, and from when on. Not here: what that is worth."""

from __future__ import annotations

from patches.fixes.version import HINT
from scripts.switch_hint import hinting
from workloads.five_phase import build


def test_the_tenant_says_so_once_all_have_the_new_prompt() -> None:
    workload = build(5, phases="1,2", rate_scale=0.1)
    hinted = hinting(workload)
    assert len(hinted.requests) == len(workload.requests)
    said = 0
    for one, other in zip(workload.requests, hinted.requests, strict=True):
        identity = dict(hinted.tenant(other.tenant).identity)
        announces = bool(identity.pop(HINT, False))
        assert identity == workload.tenant(one.tenant).identity
        assert announces == (one.tenant == "gold-a" and one.intended_ns >= 90 * 10**9)
        assert not announces or one.segments[0].name.endswith("v2")
        said += announces
    assert said

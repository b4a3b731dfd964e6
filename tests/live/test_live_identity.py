"""Guards how two greedy answers are compared, and (slowly) that the patches change no answer of a real model over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engines.live.identity import Answer, _answer, compare, differences, report
from harness.engines.live.served import served_model
from patches.seam.plan import resolve
from tests.live import served_model as models

EVERYTHING = "qos,mlfq,wfq,watermark,admission,ratelimit,edf,prefillbudget,tenant,overload,slru"


def test_where_answers_part_and_whether_rounding_explains_it() -> None:
    off = [Answer((1, 2, 3), (1.0, 1e-4, 2.0)), Answer((1, 2), (1.0, 1.0)), Answer((5,), (None,))]
    on = [Answer((1, 9, 9), ()), Answer((1, 2), ()), Answer((5,), ())]
    (one,) = differences(off, on)
    assert (one.prompt, one.position, one.tie) == (0, 1, True)
    bug = [Answer((9, 2, 3), ()), off[1], Answer((6,), ())]
    first, unknown = differences(off, bug)
    assert not first.tie and not unknown.tie and unknown.lead is None
    lines, good = report(off, off, on, "qos")
    assert good and "3 of 3 answers equal" in lines[0]
    assert "2 of 3 answers equal, 1 part at a near tie, 0 part elsewhere" in lines[1]
    assert not report(off, off, bug, "qos")[1]
    shorter = [Answer((1, 2), ()), off[1], off[2]]
    assert differences(off, shorter)[0].position == 2


def test_the_lead_is_over_the_runner_up() -> None:
    choice = {
        "token_ids": [7, 8],
        "logprobs": {"token_logprobs": [-0.1, -0.5], "top_logprobs": [{"a": -0.1, "b": -2.1}, {"c": -0.5}]},
    }
    found = _answer(choice)
    assert found.ids == (7, 8)
    assert found.leads[0] == pytest.approx(2.0) and found.leads[1] is None


@pytest.mark.slow
@pytest.mark.live
def test_patches_change_no_answer(tmp_path: Path) -> None:
    with models.alone():
        folder = models.cached_smollm2() or models.make_small_llama(tmp_path / "small-llama")
        found = compare(resolve(EVERYTHING), served_model(folder), lambda _: None)
    assert found.explained, found.lines
    assert all("of 24 answers equal" in line for line in found.lines if not line.startswith(" "))

"""What makes an arm's figures unbelievable, and what a reader must know beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.papers import Json
from harness.records import ArmRecord
from harness.stats.measures import nearest_rank

CLIENT_STALL_MS = 10.0


@dataclass(frozen=True, slots=True)
class Reason:
    """One finding; `fatal` makes the arm INVALID."""

    code: str
    text: str
    fatal: bool

    def json(self) -> Json:
        """As the summary shows it."""
        return {"code": self.code, "text": self.text}


def check_record(record: ArmRecord) -> list[Reason]:
    """Findings on one arm and seed: what its run said, and what its records show."""
    where = f"seed {record.seed}"
    said = record.manifest.get("validity", {"valid": True, "reasons": []})
    reasons = [
        Reason(
            str(r.get("code", "invalid")),
            f"{where}: {r.get('text', '')}",
            bool(r.get("fatal", not said.get("valid", True))),
        )
        for r in said.get("reasons", [])
        # counted over all seeds, below
        if r.get("code") != "never_fired"
    ]
    if not said.get("valid", True) and not reasons:
        reasons.append(Reason("invalid", f"{where}: the run marked itself invalid", True))
    known = {reason.code for reason in reasons}
    found = [_token_mismatch(record), _client_stall(record), _receipt_mismatch(record)]
    return reasons + [r for r in found if r is not None and r.code not in known]


def never_fired(records: Sequence[ArmRecord]) -> list[Reason]:
    """Patches that were on and whose hooks were never called in any seed."""
    patches = [str(name) for name in records[0].manifest.get("patches", [])]
    return [
        Reason("never_fired", f"patch {name} never fired: the traffic did not reach its hooks", False)
        for name in patches
        if hits(records, name) == 0
    ]


def hits(records: Sequence[ArmRecord], patch: str) -> int:
    """Calls of a patch's hooks, summed over the seeds."""
    return sum(int(r.receipt.get("hooks", {}).get(patch, {}).get("hits", 0)) for r in records)


def _token_mismatch(record: ArmRecord) -> Reason | None:
    planned = record.requests["prompt_tokens"].to_numpy(np.float64)
    counted = record.requests["prompt_tokens_counted"].to_numpy(np.float64)
    wrong = np.flatnonzero(~np.isnan(counted) & (counted != planned))
    if len(wrong) == 0:
        return None
    first = int(wrong[0])
    return Reason(
        "token_mismatch",
        f"seed {record.seed}: the server counted other prompt tokens than planned in {len(wrong)} requests "
        f"(the first, {record.requests['request_id'].iloc[first]}: {counted[first]:.0f} for {planned[first]:.0f})",
        True,
    )


def _client_stall(record: ArmRecord) -> Reason | None:
    delay = (record.requests["sent_ns"] - record.requests["intended_ns"]).to_numpy(np.float64) / 1e6
    delay = np.sort(delay[~np.isnan(delay)])
    if len(delay) == 0 or nearest_rank(delay, 99) <= CLIENT_STALL_MS:
        return None
    return Reason(
        "client_stall",
        f"seed {record.seed}: the client sent late (p99 of the send delay {nearest_rank(delay, 99):.1f} ms, "
        f"at most {CLIENT_STALL_MS:g} ms is allowed)",
        True,
    )


def _receipt_mismatch(record: ArmRecord) -> Reason | None:
    if not record.manifest.get("patches"):
        return None
    if record.receipt.get("plan_sha256") == record.manifest.get("patch_plan_sha256"):
        return None
    return Reason(
        "receipt_mismatch", f"seed {record.seed}: the receipt of the patched process is of another plan", True
    )

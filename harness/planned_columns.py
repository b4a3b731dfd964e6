"""The columns of `requests` that the plan decides, the same on every engine."""

from __future__ import annotations

from typing import Any

from workloads.request import PlannedRequest, Tenant


def planned_columns(planned: PlannedRequest, tenant: Tenant, measured: bool) -> dict[str, Any]:
    """What is known of a request before it is sent."""
    return {
        "request_id": planned.request_id,
        "tenant": tenant.name,
        "tier": tenant.tier,
        "kind": tenant.kind,
        "phase": planned.phase,
        "short": tenant.short,
        "measured": measured,
        "weight": tenant.weight,
        "slo_ttft_ms": tenant.slo_ttft_ms,
        "intended_ns": planned.intended_ns,
        "cancel_ns": planned.cancel_ns,
        "prompt_tokens": len(planned.prompt),
        "output_tokens_planned": len(planned.output),
    }

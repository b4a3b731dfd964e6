"""Five phases, seven tenants: the traffic that every patch is measured on."""

from __future__ import annotations

from workloads.five_phase.build import build, check_choice
from workloads.five_phase.phases import PHASES, RatePlan, parse_phases, phase_lines
from workloads.five_phase.rag import LONGEST_REQUEST_TOKENS
from workloads.five_phase.tenants import TENANTS

__all__ = [
    "LONGEST_REQUEST_TOKENS",
    "PHASES",
    "TENANTS",
    "RatePlan",
    "build",
    "check_choice",
    "parse_phases",
    "phase_lines",
]

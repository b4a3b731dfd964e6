"""Workloads that several tests read; building them takes a second, so each is built once."""

from __future__ import annotations

import pytest

from workloads.five_phase import build
from workloads.request import Workload


@pytest.fixture(scope="session")
def thin() -> Workload:
    """All phases at a tenth of the table's rates."""
    return build(0, rate_scale=0.1)


@pytest.fixture(scope="session")
def dense() -> Workload:
    """Phases 1 and 2 at the table's rates: enough requests for statistics."""
    return build(0, phases="1,2")

"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from harness import vllm_env

vllm_env.prepare()

# Beside other tests on few cores examples are drawn slowly, which says nothing of the code.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of public data beside the checkout; tests that need it skip where it is absent."""
    shared = ROOT.parent / "shared"
    if not shared.is_dir():
        pytest.skip("the folder ../shared with public measurements and traces is not beside this checkout")
    return shared

"""One made-up run for all tests of the report. A tenant and a phase have hostile names on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.atomic import write_json
from reports.summary import current_summary
from reports.view import RunView, load_view
from tests import synthetic
from tests.reports.hostile import EVIL_PHASE, EVIL_TENANT


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with one run, `demo`, whose summary has been built."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        tenants = tuple((EVIL_TENANT, *t[1:]) if t[0] == "silver-2" else t for t in synthetic.TENANTS)
        patch.setattr(synthetic, "TENANTS", tenants)
        patch.setattr(synthetic, "PHASES", (*synthetic.PHASES[:4], EVIL_PHASE))
        run = synthetic.make_run(folder / "demo", seeds=(0, 1), n=400)
    write_json(run / "summary.json", current_summary(run))
    return folder


@pytest.fixture(scope="session")
def run_dir(results: Path) -> Path:
    """The run `demo`."""
    return results / "demo"


@pytest.fixture(scope="session")
def view(run_dir: Path) -> RunView:
    """The run `demo`, loaded."""
    return load_view(run_dir, current_summary(run_dir))


@pytest.fixture
def altered(view: RunView) -> Callable[[Callable[[dict[str, Any]], None]], RunView]:
    """Makes a view of the same records with a summary that a function has changed in place."""

    def make(change: Callable[[dict[str, Any]], None]) -> RunView:
        summary = copy.deepcopy(dict(view.summary))
        change(summary)
        return RunView(view.path, summary, view.plan, view.manifests, view.receipts)

    return make

"""Guards that the hand-written documents keep up with the code: commands, patches and their state, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.cli import app
from patches.catalogue import CATALOGUE

DOCUMENTS = (
    "README.md",
    "LANDING_PLAN.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(
        f"docs/{name}"
        for name in (
            "PIN.md",
            "PROFILES.md",
            "TRACES.md",
            "VALIDATION.md",
            "GPU_TIMING.md",
            "LIVE.md",
            "IDENTITY.md",
            "TUNED.md",
            "tuned/rtx4090-24g.md",
            "tuned/rtxpro6000-96g.md",
            "COLUMNS.md",
        )
    ),
)


def test_the_landing_plan_has_one_row_for_each_patch_with_its_true_state(root: Path) -> None:
    rows = re.findall(
        r"^\| ([SKDPF]\d) \| `(\w+)` \| (\w+) \|",
        (root / "LANDING_PLAN.md").read_text(encoding="utf-8"),
        re.M,
    )
    assert rows == [(entry.number, entry.name, entry.state) for entry in CATALOGUE]


def test_every_command_that_the_readme_names_exists(root: Path) -> None:
    known = {command.name for command in app().registered_commands}
    named = set(re.findall(r"\bbench ([a-z][a-z-]*)\b", (root / "README.md").read_text(encoding="utf-8")))
    assert named <= known
    assert known - named == set(), "the README does not mention these commands"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_leads_somewhere(root: Path, document: str) -> None:
    text = (root / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((root / document).parent / target).exists(), f"{document}: {target}"


def test_the_readme_opens_with_its_two_commands(root: Path) -> None:
    first_screen = (root / "README.md").read_text(encoding="utf-8").splitlines()[:12]
    assert any(line.startswith("make demo") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)

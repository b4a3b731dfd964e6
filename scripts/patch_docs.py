"""Writes docs/patches/: one page a built patch, generated from its module, and an index.

usage: patch_docs.py [--check]

`--check` writes nothing; it names the pages that are stale, missing or left over, and exits 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.commands.patches_cmd import description  # noqa: E402
from patches.catalogue import CATALOGUE  # noqa: E402
from patches.seam import registry  # noqa: E402
from patches.seam.patch import AREAS, Patch  # noqa: E402

FOLDER = ROOT / "docs" / "patches"
PLAN = ROOT / "LANDING_PLAN.md"
_AREAS = {
    "scheduling": "Scheduling",
    "kv": "KV cache",
    "spec": "Speculation",
    "pd": "Prefill/decode disaggregation",
    "fixes": "Fixes",
}
_NOTE = "<!-- Generated from the patch's module and LANDING_PLAN.md by scripts/patch_docs.py; edit those instead. -->"


def page(patch: Patch) -> str:
    """The page of one patch, markdown."""
    data = description(patch)
    lines = [
        _NOTE,
        "",
        f"# {data['number']} `{data['name']}`".replace("#  `", "# `"),
        "",
        f"{data['summary']}",
        "",
        "## Why",
        "",
        _text(data["why"]),
        "",
        "## How",
        "",
        _text(data["how"]),
        "",
        "## Measured",
        "",
        f"- Against: {_text(data['baseline'])}",
        f"- Mechanism metric, which must move for a win to count: `{data['mechanism']}`",
        f"- Changes outputs: {'yes' if data['changes_outputs'] else 'no, only when things happen'}",
        "",
        *_figures(data["name"]),
        "## Knobs",
        "",
        *_knobs(data),
        "",
        "## Seams",
        "",
        "| seam | kind | rank |",
        "|---|---|---|",
        *(
            f"| `{seam['name']}` | {seam['kind']} | {'' if seam['rank'] is None else seam['rank']} |"
            for seam in data["seams"]
        ),
        "",
        *_relations(data),
        "## When it can go",
        "",
        _text(data["removable_when"]),
    ]
    if data["references"]:
        lines += ["", "## References", "", *(f"- {reference}" for reference in data["references"])]
    return "\n".join(lines) + "\n"


def _figures(name: str) -> list[str]:
    """What the landing plan says of the patch: its row, and the targets that name it; nothing for one not in it."""
    lines = PLAN.read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")
    ]
    rows = [row for row in cells if len(row) == 5 and row[1] == f"`{name}`"]
    if not rows:
        return []
    targets, asked = [], False
    for line in lines:
        asked = line.startswith("|") and (asked or "| asked | found |" in line)
        what = line.strip("| ").partition(":")[0]
        if asked and re.search(rf"\b{name}\b", what) and "| asked |" not in line:
            targets.append(line)
    table = ["", "| against tuned, tight | asked | found |", "|---|---|---|", *targets] if targets else []
    return [
        f"{rows[0][3]} ({rows[0][4]}). More, and what it costs others, is in the [landing plan](../../LANDING_PLAN.md).",
        *table,
        "",
    ]


def index() -> str:
    """The index of all 29, markdown."""
    lines = [
        _NOTE,
        "",
        "# The optimisations and fixes",
        "",
        "`bench patches` prints this list, `bench explain NAME` one page. A patch of your own is enabled by its import",
        "path; `scripts/new_patch.py NAME AREA` starts one.",
    ]
    for area, title in _AREAS.items():
        lines += ["", f"## {title}", "", "| | name | state | what it does |", "|---|---|---|---|"]
        for entry in CATALOGUE:
            if entry.area == area:
                name = f"[`{entry.name}`]({entry.name}.md)" if entry.built else f"`{entry.name}`"
                lines.append(f"| {entry.number} | {name} | {entry.state} | {entry.summary} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name -> content, for everything that belongs into the folder."""
    out = {"README.md": index()}
    for entry in CATALOGUE:
        if entry.built:
            out[f"{entry.name}.md"] = page(registry.find(entry.name))
    for path in beyond_the_catalogue():
        patch = registry.find(path)
        out[f"{patch.name}.md"] = page(patch)
    return out


def beyond_the_catalogue() -> list[str]:
    """Import paths of patches in this repository that are not among the 29."""
    known = {entry.module for entry in CATALOGUE}
    paths = []
    for area in AREAS:
        for file in sorted((ROOT / "patches" / area).glob("[a-z]*.py")):
            path = f"patches.{area}.{file.stem}"
            if path not in known and re.search(r"^PATCH = Patch\(", file.read_text(encoding="utf-8"), re.M):
                paths.append(path)
    return paths


def stale(folder: Path, wanted: Mapping[str, str]) -> list[str]:
    """What differs between the folder and what it should hold, one line each."""
    problems = []
    for name, content in wanted.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.read_text(encoding="utf-8") != content:
            problems.append(f"{name}: stale")
    extra = sorted(path.name for path in folder.glob("*.md") if path.name not in wanted)
    return problems + [f"{name}: belongs to no built patch" for name in extra]


def write(folder: Path, wanted: Mapping[str, str]) -> None:
    """Make the folder hold exactly what it should."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, content in wanted.items():
        (folder / name).write_text(content, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """0 if all is fresh (or was written), 1 if `--check` found something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    options = parser.parse_args(arguments)
    wanted = pages()
    if not options.check:
        write(FOLDER, wanted)
        return 0
    problems = stale(FOLDER, wanted)
    for problem in problems:
        print(f"docs/patches/{problem}; run scripts/patch_docs.py", file=sys.stderr)
    return 1 if problems else 0


def _text(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n") if part.strip())


def _knobs(data: Mapping[str, Any]) -> list[str]:
    if not data["knobs"]:
        return ["None."]
    rows = ["| knob | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for knob in data["knobs"]:
        meaning = " ".join(str(knob["description"]).split()).replace("|", "\\|")
        kind = knob["type"].replace("|", "\\|")
        rows.append(f"| `{knob['name']}` | {kind} | {knob['unit']} | `{knob['default']}` | {meaning} |")
    return [*rows, "", f"Set one with `--set {data['name']}.{data['knobs'][0]['name']}=VALUE`."]


def _relations(data: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- {title}: {', '.join(f'`{name}`' for name in data[key])}"
        for key, title in (
            ("requires", "Requires"),
            ("conflicts", "Conflicts with"),
            ("replaces", "Takes the place of the engine flags"),
        )
        if data[key]
    ]
    return ["## Goes with", "", *lines, ""] if lines else []


if __name__ == "__main__":
    sys.exit(main())

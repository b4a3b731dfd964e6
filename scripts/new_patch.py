"""Starts a patch: its module, a test and a page.

usage: new_patch.py NAME AREA [--number S9] [--root DIR]

NAME is lower case with underscores; AREA is scheduling, kv, spec, pd or fixes. A name of the catalogue
gets its number from there and only its own area. Nothing that exists is overwritten.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.errors import UserError  # noqa: E402
from patches.catalogue import BY_NAME  # noqa: E402
from patches.seam.patch import AREAS  # noqa: E402

_MODULE = Template('''\
"""$name: say in one line what it does."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from patches.seam.context import Context
from patches.seam.patch import Hooks, Knobs, Patch


class $knobs(Knobs):
    """What can be set; the last word of a number's name is its unit."""

    wait_s: float = Field(1.0, gt=0, description="what it means, and which way to turn it")


def build(knobs: $knobs, context: Context) -> Hooks:
    """The hooks for one engine."""

    def on_add(request: Any, now: float) -> None:
        context.count("on_add")

    return Hooks(on_add=on_add)


PATCH = Patch(
    name="$name",
    number="$number",
    area="$area",
    summary="$summary",
    knobs=$knobs,
    build=build,
    seams=("on_add",),
    why="What is wrong without it, with a figure.",
    how="What it does about it.",
    baseline="The upstream flags that answer the same need, or none.",
    mechanism="metric_that_must_move",
    removable_when="What upstream would have to do.",
)
''')

_TEST = Template('''\
"""Guards what `$name` promises; what it is worth is measured by `bench run --enable $name`."""

from __future__ import annotations

from patches.seam.plan import resolve


def test_it_can_be_planned() -> None:
    assert resolve("$source").names == ("$name",)
''')

_PAGE = Template("""\
# `$name`

Not generated yet: fill in the module, then run `scripts/patch_docs.py`.
""")


def plan(name: str, area: str, number: str, root: Path) -> dict[Path, str]:
    """Files to write and their content; UserError for a name or area that will not do."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise UserError(f"{name!r} is no name for a patch: lower case letters, digits and single underscores")
    if area not in AREAS:
        raise UserError(f"{area!r} is no area: one of {', '.join(AREAS)}")
    entry = BY_NAME.get(name)
    if entry is not None and entry.area != area:
        raise UserError(f"{name!r} is {entry.number} of the catalogue and belongs to {entry.area!r}")
    words = {
        "name": name,
        "area": area,
        "number": number or (entry.number if entry else ""),
        "summary": entry.summary if entry else "say in one line what it does",
        "knobs": "".join(word.capitalize() for word in name.split("_")) + "Knobs",
        "source": name if entry else f"patches.{area}.{name}",
    }
    files = {
        root / "patches" / area / f"{name}.py": _MODULE.substitute(words),
        root / "tests" / area / f"test_{name}.py": _TEST.substitute(words),
        root / "docs" / "patches" / f"{name}.md": _PAGE.substitute(words),
    }
    for path in files:
        if path.exists():
            raise UserError(f"{path.relative_to(root)} exists already; nothing was written")
    return files


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 with one line on what was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("area", metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--number", default="", help="its number in the catalogue, where it has one")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to write into")
    options = parser.parse_args(arguments)
    try:
        files = plan(options.name, options.area, options.number, options.root)
    except UserError as error:
        print(f"new_patch.py: {error}", file=sys.stderr)
        return 2
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(options.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())

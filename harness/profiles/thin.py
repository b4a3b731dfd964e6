"""Which rows of a table a profile keeps, and how they are written: fixed rules, small files."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence

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


def linear(axis: Sequence[int], us: Sequence[float], x: float) -> float:
    """Between nodes linear, flat below the first, in proportion above the last."""
    if x <= axis[0]:
        return us[0]
    if x >= axis[-1]:
        return us[-1] * (x / axis[-1])
    i = bisect_right(axis, x) - 1
    return us[i] + (x - axis[i]) / (axis[i + 1] - axis[i]) * (us[i + 1] - us[i])


def dump(content: object) -> str:
    """JSON with one list a paragraph, wrapped: small, and still readable in a diff."""

    def number(value: object) -> str:
        return json.dumps(int(value) if isinstance(value, float) and value == int(value) else value)

    def block(value: object, indent: str) -> str:
        if isinstance(value, dict):
            inner = ",\n".join(f'{indent} "{k}": {block(v, indent + " ")}' for k, v in value.items())
            return "{\n" + inner + "\n" + indent + "}"
        if isinstance(value, list):
            if any(isinstance(v, dict) for v in value):
                return "[" + f",\n{indent} ".join(block(v, indent + " ") for v in value) + "]"
            items = [number(v) for v in value]
            lines = [",".join(items[i : i + 20]) for i in range(0, len(items), 20)]
            return "[" + f",\n{indent} ".join(lines) + "]"
        return json.dumps(value, ensure_ascii=False)

    return block(content, "") + "\n"

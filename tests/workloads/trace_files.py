"""Small trace files in the true form of each format, written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 4]},
]
BAILIAN = [
    {
        "chat_id": 7,
        "parent_chat_id": -1,
        "timestamp": 0.5,
        "input_length": 33,
        "output_length": 4,
        "type": "text",
        "turn": 1,
        "hash_ids": [10, 11, 12],
    },
    {
        "chat_id": 8,
        "parent_chat_id": -1,
        "timestamp": 1.25,
        "input_length": 40,
        "output_length": 9,
        "type": "search",
        "turn": 1,
        "hash_ids": [11, 11, 12],
    },
    {
        "chat_id": 9,
        "parent_chat_id": 7,
        "timestamp": 61.114,
        "input_length": 60,
        "output_length": 8,
        "type": "text",
        "turn": 2,
        "hash_ids": [10, 11, 13, 14],
    },
]
TIMED = [
    {"timestamp": 0.25, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 2, "input_length": 48, "output_length": 6, "hash_ids": [1, 2, 4]},
]
SERVEGEN = [
    {"request_id": 0, "timestamp": 0.0625, "data": {"input_tokens": 300, "output_tokens": 12}},
    {"request_id": 1, "timestamp": 1.5, "data": {"input_tokens": 80, "output_tokens": 7}},
]
AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.0000001,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00.001163+00:00,1452,3
2024-05-12 00:00:01+00:00,584,3
2024-05-12 00:00:02.5+00:00,862,38
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
46,GPT-4,0,0,0,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46,43,GPT-4,906,446,1352,Conversation log
19440161.0,,2,ChatGPT,36,29,65,API log
19440192.0,1722ac82-0a46,8,GPT-4,1400,20,1420,Conversation log
"""
SERVEGEN_CSV = """request_id,timestamp,input_tokens,output_tokens
0,0.0625,300,12
1,1.5,80,7
"""

SMALL: dict[str, str] = {
    "mooncake": "".join(json.dumps(row) + "\n" for row in MOONCAKE),
    "bailian": "".join(json.dumps(row) + "\n" for row in BAILIAN),
    "timed_trace": "".join(json.dumps(row) + "\n" for row in TIMED),
    "azure-2023": AZURE_2023,
    "azure-2024": AZURE_2024,
    "burstgpt": BURSTGPT,
    "servegen": SERVEGEN_CSV,
    "servegen-json": "".join(json.dumps(row) + "\n" for row in SERVEGEN),
}


def write(path: Path, text: str | bytes, *, packed: bool = False) -> Path:
    """Write a trace; `packed` as gzip."""
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def lines(*rows: Any) -> str:
    """JSON lines of objects; what is text is taken as it is."""
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)

"""From GGUF to a folder of float32 safetensors with tokenizer; run as a process, with gguf and accelerate on its path.

python -m harness.engines.live.model_convert FILE.gguf FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model that transformers reads from a GGUF file, its weights taken out of their 4 bits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

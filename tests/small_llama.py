"""A real model, small enough for a test: two layers of Llama with properly random weights.

`load_format=dummy` would not do: its output loops with period 2, so two schedules agree by luck.
"""

from __future__ import annotations

from pathlib import Path


def save_small_llama(folder: Path, longest_tokens: int, vocabulary: int = 1024) -> None:
    """Config and weights; the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=vocabulary,
        max_position_embeddings=longest_tokens,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        # Wide enough that logits differ clearly: near-ties would flip with the batch's shape.
        initializer_range=0.35,
        dtype="float32",
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)

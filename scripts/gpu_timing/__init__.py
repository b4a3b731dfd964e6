"""Kernel timing on a GPU with plain torch: what `scripts/time_gpu.py` is made of."""

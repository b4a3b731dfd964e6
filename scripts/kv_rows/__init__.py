"""Rows of `scripts/kv_targets.py`, by what they are about."""

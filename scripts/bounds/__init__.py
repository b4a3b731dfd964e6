"""What no scheduler could pass: the arithmetic of `scripts/scheduling_bounds.py`, and what it reads from a run."""

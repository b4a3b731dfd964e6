"""Intervals and verdicts: block bootstrap, Holm's correction."""

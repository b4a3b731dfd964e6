"""Metrics: each declared once, with its unit, its definition and its direction."""

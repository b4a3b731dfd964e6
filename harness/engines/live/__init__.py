"""The live path: a real vLLM server driven over HTTP, and everything that watches it.

Nothing here is imported by the virtual engine.
"""

"""The emulated engine: vLLM's own server and processes, with the virtual engine's executor on the real clock.

A request takes the whole path (HTTP, API server, the engine's process, and back), and a step takes the time that the
profile says. What it shows beside the virtual engine is what that path costs. Nothing is imported here: vLLM's
processes load only what they need.
"""

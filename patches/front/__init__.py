"""The face of a server over HTTP: who a caller is, and how a request that the engine ended is answered.

An ASGI middleware before vLLM's own application. Nothing here is loaded by the engine's process.
"""

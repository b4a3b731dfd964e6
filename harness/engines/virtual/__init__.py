"""The virtual engine: vLLM's own EngineCore, scheduler and KV manager on a virtual clock.

Only the forward pass is replaced, by a step time from a GPU profile. Nothing of the host's speed
reaches the clock, so equal inputs give equal records to the byte.
"""

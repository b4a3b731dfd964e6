"""What happens inside the engine's process: every step and every request, as the scheduler saw them.

`hooks` puts observers around vLLM's scheduler, each Scheduler writes a `tape` in the folder that was named, and
`collect` turns the tapes of a run into tables. Nothing is imported here: the engine loads only what it needs.
"""

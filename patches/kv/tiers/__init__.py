"""KV blocks below the GPU: host memory and disk. `patches.scheduling.tiering` is the patch that uses them.

`cache` decides what a tier keeps, `files` is the disk's format, `disk_io` moves between host and disk, `rates` says
what a reload costs, `scheduler` decides, `connector` and `spec` are what vLLM calls.
"""

"""The knobs of `tiering`; here because the connector reads them too, in vLLM's own processes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Self

from pydantic import Field, field_validator, model_validator

from patches.seam.patch import Knobs

GIB = 2**30


class TieringKnobs(Knobs):
    """How large the tiers are, who may go how far down, and when moving blocks is worth it."""

    host_bytes: int = Field(8 * GIB, ge=1, description="host memory for KV blocks, at most; all workers")
    disk_bytes: int = Field(0, ge=0, description="disk for KV blocks, at most; 0 is no disk tier")
    disk_folder: str = Field(
        "",
        description="absolute path of a folder of this engine's own for the disk tier; only the virtual and the "
        "emulated engine do without",
    )
    disk_from_rank: int = Field(
        1,
        description="blocks of requests whose API priority is this or more (larger is less urgent) may go to "
        "disk; those of more urgent ones stay in host memory or are dropped. Priorities are 0 where nobody sets "
        "them: then 0 lets all go",
    )
    high_keep_factor: float = Field(
        2.0,
        ge=1,
        le=64,
        description="with a disk tier: a block that may not go there counts as this many times as recently used",
    )
    save_ahead_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="a block that was freed is saved once so many others have left the GPU as are this share of "
        "the blocks ahead of it; 0 saves it at once. Blocks of preempted requests are always saved at once",
    )
    save_outputs: bool = Field(
        False,
        description="also save generated tokens of requests that ended (those of preempted ones always are)",
    )
    save_return_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="blocks of a kind (one tenant's, asked for equally often) are saved only while this share of them is "
        "asked for again within the time that the host tier would hold them: 0.1 is ten moves down for one that comes "
        "back. Those of preempted requests are always saved",
    )
    save_step_blocks: int = Field(256, ge=1, description="blocks saved in one step, those of preempted apart")
    reload_min_blocks: int = Field(
        4,
        ge=1,
        description="a hit below the GPU shorter than this is recomputed: a load holds up its step, has to wait for the "
        "next, or takes about four",
    )
    reload_cost_ratio: float = Field(
        1.0, gt=0, le=100, description="reload if it takes at most this times what recomputing would"
    )
    reload_sync_ms: float = Field(
        40.0,
        ge=0,
        description="loads of so much in all hold up a step, so that their requests run in it; what is too much for "
        "one step has the next. A load longer than this is made beside steps, and its request waits for about four",
    )
    reload_patience_ms: float = Field(
        500.0,
        ge=0,
        description="a request waits so long at most for blocks on their way from the disk, and so long for a step that "
        "has room for its load",
    )
    prefetch_requests: int = Field(
        8, ge=0, description="next waiting requests whose blocks are fetched from the disk ahead of need"
    )
    prefetch_every_ms: float = Field(20.0, gt=0, description="how often the queue is looked at for that")
    demote_step_blocks: int = Field(64, ge=1, description="blocks that one step may send to the disk")
    disk_retry_s: float = Field(
        30.0,
        ge=0,
        description="after the disk refused a block (full, read-only) nothing is written for so long",
    )
    token_recompute_us: float = Field(
        100.0, gt=0, description="price of recomputing a token until it has been measured"
    )
    host_bytes_per_s: float = Field(
        20e9, gt=0, description="bandwidth between host memory and GPU until it has been measured"
    )
    disk_bytes_per_s: float = Field(
        4e9, gt=0, description="bandwidth of reading the disk until it has been measured"
    )

    @field_validator("disk_folder")
    @classmethod
    def _plain_path(cls, value: str) -> str:
        path = PurePosixPath(value)
        if value and (not path.is_absolute() or ".." in path.parts or "\0" in value):
            raise ValueError("must be an absolute path without '..'")
        return value

    @model_validator(mode="after")
    def _disk_somewhere(self) -> Self:
        if self.disk_folder and not self.disk_bytes:
            raise ValueError("disk_folder is set, but disk_bytes is 0")
        return self

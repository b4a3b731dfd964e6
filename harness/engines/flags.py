"""The vLLM engine flags that an arm may set, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harness.errors import UserError
from harness.refusals import refuse_flags

# KV connectors whose transfers the virtual engine can play: upstream's offloading, and that of the patch `tiering`.
CONNECTORS = ("OffloadingConnector", "TieringConnector")


class EngineFlags(BaseModel):
    """Scheduling flags of `vllm serve`, under their upstream names (underscores for dashes).

    A profile pins what vLLM resolves by default on its GPU; an arm overrides single flags.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_model_len: int = Field(default=32768, ge=16, description="longest prompt plus output, tokens")
    max_num_batched_tokens: int = Field(default=2048, ge=1, le=2**22, description="token budget of one step")
    max_num_seqs: int = Field(default=256, ge=1, le=2**16, description="requests that may run at once")
    max_num_active_seqs: int | None = Field(
        default=None, ge=1, description="admission limit below max_num_seqs"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="order of waiting requests"
    )
    watermark: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="share of KV blocks kept free at admission"
    )
    long_prefill_token_threshold: int = Field(
        default=0, ge=0, description="tokens a step for one long prefill; 0 is no cap"
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        default=False, description="floor that cap at a fair share"
    )
    max_num_queued_reqs: int | None = Field(
        default=None, ge=0, description="unfinished requests before a 503"
    )
    max_num_queued_tokens: int | None = Field(
        default=None, ge=0, description="prefill backlog in tokens before a 503"
    )
    scheduler_reserve_full_isl: bool = Field(default=True, description="admit only if the whole prompt fits")
    enable_chunked_prefill: bool = Field(
        default=True, description="spread a long prompt over steps; off needs a budget of max_model_len"
    )
    enable_prefix_caching: bool = Field(default=True, description="reuse KV blocks of equal prefixes")
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor"] = Field(
        default="sha256", description="block hash"
    )
    async_scheduling: bool = Field(default=True, description="schedule a step before the last one's output")
    block_size: int = Field(default=16, ge=1, description="tokens in a KV block")
    kv_offloading_size: float | None = Field(
        default=None, gt=0, description="host memory for upstream's own KV offloading, GiB"
    )
    kv_transfer_config: dict[str, Any] | None = Field(
        default=None,
        description="a KV connector and its settings: upstream's offloading, or what a patch brings",
    )

    @field_validator("kv_transfer_config")
    @classmethod
    def _known_connector(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("kv_connector", CONNECTORS[0]) not in CONNECTORS:
            raise ValueError(
                f"KV transfer: of vLLM's connectors only {CONNECTORS[0]} is modelled by the virtual engine; "
                "take the flag out, or name that one"
            )
        return value

    @property
    def offloads(self) -> bool:
        """Whether KV blocks go beyond the GPU."""
        return self.kv_offloading_size is not None or self.kv_transfer_config is not None

    @model_validator(mode="after")
    def _fit_together(self) -> EngineFlags:
        # vLLM would refuse these too, but only when the engine is built.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise ValueError("max_num_active_seqs must be at most max_num_seqs")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError("without chunked prefill max_num_batched_tokens must be at least max_model_len")
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError("long_prefill_token_threshold must be at most max_model_len")
        return self


def parse_flags(raw: Mapping[str, Any], where: str) -> EngineFlags:
    """Check flags from outside; UserError names the flag and what it may be."""
    try:
        return EngineFlags(**raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            refuse_flags(raw, where)
            known = ", ".join(EngineFlags.model_fields)
            raise UserError(f"{where}: unknown engine flag {name!r}; known flags are {known}") from None
        if not name:
            raise UserError(f"{where}: {first['msg']}") from None
        raise UserError(f"{where}: engine flag {name!r} is {first['input']!r}: {first['msg']}") from None

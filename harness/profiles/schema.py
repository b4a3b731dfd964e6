"""Parts that a profile and a GPU file have in common."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

# What a step may rest on, and a profile may have measurements of or not: decodes alone, prefills alone, a
# prefill behind tokens that are in the cache already, a prefill beside decodes, and the exchange between GPUs.
Regime = Literal["decode", "prefill", "context", "mixed", "communication"]
REGIMES: tuple[Regime, ...] = get_args(Regime)


class Strict(BaseModel):
    """A value from a file: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Source(Strict):
    """Where the numbers come from."""

    project: str = Field(description="who published the tables")
    revision: str = Field(description="commit or release that they were taken from")
    files: list[str] = Field(description="names of the source tables")
    measured_with: str = Field(description="engine, precision and GPU of the measurement")
    licence: str = Field(description="SPDX name of the tables' licence")
    notice: str = Field(description="copyright and permission notice that must travel with them")


class Domain(Strict):
    """What the tables cover; a step outside is extrapolated and counted."""

    max_tokens: int = Field(gt=0, description="tokens in a step (dense kernels)")
    max_sequences: int = Field(gt=0, description="requests in a step (output head and sampler)")
    max_decodes: int = Field(gt=0, description="decodes in a step without prefill")
    max_decodes_mixed: int = Field(ge=0, description="decodes beside a prefill; 0: mixed steps not measured")
    max_chunk: int = Field(gt=0, description="prefill tokens in a step")
    max_context: int = Field(gt=0, description="tokens of context, of a decode or before a prefill chunk")

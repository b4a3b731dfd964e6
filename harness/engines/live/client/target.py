"""What to talk to and how: the server's address, the limits of patience, and what each request asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from harness.errors import UserError

# Fields of the body that are the plan's, not the caller's.
_OURS = frozenset(
    {"model", "prompt", "max_tokens", "stream", "stream_options", "return_token_ids", "vllm_xargs"}
)

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Target(BaseModel):
    """A server that speaks the OpenAI completions protocol."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = Field(description="where it listens, as http://127.0.0.1:8000; a trailing /v1 is allowed")
    model: str = Field(min_length=1, description="name under which the model is served")
    api_key: str = Field(
        default="", repr=False, exclude=True, description="sent as a bearer token unless empty"
    )
    keys: Mapping[str, str] = Field(
        default_factory=dict,
        repr=False,
        exclude=True,
        description="key of each tenant, sent with its requests in place of api_key",
    )

    @field_validator("base_url")
    @classmethod
    def _plain(cls, value: str) -> str:
        parts = urlsplit(value)
        # .port raises ValueError for a port that is none
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("no http:// or https:// address")
        if parts.query or parts.fragment or parts.username:
            raise ValueError("an address has no query, fragment or user name")
        return value.rstrip("/").removesuffix("/v1")

    @property
    def completions_url(self) -> str:
        """The endpoint that is called."""
        return f"{self.base_url}/v1/completions"

    def key_of(self, tenant: object) -> str:
        """What a tenant's requests show."""
        return self.keys.get(str(tenant), self.api_key)


class Options(BaseModel):
    """How the client behaves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    connect_timeout_s: Seconds = Field(default=10.0, description="until the connection stands")
    first_token_timeout_s: Seconds = Field(default=300.0, description="from sending to the first token")
    total_timeout_s: Seconds = Field(default=900.0, description="from sending to the end of the stream")
    token_ids: bool = Field(default=True, description="ask for token ids, which give exact counts per chunk")
    continuous_usage: bool = Field(default=False, description="ask for a running count in every chunk")
    keep_token_ids: bool = Field(default=False, description="keep the ids of the output in the report")
    send_priority: bool = Field(
        default=False,
        description="send the tenant's priority; a server under another policy than priority refuses it",
    )
    cache_salt: str = Field(default="", max_length=1024, description="sent with each request unless empty")
    keep_alive_s: float = Field(
        default=2.0,
        ge=0,
        le=4.0,
        description="idle time after which a connection is dropped, below the 5 s after which the server drops it",
    )
    extra_body: Mapping[str, Any] = Field(default_factory=dict, description="more fields for every request")

    @field_validator("extra_body")
    @classmethod
    def _not_ours(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        if taken := sorted(_OURS & set(value)):
            raise ValueError(f"{', '.join(taken)} cannot be set here: the workload decides it")
        return value


def make_target(
    base_url: str, model: str, api_key: str = "", keys: Mapping[str, str] | None = None
) -> Target:
    """A checked target; UserError naming what is wrong with it."""
    try:
        target = Target(base_url=base_url, model=model, api_key=api_key, keys=keys or {})
    except ValidationError as error:
        first = error.errors()[0]
        why = first["msg"].removeprefix("Value error, ")
        hint = (
            "give one like http://127.0.0.1:8000"
            if first["loc"] == ("base_url",)
            else "name the served model"
        )
        raise UserError(f"{first['loc'][0]} {first['input']!r}: {why}; {hint}") from None
    if any(not 32 < ord(c) < 127 for key in (api_key, *target.keys.values()) for c in key):
        raise UserError(
            "the API key holds characters that a header cannot carry: use printable ASCII without spaces"
        )
    return target


def seconds_of(value: str | None, date: str | None) -> float | None:
    """`Retry-After` in seconds: a number, or a date less the response's own; None if it is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return _between(date, value)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _between(begin: str | None, end: str) -> float | None:
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, (parsedate_to_datetime(end) - parsedate_to_datetime(begin or "")).total_seconds())
    except (TypeError, ValueError):
        return None

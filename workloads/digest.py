"""One sha256 over a whole request list: equal if and only if every field of every request is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from workloads.request import PlannedRequest


def requests_sha256(requests: Sequence[PlannedRequest]) -> str:
    """The digest, in hex. Token ids count as little-endian int32, all other fields as JSON."""
    digest = hashlib.sha256()
    for request in requests:
        fields = [
            request.index,
            request.request_id,
            request.tenant,
            request.phase,
            request.intended_ns,
            request.cancel_ns,
            request.session,
            len(request.prompt),
            len(request.output),
            [[segment.kind, segment.name, segment.tokens] for segment in request.segments],
        ]
        digest.update(json.dumps(fields, separators=(",", ":")).encode() + b"\n")
        digest.update(request.prompt.astype("<i4", copy=False).tobytes())
        digest.update(request.output.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()

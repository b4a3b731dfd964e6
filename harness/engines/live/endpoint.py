"""Small questions to a server over HTTP, one connection each; the load itself goes through the client."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address and key. No proxy is ever asked, whatever the environment says."""

    base_url: str
    api_key: str = field(default="", repr=False)

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = 10.0) -> tuple[int, str]:
        """Status and text of one call.

        Raises:
            OSError: no connection, or it broke. http.client.HTTPException: no HTTP came back.
        """
        place = urlsplit(self.base_url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()

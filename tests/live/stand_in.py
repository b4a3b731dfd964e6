"""Stands where vLLM stands, to misbehave as vLLM rarely does: `python -m tests.live.stand_in serve MODEL --port=N`.

STAND_IN says how: `silent` never listens, `dies` ends with an error, `answers` serves completions, without patches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    """Health, and completions of one token."""

    def do_GET(self) -> None:
        self._say({})

    def do_POST(self) -> None:
        self._say({"usage": {"completion_tokens": 1}})

    def _say(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Misbehave."""
    mode = os.environ["STAND_IN"]
    if mode == "dies":
        print("(EngineCore pid=5) ValueError: the weights are gone")
        sys.exit(1)
    if mode == "silent":
        time.sleep(600)
    port = int(next(word for word in sys.argv if word.startswith("--port=")).split("=")[1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()

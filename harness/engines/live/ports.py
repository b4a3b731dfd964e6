"""The address that a server listens on: free, and not a stranger's."""

from __future__ import annotations

import errno
import ipaddress
import socket

from harness.engines.live.processes import listener
from harness.errors import UserError

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def choose(host: str, port: int) -> int:
    """The port to listen on: `port`, or for 0 one that is free now.

    Raises:
        UserError: the port is taken (with the name of who has it), or this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As vLLM binds it: connections of an earlier server that linger are no obstacle, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two sockets may be bound like this at once, but only one may listen.
            probe.listen(1)
        except OverflowError:
            raise UserError(f"port {port}: a port is 0 (any free one) to 65535") from None
        except socket.gaierror:
            raise UserError(f"host {host!r} is no address of this machine; {LOOPBACK} always is") from None
        except OSError as error:
            raise UserError(_why(error, host, port)) from None
        return int(probe.getsockname()[1])


def url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens at `host`."""
    reached = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = listener(port)
        return (
            f"port {port} is in use already{f', by {owner}' if owner else ''}: nothing was started; "
            "choose another one, or 0 for any that is free"
        )
    if error.errno == errno.EACCES:
        return f"port {port} is for administrators; choose one from 1024 on, or 0 for any that is free"
    return f"cannot listen at {host}: {(error.strerror or str(error)).lower()}; {LOOPBACK} always works"

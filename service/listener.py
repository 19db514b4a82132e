"""Opening a listening socket, with one clear line when it cannot be had."""

from __future__ import annotations

import errno
import socket
from typing import Final

BACKLOG: Final = 2048


class ListenError(Exception):
    """The address cannot be had; the message is one line for the operator."""


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket.

    Raises:
        ListenError: the address is taken, not ours, or forbidden.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, ValueError, TypeError) as error:
        # A host name that no resolver may be asked for is a ValueError or a TypeError.
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = getattr(error, "strerror", None) or str(error)
        if taken:
            why = "the port is taken; give another with --port"
        raise ListenError(f"cannot listen on {host}:{port}: {why}") from error
    return listener

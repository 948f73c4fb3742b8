"""A check for the machine's IPv6."""

from __future__ import annotations

import socket


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True

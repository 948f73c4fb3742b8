"""A slow link between two network namespaces: ``relay.py PROCESS MBIT DELAY_MS``.

Makes the device "veth" here and in the namespace of another process, says so, and carries packets
between them, until its input ends: so many Mbit/s in each direction, each so many ms later. For
machines whose kernel has no netem.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_QUEUE = 0.5  # seconds that a packet waits for the link at most; later ones are dropped


def _device() -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"veth", _IFF_TUN | _IFF_NO_PI))
    return descriptor


class _Direction:
    """What is on its way to one end."""

    def __init__(self, end: int, rate: float, delay: float) -> None:
        self._end, self._rate, self._delay = end, rate, delay
        self._free = 0.0  # when the link is done with what it has
        self._packets: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes) -> None:
        now = time.monotonic()
        if self._free < now + _QUEUE:
            self._free = max(self._free, now) + len(packet) / self._rate
            self._packets.append((self._free + self._delay, packet))

    def deliver(self) -> float:
        """Hand over what has arrived; return the seconds until more does."""
        while self._packets and self._packets[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # an end that is not up yet loses it
                os.write(self._end, self._packets.popleft()[1])
        return self._packets[0][0] - time.monotonic() if self._packets else 1.0


def main() -> None:
    process, rate, delay = int(sys.argv[1]), float(sys.argv[2]) * 1e6 / 8, float(sys.argv[3]) / 1e3
    here = _device()
    with open(f"/proc/{process}/ns/net") as other:
        if ctypes.CDLL(None, use_errno=True).setns(other.fileno(), 0):
            sys.exit(f"setns: {os.strerror(ctypes.get_errno())}")
    there = _device()
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    ways = [_Direction(there, rate, delay), _Direction(here, rate, delay)]
    for end, way in zip((here, there), ways, strict=True):
        selector.register(end, selectors.EVENT_READ, way)
    selector.register(sys.stdin, selectors.EVENT_READ)  # ends with the process that started this
    while True:
        pause = min(way.deliver() for way in ways)
        for key, _ in selector.select(max(0.0, pause)):
            if key.data is None:
                return
            key.data.take(os.read(key.fd, 65536))


if __name__ == "__main__":
    main()

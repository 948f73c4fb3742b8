"""Slow links between network namespaces: ``relay.py MBIT DELAY_MS MTU PROCESS...``.

Makes the device "veth" in the namespace of each process, says so, and carries IPv4 packets to the
process whose place is one less than their address's last number, until its input ends: over two
links of so many Mbit/s (inf: no limit), and so many ms later. For machines whose kernel has no
netem.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_QUEUE = 0.5  # seconds that a packet waits for a link at most; later ones are dropped
_DESTINATION = 19  # the last byte of an IPv4 header's destination


def _device(process: int, mtu: int) -> int:
    with open(f"/proc/{process}/ns/net") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
            sys.exit(f"setns: {os.strerror(ctypes.get_errno())}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"veth", _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", "veth", "mtu", str(mtu)], check=True)
    return descriptor


class _Link:
    """A direction of a host's link."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0  # when it is done with what it has

    def carry(self, size: int, now: float) -> float | None:
        """Return when a packet has passed that comes now; None: it is dropped."""
        if self._free > now + _QUEUE:
            return None
        self._free = max(self._free, now) + size / self._rate
        return self._free


class _Host:
    def __init__(self, device: int, rate: float) -> None:
        self.device = device
        self.up, self.down = _Link(rate), _Link(rate)
        self.packets: deque[tuple[float, bytes]] = deque()  # on their way to it


def main() -> None:
    rate, delay, mtu = float(sys.argv[1]) * 1e6 / 8, float(sys.argv[2]) / 1e3, int(sys.argv[3])
    hosts = [_Host(_device(int(process), mtu), rate) for process in sys.argv[4:]]
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    for host in hosts:
        selector.register(host.device, selectors.EVENT_READ, host)
    selector.register(sys.stdin, selectors.EVENT_READ)  # ends with the process that started this
    while True:
        pause = min(map(_deliver, hosts))
        for key, _ in selector.select(max(0.0, pause)):
            if key.data is None:
                return
            _take(hosts, key.data, os.read(key.fd, 65536), delay)


def _take(hosts: list[_Host], sender: _Host, packet: bytes, delay: float) -> None:
    place = packet[_DESTINATION] - 1 if packet[0] >> 4 == 4 else -1  # IPv6 looks for neighbours
    if not 0 <= place < len(hosts):
        return
    there = sender.up.carry(len(packet), time.monotonic())
    arrived = there and hosts[place].down.carry(len(packet), there)
    if arrived:
        hosts[place].packets.append((arrived + delay, packet))


def _deliver(host: _Host) -> float:
    """Hand over what has arrived; return the seconds until more does."""
    while host.packets and host.packets[0][0] <= time.monotonic():
        with contextlib.suppress(OSError):  # an end that is not up yet loses it
            os.write(host.device, host.packets.popleft()[1])
    return host.packets[0][0] - time.monotonic() if host.packets else 1.0


if __name__ == "__main__":
    main()

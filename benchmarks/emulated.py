"""Two nodes on one machine: network namespaces, joined by a link of limited bandwidth."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tagi_ddp import Communicator, init
from tagi_ddp.communicators import all_gather_object

MBIT = 200  # of the link, in each direction
_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h


class NotPossible(RuntimeError):
    """This machine or this user cannot make namespaces."""


@contextmanager
def two_nodes(communicator: Communicator) -> Iterator[Communicator]:
    """Move either rank of ``communicator`` to a node of its own; yield their network, by gloo.

    Raises NotPossible, on both. Afterwards the ranks are back, namespaces and link are gone.
    """
    with ExitStack() as made:
        names, reason = [f"tagi_ddp_{os.getpid()}_{node}" for node in range(2)], ""
        try:
            if communicator.rank == 0:
                _create(names, made)
        except NotPossible as error:
            reason = str(error)
        (names, reason), _ = all_gather_object(communicator, (names, reason))
        if reason:
            raise NotPossible(reason)
        made.callback(communicator.barrier)  # both are back before the namespaces go
        with (
            open("/proc/self/ns/net") as home,
            open(f"/run/netns/{names[communicator.rank]}") as net,
        ):
            _enter(net.fileno())
            try:
                os.environ.update(
                    MASTER_ADDR=_address(0), MASTER_PORT="29500", GLOO_SOCKET_IFNAME="veth"
                )
                with init("gloo", communicator.rank, 2) as network:
                    yield network
            finally:
                _enter(home.fileno())


def _create(names: list[str], made: ExitStack) -> None:
    if os.geteuid() != 0:
        raise NotPossible("network namespaces need root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NotPossible(f"no {' and no '.join(missing)}: Debian's package iproute2 has them")
    for name in names:
        _call("ip", "netns", "add", name)
        made.callback(_call, "ip", "netns", "delete", name)
    pair = ("veth", "netns", names[0], "type", "veth", "peer", "veth", "netns", names[1])
    _call("ip", "link", "add", *pair)  # goes with the namespaces
    for node, name in enumerate(names):
        inside = ("ip", "netns", "exec", name)
        _call(*inside, "ip", "address", "add", f"{_address(node)}/24", "dev", "veth")
        for device in ("lo", "veth"):
            _call(*inside, "ip", "link", "set", device, "up")
        limit = ("rate", f"{MBIT}mbit", "burst", "128kb", "latency", "50ms")
        _call(*inside, "tc", "qdisc", "add", "dev", "veth", "root", "tbf", *limit)


def _address(node: int) -> str:
    return f"10.213.0.{node + 1}"


def _enter(namespace: int) -> None:
    """Move this thread, and those that it will start, to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NotPossible(f"{' '.join(command)}: {done.stderr.strip()}")

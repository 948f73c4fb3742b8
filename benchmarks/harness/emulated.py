"""Hosts on one machine: network namespaces, joined by links of limited bandwidth."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tagi_ddp import Communicator, init
from tagi_ddp.communicators import all_gather_object

MBIT = 200  # of the link, in each direction
_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
_libc = ctypes.CDLL(None, use_errno=True)


class NotPossible(RuntimeError):
    """This machine or this user cannot make namespaces."""


@contextmanager
def two_nodes(
    communicator: Communicator, mbit: float = MBIT, delay_ms: float = 0.0
) -> Iterator[Communicator]:
    """Move either rank of ``communicator`` to a node of its own; yield their network, by gloo."""
    with emulated_hosts(communicator, 2, mbit, delay_ms), init("gloo", communicator.rank, 2) as net:
        yield net


@contextmanager
def emulated_hosts(
    communicator: Communicator, count: int, mbit: float | None, delay_ms: float = 0.0
) -> Iterator[list[int]]:
    """Move the ranks to ``count`` hosts, equally many consecutive ones; yield a process of each.

    A switch joins them, by links of ``mbit`` in each direction; None: of no limit. With a delay a
    process takes the switch's place, as not every kernel can delay packets. Raises NotPossible, on
    all ranks. Afterwards they are back. The namespaces have no names, so they and the links go with
    the last thread inside, however that ends.
    """
    size = communicator.size // count
    host, local = divmod(communicator.rank, size)
    with open("/proc/self/ns/net") as home, ExitStack() as stack:
        try:
            _all_or_none(communicator, _leave_home if local == 0 else _stay)
            pids = all_gather_object(communicator, os.getpid())
            first = pids[::size]
            _all_or_none(communicator, lambda: _enter(first[host]) if local else None)
            if delay_ms:
                relay = partial(_relay, stack, first, mbit, delay_ms)
                _all_or_none(communicator, relay if communicator.rank == 0 else _stay)
                _all_or_none(communicator, lambda: None if local else _configure(host))
            else:
                switch = stack.enter_context(_switch()) if communicator.rank == 0 else 0
                switch = all_gather_object(communicator, switch)[0]
                _all_or_none(communicator, lambda: None if local else _plug(host, switch, mbit))
            stack.enter_context(_meeting_at_host_0())
            yield first
            communicator.barrier(timeout=600)  # what is on its way goes with a namespace
        finally:
            _libc.setns(home.fileno(), _NETWORK)  # who has not left may not, and need not


@contextmanager
def _meeting_at_host_0() -> Iterator[None]:
    """Set the variables by which ranks meet at host 0; restore them at the end."""
    before = dict(os.environ)
    os.environ.update(MASTER_ADDR=address(0), MASTER_PORT="29500", GLOO_SOCKET_IFNAME="veth")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _stay() -> None:
    """Leave it to the first rank of the host."""


def _enter(process: int) -> None:
    """Move this thread to the network of a process."""
    with open(f"/proc/{process}/ns/net") as network:
        if _libc.setns(network.fileno(), _NETWORK):
            raise NotPossible(f"setns: {os.strerror(ctypes.get_errno())}")


@contextmanager
def _switch() -> Iterator[int]:
    """Start a process in a network of its own with a bridge; yield its number."""
    script = (
        "ip link add switch type bridge && ip link set switch up && ip link set lo up && "
        "echo ready && exec sleep infinity"
    )
    command = ["unshare", "--net", "--kill-child", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def _plug(host: int, switch: int, mbit: float | None) -> None:
    """Join this network and the switch by a cable."""
    port = f"port{host}"
    inside = ("nsenter", "--net", f"--target={switch}")
    _call("ip", "link", "add", "veth", "type", "veth", "peer", port, "netns", str(switch))
    _call(*inside, "ip", "link", "set", port, "master", "switch", "up")
    _configure(host)
    if mbit is not None:
        _limit(mbit)
        _limit(mbit, port, inside)


def _all_or_none(communicator: Communicator, step: Callable[[], object]) -> None:
    """Take a step on all ranks; raise on all what any has to say against it."""
    reason = ""
    try:
        step()
    except NotPossible as error:
        reason = str(error)
    if reason := "".join(dict.fromkeys(all_gather_object(communicator, reason))):
        raise NotPossible(reason)


def _leave_home() -> None:
    """Move this thread, and those that it will start, to a network of their own."""
    if os.geteuid() != 0:
        raise NotPossible("network namespaces need root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NotPossible(f"no {' and no '.join(missing)}: Debian's package iproute2 has them")
    if _libc.unshare(_NETWORK):
        raise NotPossible(f"unshare: {os.strerror(ctypes.get_errno())}")


def _relay(stack: ExitStack, processes: list[int], mbit: float | None, delay_ms: float) -> None:
    """Start a process that carries packets between the networks of ``processes``."""
    if not os.path.exists("/dev/net/tun"):
        raise NotPossible("no /dev/net/tun")
    script = str(Path(__file__).with_name("relay.py"))
    rate = math.inf if mbit is None else mbit
    mtu = 1500 if rate <= 20 else 9000 if rate <= 1000 else 60000  # it has time for so many packets
    numbers = map(str, (rate, delay_ms, mtu, *processes))
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, script, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise NotPossible("the relay between the hosts did not start")


def bytes_out(group: Communicator, run: Callable[[], object]) -> float:
    """Return how many bytes leave this host for one call, by all of ``group``."""
    calls = 5
    group.barrier(timeout=600)
    before = bytes_sent()
    for _ in range(calls):
        run()
    group.barrier(timeout=600)
    time.sleep(0.2)  # acknowledgements
    return (bytes_sent() - before) / calls


def bytes_sent() -> int:
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    [counts] = [line.split() for line in lines if line.strip().startswith("veth:")]
    return int(counts[9])


def _configure(host: int) -> None:
    """Give this end an address."""
    _call("ip", "address", "add", f"{address(host)}/24", "dev", "veth")
    for device in ("lo", "veth"):
        _call("ip", "link", "set", device, "up")


def _limit(mbit: float, device: str = "veth", inside: tuple[str, ...] = ()) -> None:
    limit = ("rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms")
    _call(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)


def address(host: int) -> str:
    """Return the address of an emulated host."""
    return f"10.213.0.{host + 1}"  # the relay counts on it


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NotPossible(f"{' '.join(command)}: {done.stderr.strip()}")

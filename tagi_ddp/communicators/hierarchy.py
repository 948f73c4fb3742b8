"""Two levels of communicators: the ranks of a node, and the same place on every node."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from tagi_ddp.checks import integer
from tagi_ddp.communicators.communicator import Communicator
from tagi_ddp.communicators.errors import CommunicatorError
from tagi_ddp.communicators.init import init
from tagi_ddp.communicators.objects import all_gather_object
from tagi_ddp.environment import detect


class Levels:
    """``world`` as nodes of equally many ranks; making it is a collective call of all of them.

    ``node`` holds the ranks of this rank's node, ``across`` those with this rank's place on every
    node: a global group, whose number is ``node.rank``. The number of this rank's node is
    ``across.rank``. Closing closes both levels, not ``world``.

    Args:
        world: all ranks.
        node_size: how many consecutive ranks make a node; None: as many as the launcher says, else
            the ranks of one host.

    Raises:
        TypeError, ValueError: on all ranks, when nodes would differ in size.
    """

    def __init__(self, world: Communicator, node_size: int | None = None) -> None:
        """Split the world twice."""
        self.world = world
        everyone = all_gather_object(world, _Place.of_this_rank(world, node_size))
        nodes = _nodes(everyone)
        with ExitStack() as made:
            self.node = made.enter_context(_open_node(world, nodes, everyone))
            across = world.split(self.node.rank, world.rank)
            assert across is not None
            self.across = made.enter_context(across)
            self._made = made.pop_all()

    @property
    def nodes(self) -> int:
        """The number of nodes, and of ranks in ``across``."""
        return self.across.size

    def abort(self, reason: str) -> None:
        """Give up on both levels, so that nobody waits on either."""
        for level in (self.node, self.across):
            with suppress(CommunicatorError):  # it may be closed
                level.abort(reason)

    def close(self) -> None:
        """Close both levels."""
        self._made.close()


@dataclass(frozen=True)
class _Place:
    """What a rank tells the others."""

    host: str
    asked: Any  # node_size
    launched: int  # ranks of its node, as the launcher says; 0: no launcher
    token: str  # the first rank's names the shared memory

    @classmethod
    def of_this_rank(cls, world: Communicator, node_size: int | None) -> _Place:
        environment = detect()
        knows = environment.launcher != "none" and environment.world_size == world.size
        launched = environment.local_world_size if knows else 0
        return cls(socket.gethostname(), node_size, launched, secrets.token_hex(8))


def _open_node(world: Communicator, nodes: list[int], everyone: list[_Place]) -> Communicator:
    """Return the communicator of this rank's node; through memory if the world's is a network."""
    own = nodes[world.rank]
    on_one_host = len({(node, place.host) for node, place in zip(nodes, everyone, strict=True)})
    if world.backend in ("mpi", "gloo") and on_one_host == len(set(nodes)):
        rank, size = nodes[: world.rank].count(own), nodes.count(own)
        job = f"{everyone[0].token}/{own}"
        return init("shm", rank, size, job=job, timeout=world.timeout)
    node = world.split(own, world.rank)
    assert node is not None
    return node


def _nodes(everyone: list[_Place]) -> list[int]:
    """Return the number of each rank's node."""
    size = everyone[0].asked
    if len({place.asked for place in everyone}) > 1:
        told = [place.asked for place in everyone]
        raise ValueError(f"node_size differs between ranks: {told}; give the same on all")
    if size is None:
        hosts = [place.host for place in everyone]
        counts = set(Counter(hosts).values())
        launched = {place.launched for place in everyone}
        if len(counts) == 1 and launched <= {0, *counts}:
            return [list(dict.fromkeys(hosts)).index(host) for host in hosts]
        size = everyone[0].launched  # several nodes of one name, as containers may be
        if len(launched) > 1 or size == 0:
            raise ValueError(
                f"hosts have unequal numbers of ranks, {dict(Counter(hosts))}: start equally many "
                "on each, or give node_size"
            )
    size = integer("node_size", size, 1)
    if len(everyone) % size:
        raise ValueError(
            f"node_size is {size}, but {len(everyone)} ranks do not make equal nodes of that size"
        )
    return [rank // size for rank in range(len(everyone))]

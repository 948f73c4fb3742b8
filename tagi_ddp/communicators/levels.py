"""The levels of any communicator: the ranks of a node, and one rank of each node."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from tagi_ddp.communicators.communicator import Communicator, all_gather_object
from tagi_ddp.communicators.errors import (
    CommunicatorError,
    Mismatch,
    Timeout,
    name_ranks,
    was_missed,
)
from tagi_ddp.communicators.topology import topology_of
from tagi_ddp.communicators.two_level import TwoLevelCommunicator

_GRACE = 2.0  # seconds in which a failure should reach the world
_WAITS = "it waits for another node"


class Levels:
    """Nodes of equally many ranks of ``world``; making them is a collective call of all ranks.

    ``node`` holds the ranks of this rank's node. ``inter_node`` holds one rank of each node, the
    one with the same number there: global group ``node.rank``. The number of this rank's node is
    ``inter_node.rank``. If ``world`` has two levels and its hosts are the nodes, its own levels are
    used. `close` closes the communicators that were made here, not ``world``.

    Args:
        world: all ranks.
        node_size: the number of consecutive ranks of a node; None: see `Topology.nodes`.

    Raises:
        TypeError, ValueError: on all ranks, if nodes would differ in size or ``node_size`` differs.
    """

    def __init__(self, world: Communicator, node_size: int | None = None) -> None:
        """Use the levels of the world, or split it twice."""
        self.world = world
        topology = topology_of(world)
        asked = node_size if isinstance(node_size, int | None) else repr(node_size)
        everyone = all_gather_object(world, asked)
        if len(set(everyone)) > 1:
            raise ValueError(f"node_size differs between ranks: {everyone}; give the same on all")
        nodes = topology.nodes(node_size)
        number = next(i for i, ranks in enumerate(nodes) if world.rank in ranks)
        self._made = ExitStack()
        if isinstance(world, TwoLevelCommunicator) and world.hosts == nodes:
            node, inter_node = world.node, world.inter_node
        else:
            with ExitStack() as made:
                node = _part(world, number, made)
                inter_node = _part(world, node.rank, made)
                self._made = made.pop_all()
        assert inter_node is not None, "nodes are of equal size"
        self.node, self.inter_node = node, inter_node
        self._node_ranks = nodes[number]  # in the numbers of the world
        self._inter_node_ranks = [ranks[self.node.rank] for ranks in nodes]

    @property
    def nodes(self) -> int:
        """The number of nodes, and of ranks in ``inter_node``."""
        return self.inter_node.size

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:
        """Abort both levels, so that no rank waits on either.

        The errors blame this rank, not ``ranks``, which are numbered as in the world.
        """
        for level in (self.node, self.inter_node):
            with suppress(CommunicatorError):  # The level may be closed.
                level.abort(reason)

    @contextmanager
    def naming(self, level: Communicator | None = None) -> Iterator[None]:
        """Make an error of a level in the block name the ranks at fault, numbered as in the world.

        A failure in one node spreads to others through the ranks between them. So all ranks report
        theirs to the world, whose first failure is the cause. ``level`` is the one that the block
        uses; None: both.
        """
        try:
            yield
        except CommunicatorError as error:
            levels = (self.node, self._node_ranks), (self.inter_node, self._inter_node_ranks)
            failed = [
                [members[rank] for rank in failure.ranks]
                for each, members in levels
                if level in (None, each) and (failure := _failure_of(each)) is not None
            ]
            if not failed:
                raise
            blamed = failed[0]
            deadline = time.monotonic() + self._patience(error, level)
            while time.monotonic() < deadline:
                if (cause := _failure_of(self.world)) is not None:
                    if isinstance(error, Timeout) and was_missed(cause):
                        break  # Others waited for this rank, which waited for its level.
                    raise type(cause)(str(cause), cause.ranks) from error
                time.sleep(0.01)
            what = f"{error} Of all ranks: {name_ranks(blamed)}." if blamed else str(error)
            raise type(error)(what, blamed) from error

    def _patience(self, error: CommunicatorError, level: Communicator | None) -> float:
        """Return the seconds in which a rank that knows the cause of an error reports it.

        A Mismatch is a cause itself. So is a rank that its node misses: if it waited for other
        nodes, it would have reported that. A rank that other nodes miss may wait for its own.
        """
        if isinstance(error, Mismatch):
            return 0.0
        if _WAITS in str(error):
            return 2 * self.world.timeout + 2 * _GRACE
        if level is None or not isinstance(error, Timeout):
            return _GRACE
        if level is self.node or self.node.size == 1:
            return 0.0
        with suppress(CommunicatorError):  # The node may have failed.
            self.node.abort(_WAITS)
        return 2 * self.world.timeout + _GRACE

    def close(self) -> None:
        """Close both levels."""
        self._made.close()


def _part(world: Communicator, color: int, made: ExitStack) -> Communicator:
    """Return the communicator of a color, in rank order; ``made`` closes it."""
    part = world.split(color, world.rank)
    assert part is not None
    return made.enter_context(part)


def _failure_of(communicator: Communicator) -> CommunicatorError | None:
    try:
        communicator.check()
    except CommunicatorError as error:
        return error
    return None

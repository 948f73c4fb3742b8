"""Notes of thousands of ranks, carried from one to another by a network that is a list."""

from __future__ import annotations

import contextlib
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tagi_ddp.communicators.control import overlay
from tagi_ddp.communicators.control.notes import Failure, Notes, Series

SIZES = st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 1000]))


class Network:
    """Ranks that pass messages on, in an order that is each time another, but for each link's."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.ranks = [Notes(rank, size) for rank in range(size)]
        self._neighbours = [set(overlay.neighbours(rank, size)) for rank in range(size)]
        self.gone: set[int] = set()
        self.stopped: set[int] = set()
        self.messages = 0
        self._links: dict[tuple[int, int], deque[bytes]] = {}
        self._full: list[tuple[int, int]] = []
        self._random = random.Random(seed)

    def _take_out(self, rank: int) -> None:
        while self.ranks[rank].outbox:
            target, message = self.ranks[rank].outbox.popleft()
            assert target in self._neighbours[rank]
            link = self._links.setdefault((rank, target), deque())
            if not link:
                self._full.append((rank, target))
            link.append(message)

    def kill(self, rank: int) -> None:
        """End a rank's process, whatever it had to say."""
        self.gone.add(rank)
        for other in self._neighbours[rank]:
            self.ranks[other].lose(rank)

    def run(self, done: Callable[[], bool] = lambda: False) -> None:
        """Carry messages until there is none, or ``done``."""
        for rank in range(len(self.ranks)):
            if rank not in self.gone:
                self._take_out(rank)
        held: list[tuple[int, int]] = []
        while self._full and not done():
            place = self._random.randrange(len(self._full))
            self._full[place], self._full[-1] = self._full[-1], self._full[place]
            link = source, target = self._full[-1]
            if target in self.stopped:
                held.append(self._full.pop())
                continue
            message = self._links[link].popleft()
            if not self._links[link]:
                self._full.pop()
            self.messages += 1
            if target not in self.gone:
                self.ranks[target].receive(source, message)
                self._take_out(target)
        self._full += held


class Meeting:
    """The notes of one collective, as `Handshake` enters them, step by step."""

    def __init__(self, network: Network, number: int, late: Iterable[int] = ()) -> None:
        self._network, self._number = network, number
        self._steps = dict.fromkeys(set(range(len(network.ranks))) - set(late), -1)
        self.heard = dict.fromkeys(self._steps, 1)
        """Of how many ranks, the last of which it is itself, each one has heard."""

    def run(self) -> None:
        moved = True
        while moved:
            moved = sum(self._advance(rank) for rank in sorted(self._steps)) > 0
            self._network.run()

    def _advance(self, rank: int) -> bool:
        notes, step = self._network.ranks[rank], self._steps[rank]
        size, place = notes.size, Series.COLLECTIVE
        if rank in self._network.gone or step == len(notes.rounds):
            return False
        if step >= 0:
            senders = notes.rounds[step].senders
            if any((other, place, self._number) not in notes.entered for other in senders):
                return False
            for other in senders:
                message = notes.entered.pop((other, place, self._number))
                back, known = (rank - other) % size, notes.rounds[step].known
                assert int(message) == known, "it knew of these"
                assert back <= self.heard[rank], "none is left out between them"
                self.heard[rank] = min(size, max(self.heard[rank], back + known))
        self._steps[rank] = step + 1
        if step + 1 < len(notes.rounds):
            content = b"%d" % self.heard[rank]
            notes.enter(notes.rounds[step + 1].receivers, place, self._number, content)
        else:
            notes.leave(place, self._number)
        return True

    def everyone(self) -> bool:
        return all(heard == len(self._network.ranks) for heard in self.heard.values())


@given(SIZES, st.data())
def test_what_one_tells_all_comes_once(size: int, data: st.DataObject) -> None:
    origin = data.draw(st.integers(0, size - 1))
    reached, waiting = [origin], [origin]
    while waiting:
        rank = waiting.pop()
        told = overlay.children(rank, origin, size)
        assert set(told) <= set(overlay.neighbours(rank, size))
        reached += told
        waiting += told
    assert sorted(reached) == list(range(size))


@given(SIZES, st.booleans(), st.data())
def test_every_rank_is_a_few_steps_away(size: int, backwards: bool, data: st.DataObject) -> None:
    rank, target = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    steps = 0
    while rank != target:
        hop = overlay.next_hop(rank, target, size, (), backwards)
        assert hop in overlay.neighbours(rank, size)
        rank, steps = hop, steps + 1
    assert steps <= len(overlay.rounds(0, size))


@pytest.mark.parametrize(("size", "most"), [(8, 7), (64, 15), (1000, 30), (10_000, 40)])
def test_a_rank_has_few_neighbours(size: int, most: int) -> None:
    for rank in (0, 1, size - 1):
        others = overlay.neighbours(rank, size)
        assert len(others) == most
        assert all(rank in overlay.neighbours(other, size) for other in others)


@given(st.integers(1, 70), st.integers(0, 1000))
def test_all_meet(size: int, seed: int) -> None:
    network = Network(size, seed)
    for number in range(3):
        meeting = Meeting(network, number)
        meeting.run()
        assert meeting.everyone()
    assert not any(notes.entered for notes in network.ranks)
    assert {notes.acknowledged for notes in network.ranks} == {-1}
    network.ranks[0].acknowledge()
    network.run()
    assert {notes.acknowledged for notes in network.ranks} == {2}


@settings(max_examples=20)
@given(st.integers(9, 40), st.integers(0, 1000), st.data())
def test_a_rank_that_is_missing_keeps_all_from_meeting(
    size: int, seed: int, data: st.DataObject
) -> None:
    missing = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=3))
    network = Network(size, seed)
    network.stopped = missing  # they pass nothing on
    meeting = Meeting(network, 1, late=missing)
    meeting.run()
    for rank, heard in meeting.heard.items():
        assert not missing & set(overlay.span(rank, heard, size))
    here = set(range(size)) - missing
    for rank in here:
        network.ranks[rank].wait(Series.COLLECTIVE, 1)
    network.run()
    for rank in here:
        waiting = {r for r, series in network.ranks[rank].waiting if series is Series.COLLECTIVE}
        assert waiting == here, "so only the others are to blame"


@given(st.integers(2, 70), st.integers(0, 1000), st.data())
def test_news_reach_all_by_the_ways_that_are_left(
    size: int, seed: int, data: st.DataObject
) -> None:
    ranks = st.integers(0, size - 1)
    network = Network(size, seed)
    failed, died, closed = (data.draw(ranks) for _ in range(3))
    network.ranks[failed].fail(Failure("ValueError", (failed,), "a mistake"))
    network.ranks[closed].leave(Series.COLLECTIVE, 4)
    network.ranks[closed].close()
    network.run()
    network.kill(died)
    network.run()
    for rank, notes in enumerate(network.ranks):
        if rank != failed:
            assert notes.failures == {failed: Failure("ValueError", (failed,), "a mistake")}
        if rank not in (closed, died):
            assert notes.closed == {closed}
            assert closed not in notes.gone(Series.COLLECTIVE, 4) - {died}
            assert closed in notes.gone(Series.COLLECTIVE, 5)
        if rank != died:
            assert notes.died == {died} - notes.closed


@given(st.integers(2, 70), st.integers(0, 1000), st.data())
def test_a_message_for_one_rank(size: int, seed: int, data: st.DataObject) -> None:
    source, target = data.draw(
        st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True)
    )
    network = Network(size, seed)
    network.ranks[source].enter([target], Series.SEND, 3, b"here")
    network.run()
    for rank, notes in enumerate(network.ranks):
        expected = {(source, Series.SEND, 3): b"here"} if rank == target else {}
        assert notes.entered == expected


def test_a_message_that_is_stuck_comes_another_way() -> None:
    network = Network(64)
    between = overlay.next_hop(0, 37, 64, ())
    network.stopped = {between}
    network.ranks[0].enter([37], Series.SEND, 1, b"here")
    network.run()
    assert not network.ranks[37].entered
    network.ranks[0].resend(37, Series.SEND, 1, b"here")
    network.run()
    assert network.ranks[37].entered


@given(st.binary(max_size=40))
def test_nonsense_is_refused(message: bytes) -> None:
    notes = Notes(0, 4)
    with contextlib.suppress(ValueError, KeyError, struct.error):
        notes.receive(1, message)
    assert not notes.failures


@pytest.mark.parametrize("size", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_ranks(size: int) -> None:
    """One collective and a death, by a number of messages that grows as n log n."""
    network = Network(size)
    meeting = Meeting(network, 1)
    meeting.run()
    assert meeting.everyone()
    assert network.messages == sum(len(r.receivers) for n in network.ranks for r in n.rounds)
    assert network.messages < 21 * size
    network.kill(123)
    network.run()
    assert all(notes.died == {123} for r, notes in enumerate(network.ranks) if r != 123)
    assert network.messages < 65 * size

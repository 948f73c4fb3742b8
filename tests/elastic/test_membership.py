"""The ranks of an elastic job's next group: the decisions alone, without processes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tagi_ddp.elastic.membership import Membership
from tagi_ddp.elastic.messages import Assignment, Call, JoinRequest, find_source

PATIENCE = 10.0


def request(
    progress: int | None,
    time: float = 0.0,
    blamed: tuple[int, ...] = (),
    done: bool = False,
    admits: bool = True,
) -> JoinRequest:
    return JoinRequest(progress, blamed, done, admits, PATIENCE, time)


def alone_on_its_node(name: str) -> tuple[int, str, int]:
    return ord(name[0]), f"host {name}", 29500


def next_group(
    members: Membership, now: float
) -> tuple[int, tuple[str, ...], int, tuple[int, ...], int] | None:
    """Return number, names, source, ranks behind and number of those that stayed."""
    assignments = members.next_group(now)
    if not assignments:
        return None
    names, each = tuple(assignments), next(iter(assignments.values()))
    for rank, assignment in enumerate(assignments.values()):
        assert (assignment.rank, assignment.size) == (rank, len(names))
        assert assignment.address == f"host {names[0]}"
    return each.number, names, each.source, each.behind, each.stayed


def test_ranks_of_a_node_are_counted_there() -> None:
    nodes = {"a": (0, "zero", 1), "b": (1, "one", 2), "c": (0, "zero", 1)}
    members = Membership("bac", nodes.__getitem__)
    for name in "bac":
        members.join(name, request(None))
    assert members.next_group(0) == {
        "b": Assignment(1, 0, 3, 0, (), 3, 0, 1, "one", 2),
        "a": Assignment(1, 1, 3, 0, (), 3, 0, 2, "one", 2),
        "c": Assignment(1, 2, 3, 0, (), 3, 1, 2, "one", 2),
    }


@pytest.mark.parametrize(
    ("progress", "found"),
    [
        ([None, None], (0, ())),
        ([3], (0, ())),
        ([2, 3, 3, None], (1, (0, 3))),
        ([None, 0], (1, (0,))),
    ],
)
def test_find_source(progress: list[int | None], found: tuple[int, tuple[int, ...]]) -> None:
    assert find_source(progress) == found


def first_group(names: str) -> Membership:
    roll = Membership(names, alone_on_its_node)
    for name in names:
        roll.join(name, request(None))
    assert next_group(roll, 0) == (1, tuple(names), 0, (), len(names))
    return roll


def test_a_lost_rank_is_left_out() -> None:
    roll = first_group("abc")
    roll.join("a", request(7, blamed=(1,)))
    assert next_group(roll, 0) is None
    assert (roll.late, roll.call) == (["b", "c"], Call(7, joins=False))
    roll.remove("b")
    assert next_group(roll, 0) is None  # c may still come
    roll.join("c", request(8))
    assert next_group(roll, 0) == (2, ("a", "c"), 1, (0,), 2)


def test_who_is_blamed_is_waited_for_a_second_others_as_long_as_patience_lasts() -> None:
    for blamed, limit in (((1,), 1.0), ((), PATIENCE)):
        roll = first_group("ab")
        roll.join("a", request(7, 100.0, blamed))
        assert next_group(roll, 100 + limit - 0.01) is None
        assert next_group(roll, 100 + limit) == (2, ("a",), 0, (), 1)
        # It comes back with what it knew, which the others have left behind.
        roll.join("b", request(9, 200.0))
        assert roll.wanted
        roll.join("a", request(8, 200.0))
        assert next_group(roll, 200) == (3, ("a", "b"), 0, (1,), 1)


def test_one_that_joins_takes_what_the_others_know() -> None:
    roll = first_group("ab")
    roll.join("c", request(None))
    assert (roll.late, roll.call) == (["a", "b"], Call(None, joins=True))
    for name in "ab":
        roll.join(name, request(5))
    assert next_group(roll, 0) == (2, ("a", "b", "c"), 0, (2,), 2)


def test_a_rank_joins_when_all_others_stand_between_two_steps() -> None:
    roll = first_group("abc")
    roll.join("d", request(None))
    roll.remove("c")
    assert roll.call == Call(None, joins=False)
    roll.join("a", request(5))
    roll.join("b", request(5, admits=False))
    assert next_group(roll, 0) == (2, ("a", "b"), 0, (), 2)
    assert (roll.wanted, roll.late, roll.call) == (True, ["a", "b"], Call(None, joins=True))
    for name in "ab":
        roll.join(name, request(6))
    assert next_group(roll, 0) == (3, ("a", "b", "d"), 0, (2,), 2)


def test_all_are_done_only_together() -> None:
    roll = first_group("ab")
    roll.join("a", request(5, done=True))
    assert not roll.wanted
    roll.join("c", request(None))
    assert (roll.late, roll.call) == (["b"], Call(5, joins=False))
    roll.join("b", request(6))
    assert next_group(roll, 0) == (2, ("a", "b", "c"), 1, (0, 2), 2)
    for name in "abc":
        roll.join(name, request(9, done=True))
    assert next_group(roll, 0) is None
    assert roll.over


def test_what_was_learned_is_lost_with_the_last_who_knew() -> None:
    roll = first_group("ab")
    roll.join("a", request(1))
    roll.remove("a")
    roll.remove("b")
    roll.join("c", request(None))
    assert next_group(roll, 0) is None
    assert not roll.lost  # the job has ended
    roll = Membership("ab", alone_on_its_node)
    roll.join("a", request(1))
    roll.remove("a")
    roll.join("b", request(None))
    assert next_group(roll, 0) is None
    assert roll.lost


class Jobs(RuleBasedStateMachine):
    """Ranks that step, come, are stopped, die and join in any order."""

    alive = Bundle("alive")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = iter(range(10_000))
        self.state: dict[str, int | None] = {}  # of those alive; what they have learned
        self.waiting: dict[str, bool] = {}  # who waits, and whether it admits others
        self.roll: Membership | None = None
        self.members: tuple[str, ...] = ()

    @rule(target=alive)
    def start(self) -> str:
        name = str(next(self.names))
        self.state[name] = None
        if self.roll is None and len(self.state) == 3:
            self.roll = Membership(sorted(self.state), alone_on_its_node)
        return name

    @rule(name=alive, blames=st.booleans(), done=st.booleans(), admits=st.booleans())
    def come(self, name: str, blames: bool, done: bool, admits: bool) -> None:
        if self.roll is None or name not in self.state or name in self.waiting or self.roll.over:
            return
        blamed = tuple(
            rank for rank, each in enumerate(self.members) if blames and each not in self.state
        )
        # A rank that begins stands between two steps.
        self.waiting[name] = admits or not self.members
        own = request(self.state[name], self.now, blamed, done, self.waiting[name])
        self.roll.join(name, own)

    @rule(name=alive)
    def step(self, name: str) -> None:
        if name in self.members and name not in self.waiting and name in self.state:
            self.state[name] = (self.state[name] or 0) + 1

    @rule(name=consumes(alive))
    def die(self, name: str) -> None:
        del self.state[name]
        self.waiting.pop(name, None)
        if self.roll is not None:
            self.roll.remove(name)

    @rule(seconds=st.sampled_from([0.5, 1.0, PATIENCE]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def decide(self) -> None:
        if self.roll is None or self.roll.over or self.roll.lost:
            return
        there = [name for name in self.members if name in self.state]
        late = [name for name in self.roll.members if name not in self.waiting]
        group = next_group(self.roll, self.now)
        if group is None:
            # Nobody waits in vain: not when all have come, unless all are done or all is lost.
            assert late or not self.waiting or self.roll.over or self.roll.lost or not there
            return
        number, members, leader, behind, stayed = group
        # The ranks that have come, and those that join if all others admit them.
        others = [name for name in self.waiting if name in there]
        admit = all(self.waiting[name] for name in others)
        assert set(members) == set(self.waiting if admit else others)
        if number > 1:
            assert set(members[:stayed]) == set(others)
        known = {name: self.state[name] for name in members if name in there}
        learned = [each for each in known.values() if each is not None]
        source = members[leader]
        if learned:
            assert known[source] == max(learned)
        for rank, name in enumerate(members):
            latest = name in known and known[name] == known.get(source)
            assert (rank in behind) == (bool(there) and not latest)
            self.state[name] = self.state[source] or 0
        self.members = members
        for name in members:
            del self.waiting[name]

    @invariant()
    def only_the_living_are_members(self) -> None:
        if self.roll is not None and not self.roll.lost:
            assert set(self.roll.members) <= set(self.state)


TestJobs = Jobs.TestCase

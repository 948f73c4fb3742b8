"""The ranks of an elastic job's next group: the decisions alone, without processes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tagi_ddp.launcher.roll_call import Call, Group, JoinRequest, RollCall, find_source

PATIENCE = 10.0


def request(
    progress: int | None,
    time: float = 0.0,
    blamed: tuple[int, ...] = (),
    done: bool = False,
    admits: bool = True,
) -> JoinRequest:
    return JoinRequest(progress, list(blamed), PATIENCE, done, admits, time)


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


def first_group(names: str) -> RollCall:
    roll = RollCall(names)
    for name in names:
        roll.join(name, request(None))
    assert roll.next_group(0) == Group(1, tuple(names), 0, (), len(names))
    return roll


def test_a_lost_rank_is_left_out() -> None:
    roll = first_group("abc")
    roll.join("a", request(7, blamed=(1,)))
    assert roll.next_group(0) is None
    assert (roll.late, roll.call) == (["b", "c"], Call(7, joins=False))
    roll.remove("b")
    assert roll.next_group(0) is None  # c may still come
    roll.join("c", request(8))
    assert roll.next_group(0) == Group(2, ("a", "c"), 1, (0,), 2)


def test_who_is_blamed_is_waited_for_a_second_others_as_long_as_patience_lasts() -> None:
    for blamed, limit in (((1,), 1.0), ((), PATIENCE)):
        roll = first_group("ab")
        roll.join("a", request(7, 100.0, blamed))
        assert roll.next_group(100 + limit - 0.01) is None
        assert roll.next_group(100 + limit) == Group(2, ("a",), 0, (), 1)
        # It comes back with what it knew, which the others have left behind.
        roll.join("b", request(9, 200.0))
        assert roll.wanted
        roll.join("a", request(8, 200.0))
        assert roll.next_group(200) == Group(3, ("a", "b"), 0, (1,), 1)


def test_one_that_joins_takes_what_the_others_know() -> None:
    roll = first_group("ab")
    roll.join("c", request(None))
    assert (roll.late, roll.call) == (["a", "b"], Call(None, joins=True))
    for name in "ab":
        roll.join(name, request(5))
    assert roll.next_group(0) == Group(2, ("a", "b", "c"), 0, (2,), 2)


def test_a_rank_joins_when_all_others_stand_between_two_steps() -> None:
    roll = first_group("abc")
    roll.join("d", request(None))
    roll.remove("c")
    assert roll.call == Call(None, joins=False)
    roll.join("a", request(5))
    roll.join("b", request(5, admits=False))
    assert roll.next_group(0) == Group(2, ("a", "b"), 0, (), 2)
    assert (roll.wanted, roll.late, roll.call) == (True, ["a", "b"], Call(None, joins=True))
    for name in "ab":
        roll.join(name, request(6))
    assert roll.next_group(0) == Group(3, ("a", "b", "d"), 0, (2,), 2)


def test_all_are_done_only_together() -> None:
    roll = first_group("ab")
    roll.join("a", request(5, done=True))
    assert not roll.wanted
    roll.join("c", request(None))
    assert (roll.late, roll.call) == (["b"], Call(5, joins=False))
    roll.join("b", request(6))
    assert roll.next_group(0) == Group(2, ("a", "b", "c"), 1, (0, 2), 2)
    for name in "abc":
        roll.join(name, request(9, done=True))
    assert roll.next_group(0) is None
    assert roll.over


def test_what_was_learned_is_lost_with_the_last_who_knew() -> None:
    roll = first_group("ab")
    roll.join("a", request(1))
    roll.remove("a")
    roll.remove("b")
    roll.join("c", request(None))
    assert roll.next_group(0) is None
    assert not roll.lost  # the job has ended
    roll = RollCall("ab")
    roll.join("a", request(1))
    roll.remove("a")
    roll.join("b", request(None))
    assert roll.next_group(0) is None
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
        self.roll: RollCall | None = None
        self.members: tuple[str, ...] = ()

    @rule(target=alive)
    def start(self) -> str:
        name = str(next(self.names))
        self.state[name] = None
        if self.roll is None and len(self.state) == 3:
            self.roll = RollCall(sorted(self.state))
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
        group = self.roll.next_group(self.now)
        if group is None:
            # Nobody waits in vain: not when all have come, unless all are done or all is lost.
            assert late or not self.waiting or self.roll.over or self.roll.lost or not there
            return
        # The ranks that have come, and those that join if all others admit them.
        others = [name for name in self.waiting if name in there]
        admit = all(self.waiting[name] for name in others)
        assert set(group.members) == set(self.waiting if admit else others)
        if group.number > 1:
            assert set(group.members[: group.stayed]) == set(others)
        known = {name: self.state[name] for name in group.members if name in there}
        learned = [each for each in known.values() if each is not None]
        source = group.members[group.source]
        if learned:
            assert known[source] == max(learned)
        for rank, name in enumerate(group.members):
            latest = name in known and known[name] == known.get(source)
            assert (rank in group.behind) == (bool(there) and not latest)
            self.state[name] = self.state[source] or 0
        self.members = group.members
        for name in group.members:
            del self.waiting[name]

    @invariant()
    def only_the_living_are_members(self) -> None:
        if self.roll is not None and not self.roll.lost:
            assert set(self.roll.members) <= set(self.state)


TestJobs = Jobs.TestCase

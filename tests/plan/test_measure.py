"""Links of the planner, found again from the times that all_reduces took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.support import torch_group
from support.rank_pool import RankPool

from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.plan import Cluster, Link, measure, measure_link
from tagi_ddp.plan.model import all_reduce


class Clock(SingleCommunicator):
    """A communicator of three ranks whose all_reduces take what ``seconds`` says of their bytes."""

    def __init__(self, seconds: Any) -> None:
        super().__init__()
        self.size = 3
        self.seconds = seconds
        self.now = 0.0
        self.calls = 0

    def empty(self, count: int) -> np.ndarray:
        return np.zeros(count, np.float32)

    def all_reduce(self, buffer: Any) -> None:
        self.calls += 1
        slow = self.calls % 8 in (1, 2, 5, 0)  # of each size; the first one is a warm-up
        self.now += self.seconds(buffer.nbytes) + 100.0 * slow

    def all_gather_object(self, value: list[Any]) -> list[list[Any]]:
        if not isinstance(value[0], float):  # where a rank is
            return [value] * 3
        return [[time / 2 for time in value], value, [time / 3 for time in value]]


def link_by(
    seconds: Any, monkeypatch: pytest.MonkeyPatch, sizes: Any = (1024, 1 << 20), tries: int = 1
) -> Link:
    clock = Clock(seconds)
    monkeypatch.setattr(measure, "perf_counter", lambda: clock.now)
    link = measure_link(clock, sizes)
    assert clock.calls == 8 * len(sizes) * tries
    return link


def test_a_link_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(5e-5, 3e8)

    def seconds(size: int) -> float:
        return 3 * link.latency + 2 * 2 / 3 * size / link.bandwidth

    for sizes in ((1024, 1 << 20), (4, 1 << 18, 1 << 22, 1 << 23), (1026, 1 << 20)):
        found = link_by(seconds, monkeypatch, sizes)
        assert found.latency == pytest.approx(link.latency)
        assert found.bandwidth == pytest.approx(link.bandwidth)


def test_a_small_one_that_takes_longer_than_a_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hosts with more ranks than cores; the greater ones, in many messages, tell both."""
    shares = {1024: (1.0, 0.0), 1 << 20: (12.0, 1 << 20), 1 << 22: (12.0, 1 << 22)}
    monkeypatch.setattr(measure, "_shares", lambda ranks, one_host, size: shares[size])

    def seconds(size: int) -> float:
        return 5e-3 if size == 1024 else 12 * 1e-4 + size / 1e9

    found = link_by(seconds, monkeypatch, tuple(shares))
    assert found.latency == pytest.approx(1e-4)
    assert found.bandwidth == pytest.approx(1e9)


def test_a_latency_is_never_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    found = link_by(lambda size: size**1.5 * 1e-9, monkeypatch, (1 << 10, 1 << 11, 1 << 20))
    assert found.latency == 0
    assert found.bandwidth > 0


def test_a_busy_moment_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link, took = Link(5e-5, 3e8), {1024: 0, 1 << 20: 0}
    for busy in range(3):
        took.update(dict.fromkeys(took, 0))

        def seconds(size: int, busy: int = busy) -> float:
            took[size] += 1
            late = 1.0 if size == 1024 and took[size] <= 8 * busy else 0.0
            return late + 3 * link.latency + 2 * 2 / 3 * size / link.bandwidth

        found = link_by(seconds, monkeypatch, tries=1 + busy)
        assert found.latency == pytest.approx(link.latency)
        assert found.bandwidth == pytest.approx(link.bandwidth)


def test_of_several_tries_the_least_times_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first the small sum is late, then the large one, and only together they tell."""
    link, calls = Link(5e-5, 3e8), [0]

    def seconds(size: int) -> float:
        calls[0] += 1
        late = 1.0 if calls[0] <= 16 and size == 1024 else 0.0
        late += 1.0 if calls[0] > 16 and size > 1024 else 0.0
        return late + 3 * link.latency + 2 * 2 / 3 * size / link.bandwidth

    found = link_by(seconds, monkeypatch, tries=2)
    assert found.latency == pytest.approx(link.latency)
    assert found.bandwidth == pytest.approx(link.bandwidth)


def test_times_that_do_not_tell_a_link_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"1048576\] bytes took \['2', '1'\] s in the best of 3 tries"
    ):
        found = link_by(lambda size: 2.0 if size == 1024 else 1.0, monkeypatch, tries=3)
    assert found.latency == pytest.approx(1 / 3)
    assert found.bandwidth == pytest.approx(2 * 2 / 3 * (1 << 20))


def test_links_need_sizes_and_ranks() -> None:
    for sizes in ((8,), (8, 9)):
        with pytest.raises(ValueError, match="sizes must be two different ones or more"):
            measure_link(Clock(None), sizes)
    with pytest.raises(ValueError, match="sizes must be at least 4, got 3"):
        measure_link(Clock(None), (3, 8))
    alone = Clock(None)
    alone.size = 1
    with pytest.raises(ValueError, match="communicator has one rank"):
        measure_link(alone)


def slow_rank(comm: Any, link: Link) -> Link:
    """Measure, as if all_reduces took what ``link`` would, and half of that on rank 0."""
    plain = measure._seconds

    def seconds(communicator: Any, count: int) -> float:
        plain(communicator, count)
        time = all_reduce(Cluster(link, link, comm.size), comm.size, 4 * count)
        return time if comm.rank else time / 2

    measure._seconds = seconds
    try:
        return measure_link(comm)
    finally:
        measure._seconds = plain


def test_a_link_of_shared_memory(shm: RankPool) -> None:
    link = Link(1e-5, 1e9)
    found = shm.run(slow_rank, link, size=2)
    assert found[0] == found[1]
    assert found[0].latency == pytest.approx(link.latency)
    assert found[0].bandwidth == pytest.approx(link.bandwidth)


def test_a_process_group_is_taken(shm: RankPool, tmp_path: Path) -> None:
    def task(comm: Any) -> Link:
        with torch_group(comm, str(tmp_path / "f"), "gloo") as group:
            return measure_link(group, (1 << 10, 1 << 22))

    found = shm.run(task, size=2)
    assert found[0] == found[1]

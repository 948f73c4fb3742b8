"""Links of the planner, found again from the times that all_reduces took."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.support import torch_group
from support.rank_pool import RankPool

from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.plan import Link, measure, measure_link


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

    def all_gather(self, buffer: Any, out: Any) -> None:
        self.now += 0.25

    def all_gather_object(self, value: list[Any]) -> list[list[Any]]:
        if not isinstance(value[0], float):  # where a rank is
            return [value] * 3
        return [[time / 2 for time in value], value, [time / 3 for time in value]]


def link_by(seconds: Any, monkeypatch: pytest.MonkeyPatch, sizes: Any = (1024, 1 << 20)) -> Link:
    clock = Clock(seconds)
    monkeypatch.setattr(measure, "perf_counter", lambda: clock.now)
    link = measure_link(clock, sizes)
    assert clock.calls == 8 * len(set(sizes))
    return link


def test_a_link_holds_what_sums_took(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(5e-5, 3e8)

    def seconds(size: int) -> float:
        return link.all_reduce(3, size)

    for sizes in ((1024, 1 << 20), (1 << 23, 4, 1 << 18, 1 << 22), (1026, 1 << 20)):
        found = link_by(seconds, monkeypatch, sizes)
        measured = sorted(size // 4 * 4 for size in sizes)
        assert found.ranks == 3
        assert [size for size, _ in found.sums] == measured
        assert [time for _, time in found.sums] == pytest.approx([*map(seconds, measured)])
        assert found.latency == pytest.approx(seconds(measured[0]) / 4)
        assert found.vote == pytest.approx(0.25)
        assert found.bandwidth == pytest.approx(link.bandwidth)


def test_more_bytes_never_take_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a busy machine the times rise; if the most bytes take no longer, nothing limits them."""
    found = link_by(lambda size: 2.0 if size == 1024 else 1.0, monkeypatch)
    assert [seconds for _, seconds in found.sums] == [2.0, 2.0]
    assert found.bandwidth == math.inf
    assert found.all_reduce(3, 1 << 21) == pytest.approx(4.0)


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
        time = link.all_reduce(comm.size, 4 * count)
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
    assert found[0].vote > 0
    assert found[0].latency == pytest.approx(link.latency, rel=0.2)
    assert found[0].bandwidth == pytest.approx(link.bandwidth)


def test_a_process_group_is_taken(shm: RankPool, tmp_path: Path) -> None:
    def task(comm: Any) -> Link:
        with torch_group(comm, str(tmp_path / "f"), "gloo") as group:
            return measure_link(group, (1 << 10, 1 << 22))

    found = shm.run(task, size=2)
    assert found[0] == found[1]

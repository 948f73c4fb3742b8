"""Random programs of operations, against numpy."""

from __future__ import annotations

from typing import Any

from contract.data import (
    DTYPES,
    bits,
    check_equal,
    check_reduced,
    concatenate,
    empty,
    make,
    ops,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rank_pool import RankPool

Step = tuple[str, str, int, list[int], bool]


def run_program(comm: Any, steps: list[Step]) -> list[bytes]:
    """Run asynchronous and blocking steps; check every result at the end; return its bits.

    A rank may begin to send a message some steps before its receiver receives it. Messages of one
    rank keep their order, so that no program waits in a circle.
    """
    rank, size = comm.rank, comm.size
    checks: list[Any] = []
    same = []
    sends = [
        (number, step)
        for number, step in enumerate(steps)
        if step[0] == "message" and ends_of(step, size)[0] == rank
    ]
    for number, step in enumerate(steps):
        while sends and sends[0][0] - ahead_of(sends[0][1]) <= number:
            place, (_, dtype, choice, shares, async_op) = sends.pop(0)
            buffer = make(dtype, shares[0], 100 * place)
            later = async_op or place > number
            dst = ends_of(steps[place], size)[1]
            work = comm.send(buffer, dst, choice - 3, async_op=later)
            assert (work is None) == (not later)
            checks.append((work, (lambda buffer: None, buffer)))
        if step[0] != "message":
            work, check = begin_collective(comm, number, step)
            if step[0] == "all_reduce":
                same.append(check[1])
        elif ends_of(step, size)[1] == rank:
            _, dtype, choice, shares, async_op = step
            out = empty(dtype, shares[0])
            work = comm.recv(out, ends_of(step, size)[0], choice - 3, async_op=async_op)
            check = (check_equal, out, make(dtype, shares[0], 100 * number))
        else:
            continue
        assert (work is None) == (not step[-1])
        checks.append((work, check))
    for work, (check, out, *expected) in checks:
        if work is not None:
            work.wait()
        check(out, *expected)
    return [bits(out) for out in same]


def begin_collective(comm: Any, number: int, step: Step) -> tuple[Any, tuple[Any, ...]]:
    """Return the collective's Work, if any, and what checks its result: function and arguments."""
    kind, dtype, choice, shares, async_op = step
    rank, size = comm.rank, comm.size
    counts = shares[:size]
    op = ops(dtype)[choice % len(ops(dtype))]
    total, start = sum(counts), sum(counts[:rank])
    whole = [make(dtype, total, 100 * number + r) for r in range(size)]
    parts = [make(dtype, count, 100 * number + r) for r, count in enumerate(counts)]
    mine = slice(start, start + counts[rank])
    if kind == "all_reduce":
        out = empty(dtype, total)
        work = comm.all_reduce(whole[rank], op, out=out, async_op=async_op)
        return work, (check_reduced, out, whole, op, dtype)
    if kind == "broadcast":
        out = make(dtype, total, 100 * number + rank)
        work = comm.broadcast(out, choice % size, async_op=async_op)
        return work, (check_equal, out, whole[choice % size])
    if kind == "all_gather":
        out = empty(dtype, total)
        work = comm.all_gather(parts[rank], out, counts, async_op=async_op)
        return work, (check_equal, out, concatenate(parts))
    if kind == "reduce_scatter":
        out = empty(dtype, counts[rank])
        work = comm.reduce_scatter(whole[rank], out, counts, op, async_op=async_op)
        return work, (check_reduced, out, [buffer[mine] for buffer in whole], op, dtype)
    # all_to_all: every rank sends counts[r] elements to rank r
    out = empty(dtype, counts[rank] * size)
    work = comm.all_to_all(whole[rank], out, counts, [counts[rank]] * size, async_op=async_op)
    return work, (check_equal, out, concatenate([buffer[mine] for buffer in whole]))


def ends_of(step: Step, size: int) -> tuple[int, int]:
    """Return which rank sends a message, and which receives it."""
    src = step[2] % size
    return src, (src + 1 + step[2] // size % (size - 1)) % size


def ahead_of(step: Step) -> int:
    """Return how many steps before its receiver the sender begins, at most."""
    return step[3][1] % 4


KINDS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
COUNTS = st.one_of(st.integers(0, 9), st.integers(0, 3000), st.sampled_from([4096, 16384, 65537]))
STEPS = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.integers(0, 11),
    st.lists(COUNTS, min_size=4, max_size=4),
    st.booleans(),
)


class ProgramsContract:
    """At every number of ranks."""

    programs = 25

    def test_random_program(self, pool: RankPool, size: int) -> None:
        @settings(
            max_examples=self.programs, deadline=None, suppress_health_check=list(HealthCheck)
        )
        @given(steps=st.lists(STEPS, min_size=1, max_size=8))
        def check(steps: list[Step]) -> None:
            results = pool.run(run_program, steps, size=size)
            assert all(result == results[0] for result in results), "results differ in bits"

        check()

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
    """Run asynchronous and blocking steps; check every result at the end; return its bits."""
    rank, size = comm.rank, comm.size
    checks = []
    for number, (kind, dtype, choice, shares, async_op) in enumerate(steps):
        counts = shares[:size]
        op = ops(dtype)[choice % len(ops(dtype))]
        total, start = sum(counts), sum(counts[:rank])
        whole = [make(dtype, total, 100 * number + r) for r in range(size)]
        parts = [make(dtype, count, 100 * number + r) for r, count in enumerate(counts)]
        mine = slice(start, start + counts[rank])
        if kind == "all_reduce":
            out = empty(dtype, total)
            work = comm.all_reduce(whole[rank], op, out=out, async_op=async_op)
            check = (check_reduced, out, whole, op, dtype)
        elif kind == "broadcast":
            out = make(dtype, total, 100 * number + rank)
            work = comm.broadcast(out, choice % size, async_op=async_op)
            check = (check_equal, out, whole[choice % size])
        elif kind == "all_gather":
            out = empty(dtype, total)
            work = comm.all_gather(parts[rank], out, counts, async_op=async_op)
            check = (check_equal, out, concatenate(parts))
        elif kind == "reduce_scatter":
            out = empty(dtype, counts[rank])
            work = comm.reduce_scatter(whole[rank], out, counts, op, async_op=async_op)
            check = (check_reduced, out, [buffer[mine] for buffer in whole], op, dtype)
        else:  # all_to_all: every rank sends counts[r] elements to rank r
            out = empty(dtype, counts[rank] * size)
            work = comm.all_to_all(
                whole[rank], out, counts, [counts[rank]] * size, async_op=async_op
            )
            check = (check_equal, out, concatenate([buffer[mine] for buffer in whole]))
        assert (work is None) == (not async_op)
        checks.append((work, check))
    same = []
    for (kind, *_), (work, (check, out, *expected)) in zip(steps, checks, strict=True):
        if work is not None:
            work.wait()
        check(out, *expected)
        if kind == "all_reduce":
            same.append(bits(out))
    return same


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

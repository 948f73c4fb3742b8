"""Rules of all functions: gradients, exact sums, the operations they take, refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_pool import RankPool

from sharding.lifts import joined, spread
from tagi_ddp.communicators import CommunicatorError
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.sharding import (
    gather_tensor,
    reduce_shard_tensor,
    reduce_tensor,
    shard_heads,
    shard_sequence,
    shard_tensor,
    sync_tensor,
)

Tensor = torch.Tensor

EVERYWHERE = pytest.mark.parametrize(
    "pool", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.slow)], indirect=True
)


# Gradients.


def gradients(comm: Any) -> None:
    """Check every gradient against differences; all ranks change the same element at a time."""
    rank, ranks, lengths = comm.rank, comm.size, (2, 3)[: comm.size]
    shapes = [[2, length, 2] for length in lengths]
    whole = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stack = torch.stack([whole, whole + 1])

    def check(function: Callable[[Tensor], Tensor], given: Tensor) -> None:
        assert torch.autograd.gradcheck(function, given.clone().requires_grad_())

    def part(tensor: Tensor) -> Tensor:
        return spread(tensor.split(lengths, 1)[rank], tensor, comm)

    # The ranks' copies of a whole are one variable, and their equal results one result ...
    check(lambda x: joined(shard_tensor(x, 1, shapes, comm), shapes, 1, comm), whole)
    check(lambda x: gather_tensor(part(x), 1, shapes, comm), whole)
    check(lambda x: reduce_tensor(spread(x[rank], x, comm), comm), stack)
    # ... or each rank does something else with its result.
    full = [list(whole.shape)] * ranks
    check(lambda x: joined(sync_tensor(part(x), 1, shapes, comm), full, 0, comm), whole)
    check(
        lambda x: joined(
            reduce_shard_tensor(spread(x[rank], x, comm), 1, shapes, comm), shapes, 1, comm
        ),
        stack,
    )
    heads = [[1, 5, 2], [1, 5, 2]]
    lengths_only = [[length] for length in lengths]
    check(lambda x: joined(shard_heads(part(x), lengths_only, comm), heads, 0, comm), whole)
    check(
        lambda x: joined(
            shard_sequence(spread(x[rank : rank + 1], x, comm), lengths_only, comm),
            shapes,
            1,
            comm,
        ),
        whole,
    )


@pytest.mark.parametrize(
    "pool",
    ["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gloo", "mpi"))],
    indirect=True,
)
def test_gradients(pool: RankPool) -> None:
    pool.run(gradients, size=2)


def shared_gradient(comm: Any) -> list[Any]:
    shapes = [[2, 3]] * comm.size
    a, b = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    gradient = torch.ones(2 * comm.size, 3)  # dense: both uses get the same memory
    (sync_tensor(a, 0, shapes, comm) + sync_tensor(b, 0, shapes, comm)).backward(gradient)
    twice = torch.ones(2, 3, requires_grad=True)
    out = sync_tensor(twice, 0, shapes, comm)
    (out + out).backward(gradient)
    return [a.grad.tolist(), b.grad.tolist(), twice.grad.tolist()]


@EVERYWHERE
def test_gradient_of_two_uses(pool: RankPool) -> None:
    two, four = [[[float(n)] * 3] * 2 for n in (2, 4)]
    assert pool.run(shared_gradient, size=2) == [[two, two, four]] * 2


def large_expanded_gradient(comm: Any) -> float:
    shapes = [[30_000 + r, 3] for r in range(comm.size)]
    part = torch.ones(*shapes[comm.rank], requires_grad=True)
    for _ in range(5):
        sync_tensor(part, 0, shapes, comm).sum().backward()
    return float((part.grad - 5 * comm.size).abs().max())


@EVERYWHERE
def test_expanded_gradient(pool: RankPool) -> None:
    assert pool.run(large_expanded_gradient, size=2) == [0.0, 0.0]


def zeros_elsewhere(comm: Any) -> bool:
    shapes = [[500, 9]] * comm.size
    for _ in range(3):
        torch.full((1000, 9), torch.nan)  # what memory that is used again holds
        whole = torch.zeros(1000, 9, requires_grad=True)
        shard_tensor(whole, 0, shapes, comm, gather_in_backward=False).sum().backward()
        expected = torch.zeros(1000, 9)
        expected[500 * comm.rank : 500 * (comm.rank + 1)] = 1
        if not torch.equal(whole.grad, expected):
            return False
    return True


def test_zeros_outside_of_the_own_part(shm: RankPool) -> None:
    assert shm.run(zeros_elsewhere, size=2) == [True, True]


# Sums.


def exact_sums(comm: Any) -> None:
    shapes = [[1]] * comm.size

    def sums(value: float, dtype: torch.dtype) -> list[float]:
        whole = torch.full((comm.size,), value, dtype=dtype)
        part = torch.zeros(1, dtype=dtype, requires_grad=dtype.is_floating_point)
        answers = [reduce_tensor(whole, comm)[0], reduce_shard_tensor(whole, 0, shapes, comm)[0]]
        if part.requires_grad:
            sync_tensor(part, 0, shapes, comm).backward(whole)
            answers.append(part.grad[0])
        return [answer.item() for answer in answers]

    small = 1 + 2**-40
    assert set(sums(small, torch.float64)) == {comm.size * small}
    big = 2**53 + 1
    assert set(sums(big, torch.int64)) == {comm.size * big}
    # Rounded once: after each addition it would stay at the first number.
    for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
        whole = torch.tensor([2.0**bits if comm.rank == 0 else 1.0], dtype=dtype)
        assert reduce_tensor(whole, comm).item() == 2.0**bits + 2, dtype


@pytest.mark.parametrize("pool", ["shm", "gloo"], indirect=True)
def test_sums_are_exact(pool: RankPool) -> None:
    pool.run(exact_sums, size=3)


class Noted:
    """Notes the operations on tensors of a communicator written in Python."""

    OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

    def __init__(self, comm: Any) -> None:
        self.calls: list[str] = []
        for name in self.OPERATIONS:
            setattr(comm, name, self._noting(name, getattr(comm, name)))

    def _noting(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def noting(buffer: Any, *args: Any, **options: Any) -> Any:
            if isinstance(buffer, torch.Tensor):  # not the vote
                self.calls.append(name)
            return operation(buffer, *args, **options)

        return noting


def operations(comm: Any) -> dict[str, list[str]]:
    noted, found = Noted(comm), {}
    lengths = [[2, 4]] * comm.size
    whole, part = [torch.ones(n, 4, requires_grad=True) for n in (2 * comm.size, 2)]
    heads = torch.ones(4, 2, 3, requires_grad=True)
    for name, out in {
        "shard": lambda: shard_tensor(whole, 0, lengths, comm),
        "shard only": lambda: shard_tensor(whole, 0, lengths, comm, gather_in_backward=False),
        "gather": lambda: gather_tensor(part, 0, lengths, comm),
        "sync": lambda: sync_tensor(part, 0, lengths, comm),
        "reduce": lambda: reduce_tensor(whole, comm),
        "reduce_shard": lambda: reduce_shard_tensor(whole, 0, lengths, comm),
        "heads": lambda: shard_heads(heads, lengths, comm),
        "sequence": lambda: shard_sequence(heads.view(2, 4, 3), lengths, comm),
    }.items():
        noted.calls = []
        result = out()
        noted.calls.append("backward")
        result.sum().backward()
        found[name] = noted.calls
    for name in Noted.OPERATIONS:
        delattr(comm, name)
    return found


def test_operations() -> None:
    expected = {
        "shard": ["backward", "all_gather"],
        "shard only": ["backward"],
        "gather": ["all_gather", "backward"],
        "sync": ["all_gather", "backward", "reduce_scatter"],
        "reduce": ["all_reduce", "backward"],
        "reduce_shard": ["reduce_scatter", "backward", "all_gather"],
        "heads": ["all_to_all", "backward", "all_to_all"],
        "sequence": ["all_to_all", "backward", "all_to_all"],
    }
    with closing(RankPool("gloo", 2, environment={"RANK_POOL_HOSTS": "ab"})) as pool:
        assert pool.run(operations) == [expected] * 2


# What is wrong.


def refuse_wrong_shards(comm: Any) -> list[str]:
    one, rank = comm.rank == 1, comm.rank
    shapes = [[3, 2], [1, 2]]
    part, whole = torch.zeros(shapes[rank]), torch.zeros(4, 2)
    wide, short = torch.zeros(shapes[rank][0], 3), torch.zeros(3, 2)
    calls: list[tuple[type[Exception], Callable[[], Any]]] = []
    for function in (gather_tensor, sync_tensor):
        calls += [
            (ValueError, lambda f=function: f(wide if one else part, 0, shapes, comm)),
            (IndexError, lambda f=function: f(part, 2 if one else 0, shapes, comm)),
            (IndexError, lambda f=function: f(part, -3, shapes, comm)),
            (ValueError, lambda f=function: f(part, 0, shapes[:1], comm)),
            (ValueError, lambda f=function: f(part, 0, shapes[::-1] if one else shapes, comm)),
            (ValueError, lambda f=function: f(part, 0, [[3, 2], [1, 3]], comm)),
            (ValueError, lambda f=function: f(part, 0, [[3, 2], [-1, 2]], comm)),
            (ValueError, lambda f=function: f(part.double() if one else part, 0, shapes, comm)),
        ]
    calls += [
        (ValueError, lambda: reduce_shard_tensor(short if one else whole, 0, shapes, comm)),
        (IndexError, lambda: reduce_shard_tensor(whole, 2, shapes, comm)),
        (ValueError, lambda: reduce_tensor(torch.zeros(2, 4) if one else whole, comm)),
        (ValueError, lambda: (gather_tensor if one else sync_tensor)(part, 0, shapes, comm)),
        (ValueError, lambda: shard_tensor(short, 0, shapes, comm)),
        (IndexError, lambda: shard_tensor(whole, 2, shapes, comm)),
        (TypeError, lambda: shard_tensor(whole, 0.0, shapes, comm)),
        (TypeError, lambda: gather_tensor(part, 0, None, comm)),
        (TypeError, lambda: gather_tensor([0, 0] if one else part, 0, shapes, comm)),
        (TypeError, lambda: reduce_tensor(whole.bool() if one else whole, comm)),
        (TypeError, lambda: reduce_shard_tensor(whole.bool(), 0, shapes, comm)),
        (TypeError, lambda: gather_tensor(part.to_sparse_csr() if one else part, 0, shapes, comm)),
        (TypeError, lambda: shard_tensor(whole.to_sparse(), 0, shapes, comm)),
        (ValueError, lambda: gather_tensor(part, 0, [1, 3] if one else [3, 1], comm)),
        (ValueError, lambda: gather_tensor(part, 0, [3, -1], comm)),
        (ValueError, lambda: gather_tensor(part, 0, [4], comm)),
        (TypeError, lambda: gather_tensor(part, 0, [3.0, 1.0] if one else [3, 1], comm)),
        (TypeError, lambda: gather_tensor(part, 0, [3, True], comm)),
        (ValueError, lambda: shard_heads(whole[None], [[2], []], comm)),
    ]
    texts = []
    for kind, call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert not isinstance(caught.value, CommunicatorError)
        texts.append(str(caught.value))
    assert gather_tensor(part, 0, shapes, comm).shape == (4, 2), "the group is not usable any more"
    return texts


@EVERYWHERE
def test_refusals(pool: RankPool) -> None:
    first, second = pool.run(refuse_wrong_shards, size=2)
    assert first[0] == f"rank 1: {second[0]}"
    for texts in (first, second):
        assert "more than dimension 0" in texts[0]
        assert "dim is 2, but the tensor has 2 dimensions" in texts[1]
        assert "one shape per rank (2), got 1" in texts[3]
        assert "the local shard has shape (1, 2), but shapes[1], this rank's, is (3, 2)" in texts[4]
        assert "shapes[1] must be at least 0, got -1" in texts[6]
        assert "float64" in texts[7]
        assert "float32" in texts[7]
        assert "add up to 4, but input_ has 3" in texts[16]
        assert "input_ of reduce_tensor has dtype bool, which has no sum" in texts[25]
        assert "input_ of reduce_shard_tensor has dtype bool" in texts[26]
        assert "input_ must be dense, got a tensor of layout torch.sparse_csr" in texts[27]
        assert "input_ must be dense, got a tensor of layout torch.sparse_coo" in texts[28]
        assert (
            "the local shard has shape (1, 2), but shapes[1], this rank's, is (3, 2)" in texts[29]
        )
        assert "shapes[1] must be at least 0, got -1" in texts[30]
        assert "one shape per rank (2), got 1" in texts[31]
        assert "shapes[0] must be a shape or a size, got 3.0" in texts[32]
        assert "shapes[1] must be an integer, got True" in texts[33]
        assert "shapes[1] must begin with the sequence's length" in texts[34]
    assert "call of rank 1: reduce_tensor(float32, cpu, (2, 4))" in first[18]
    assert "call of rank 1: gather_tensor" in first[19]


@pytest.mark.parametrize("group", [None, SingleCommunicator()])
def test_a_group_of_one_takes_no_sparse_tensors_either(group: Any) -> None:
    with pytest.raises(TypeError, match=r"input_ must be dense, got a tensor of layout torch\.sp"):
        gather_tensor(torch.eye(2).to_sparse(), 0, [[2, 2]], group)


# Other dtypes, and sizes in place of shapes.


def with_sizes(comm: Any) -> None:
    """Compare sizes, also those of numpy, with the shapes that they stand for."""
    rank, lengths = comm.rank, [3, 1]
    whole, other = torch.arange(8.0).view(4, 2), np.array(lengths)
    shapes = [[length, 2] for length in lengths]
    part = whole.split(lengths)[rank]
    for sizes in (lengths, tuple(other), [lengths[0], shapes[1]]):
        assert torch.equal(shard_tensor(whole, 0, sizes, comm), part)
        assert torch.equal(reduce_shard_tensor(whole, -2, sizes, comm), 2 * part)
        for function in (gather_tensor, sync_tensor):
            given = sizes if rank else shapes  # ranks may say the same in both ways
            assert torch.equal(function(part, 0, given, comm), whole)
        heads = shard_heads(part.expand(2, -1, -1).contiguous(), sizes, comm)
        assert torch.equal(heads, whole[None])
        assert torch.equal(shard_sequence(heads, sizes, comm), part.expand(2, -1, -1))


def test_sizes(shm: RankPool) -> None:
    shm.run(with_sizes, size=2)


def complex_numbers(comm: Any) -> None:
    """Check gradients against differences, and tensors that are conjugated or negated lazily."""
    rank, lengths = comm.rank, (2, 1)
    whole = torch.randn(3, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    part, doubled = whole.split(lengths)[rank], 2 * whole
    given = whole.clone().requires_grad_()
    shapes = [[length, 2] for length in lengths]

    def synced(x: Tensor) -> Tensor:
        own = spread(x.split(lengths)[rank], x, comm)
        return joined(torch.view_as_real(sync_tensor(own, 0, lengths, comm)).flatten(), *flat, comm)

    flat = [[2 * whole.numel()]] * comm.size, 0
    assert torch.autograd.gradcheck(lambda x: synced(x) * torch.arange(24.0).double(), given)
    assert torch.equal(gather_tensor(part.conj(), 0, shapes, comm), whole.conj())
    assert torch.equal(gather_tensor(part.conj().imag, 0, shapes, comm), -whole.imag)
    assert torch.equal(reduce_tensor(whole.conj(), comm), doubled.conj())


@EVERYWHERE
def test_complex_numbers(pool: RankPool) -> None:
    pool.run(complex_numbers, size=2)

"""Tensors to shard, and what is checked of everything that comes out."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor

EVEN, UNEVEN, WITH_EMPTY, EMPTY = (2, 2, 2, 2), (3, 1, 4, 2), (2, 0, 3, 0), (0, 0, 0, 0)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
ALL_DTYPES = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)

# By itself pickle looks for them in the first module that has imported torch, maybe a test.
copyreg.pickle(torch.memory_format, lambda f: (getattr, (torch, str(f).removeprefix("torch."))))


@dataclass(frozen=True)
class Case:
    """The shape of a whole, but for ``dim``, which is split into ``sizes``; how it lies."""

    sizes: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    layout: str
    others: tuple[int, ...]

    @property
    def shapes(self) -> list[list[int]]:
        return [self.shape(size) for size in self.sizes]

    def shape(self, size: int) -> list[int]:
        shape = list(self.others)
        shape.insert(self.dim % (len(shape) + 1), size)
        return shape

    def whole(self, seed: int) -> Tensor:
        """Return small whole numbers, the same on all ranks."""
        return drawn(seed, self.shape(sum(self.sizes)), self.dtype)

    def lay(self, tensor: Tensor) -> Tensor:
        return LAYOUTS[self.layout](tensor)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        return whole.split(self.sizes, self.dim)[rank]


def drawn(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    real, imaginary = torch.randint(-4, 5, (2, *shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(real.double(), imaginary.double()).to(dtype)
    return (real > 0) if dtype == torch.bool else real.to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """Return a copy with gaps, its last dimension not the innermost."""
    gaps = tensor.new_zeros(*reversed(tensor.shape), 2)
    gaps[..., 1] = tensor.permute(*reversed(range(tensor.dim())))
    return gaps[..., 1].permute(*reversed(range(tensor.dim())))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "strided": strided,
    "channels_last": lambda t: t.clone(memory_format=torch.channels_last),
    "channels_last_3d": lambda t: t.clone(memory_format=torch.channels_last_3d),
}


def cases(ranks: int) -> Iterator[Case]:
    for sizes in (EVEN, UNEVEN, WITH_EMPTY, EMPTY, WITH_EMPTY[::-1]):
        for dim in (0, 1, -1):
            yield Case(sizes[:ranks], dim, torch.float32, "contiguous", (3, 2))
        yield Case(sizes[:ranks], -2, torch.float64, "strided", (3, 2))
        yield Case(sizes[:ranks], 1, torch.float32, "contiguous", (1, 5))  # parts lie in a row
        yield Case(sizes[:ranks], 0, torch.float32, "contiguous", ())
    for dtype in ALL_DTYPES:
        yield Case(UNEVEN[:ranks], 0, dtype, "contiguous", (3,))
        yield Case(UNEVEN[:ranks], 1, dtype, "strided", (3, 2))
    for dim in (0, 1, 2, -1):
        for sizes in (UNEVEN, WITH_EMPTY):
            yield Case(sizes[:ranks], dim, torch.float32, "channels_last", (3, 2, 5))
            yield Case(sizes[:ranks], dim, torch.float64, "channels_last_3d", (3, 2, 5, 2))


def run(
    function: Callable[[Tensor], Tensor], given: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return what the function returns, and ``given``'s gradient; check what holds for all."""
    before, before_gradient = given.clone(), gradient.clone()
    leaf = given.detach().requires_grad_(given.is_floating_point() or given.is_complex())
    out = function(leaf)
    assert out.dtype == given.dtype
    formats = [f for f in FORMATS if given.is_contiguous(memory_format=f)]
    assert any(out.is_contiguous(memory_format=f) for f in formats or FORMATS[:1])
    found = None
    if leaf.requires_grad:
        (found,) = torch.autograd.grad(out, leaf, gradient)
        assert found.dtype == given.dtype
    assert torch.equal(given, before), "the input was written to"
    assert torch.equal(gradient, before_gradient), "the gradient was written to"
    result = out.detach().clone()
    if given.numel():
        with torch.no_grad():
            given.copy_(given == 0)
    assert torch.equal(out, result), "the output is not a tensor of its own"
    return result, found


def expect(name: str, case: Any, found: Tensor | None, expected: Tensor) -> None:
    if found is not None and not (found.shape == expected.shape and torch.equal(found, expected)):
        raise AssertionError(f"{name} of {case}: {found} instead of {expected}")


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of small whole numbers, which every dtype represents exactly."""
    exact = torch.complex128 if tensors[0].is_complex() else torch.float64
    return torch.stack([t.to(exact) for t in tensors]).sum(0).to(tensors[0].dtype)

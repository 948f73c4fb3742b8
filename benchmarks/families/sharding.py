"""Tensors split over ranks, against anemoi-models; see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.measure import Contender, Missing, Row, measure
from benchmarks.harness.peers import find_anemoi, open_gloo
from tagi_ddp import Communicator

LENGTH, CHANNELS, HEADS = 16384, 1024, 16  # of the whole tensor, 64 MB
# By function: how many times faster forward and backward are to be, ours over shared memory.
TARGETS = {"sync_tensor": 2.0, "reduce_shard_tensor": 2.0, "shard_heads": 1.5}


class Call:
    """A function of ``package`` on this rank's part of a tensor, forward and backward."""

    def __init__(self, package: str, name: str, group: Any, ranks: int, length: int) -> None:
        module = "transformer" if name == "shard_heads" else "graph"
        function = getattr(import_module(f"{package}.{module}"), name)
        part = (length // ranks, CHANNELS)
        shapes = [part] * ranks
        if name == "shard_heads":
            self._input = torch.zeros(1, HEADS, part[0], CHANNELS // HEADS)
            self._apply: Callable[[Tensor], Tensor] = lambda x: function(x, shapes, group)
        else:
            whole = name == "reduce_shard_tensor"
            self._input = torch.zeros((length, CHANNELS) if whole else part)
            self._apply = lambda x: function(x, 0, shapes, group)
        self._output = self.forward()
        self._gradient = torch.zeros_like(self._output)

    def forward(self) -> Tensor:
        self._output = self._apply(self._input.requires_grad_())
        return self._output

    def backward(self) -> Tensor:
        (gradient,) = torch.autograd.grad(
            self._output, self._input, self._gradient, retain_graph=True
        )
        return gradient

    def both(self) -> None:
        self.forward()
        self.backward()

    def sample(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return output and gradient for numbers of this rank's own, then go back to zeros."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self._input.normal_(generator=generator)
        self._gradient.normal_(generator=generator)
        answer = self.forward().detach().clone(), self.backward().clone()
        with torch.no_grad():
            self._input.zero_()  # theirs adds to its input at each call
        self._gradient.zero_()
        return answer


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """Forward and backward, ours on shared memory; sync_tensor's backward, both on gloo."""
    length, rounds = (32, 2) if quick else (LENGTH, 15)
    torch.set_num_threads(1)
    gloo, theirs = open_gloo(communicator, scratch), find_anemoi()
    world = gloo.group.WORLD
    found = []
    for name, group, target in (
        *((name, communicator, target) for name, target in TARGETS.items()),
        ("sync_tensor", world, 1.0),
    ):
        ways = {"ours": Call("tagi_ddp.sharding", name, group, communicator.size, length)}
        if not isinstance(theirs, Missing):
            ways["theirs"] = Call(theirs.__name__, name, world, communicator.size, length)
            _require_same(name, *(way.sample(communicator.rank) for way in ways.values()))
        on_gloo = group is world
        contenders = [
            Contender(title, way.backward if on_gloo else way.both) for title, way in ways.items()
        ]
        figures = {
            title: figure.in_unit(1e3)
            for title, figure in measure(communicator, contenders, rounds).items()
        }
        what = "backward, both on gloo" if on_gloo else "forward and backward, shm"
        found.append(
            Row(
                f"{name}, {communicator.size} ranks, {4 * length * CHANNELS >> 20} MB, {what}, "
                "against anemoi-models" + ("" if on_gloo else " on gloo"),
                figures["ours"],
                theirs if isinstance(theirs, Missing) else figures["theirs"],
                "ms",
                target,
            )
        )
    gloo.destroy_process_group()
    return found


def _require_same(name: str, ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, msg=f"{name}: ours and anemoi-models' differ")

"""Checkpoints of which one bit is flipped: a part of ``make chaos``.

``python tests/chaos/flips.py --flips 1000 --first 0`` flips so many bits of a small checkpoint of
each kind, one at a time, and says which promises were broken: each is refused by CheckpointError on
all ranks, before anything is changed; and every tenth time, with ``fallback``, the checkpoint
before is loaded. Without ``--flips`` it flips every bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from pytagi.nn import Linear, ReLU, Sequential
from torch import nn

from tagi_ddp import DDPSequential, DistributedSampler, init, launch
from tagi_ddp.checkpoint import CheckpointError, Checkpoints
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.parallel import (
    BaseTrainer,
    BaseTrainerConfig,
    CheckpointConfig,
    GaussianLoss,
    Task,
)
from tagi_ddp.replica.host import attach
from tagi_ddp.sequential.run_state import named_parameters

STRIDE = 2_147_483_647  # a prime: successive numbers flip bits that lie far apart
EARLIER, LAST = 1, 2  # steps of the two checkpoints
FALLBACK = 10  # every so many flips


class Flips:
    """The bits of a checkpoint's files, flipped one at a time, by rank 0 for all ranks.

    ``load`` loads the last checkpoint, or the one before, and returns its step; ``state`` returns
    all that it may change, as bytes.
    """

    def __init__(
        self, comm: Any, folder: Path, load: Callable[[bool], int], state: Callable[[], bytes]
    ) -> None:
        self._comm, self._load, self._state = comm, load, state
        self._files = {path: path.read_bytes() for path in sorted((folder / "latest").iterdir())}
        self._bits = 8 * sum(map(len, self._files.values()))
        self._earlier = b""
        self._write(next(iter(self._files)), b"")
        self._earlier = self._fallen_back()
        self._restore()

    def run(self, first: int, flips: int | None) -> tuple[int, list[str]]:
        """Return the number of flips, and which promises were broken."""
        numbers = range(first, first + (flips or self._bits))
        broken = [f"{where}: {end}" for each in map(self._flip, numbers) for where, end in each]
        self._restore()
        assert self._load(False) == LAST
        assert self._state() != self._earlier
        return len(numbers), broken

    def _flip(self, number: int) -> Iterator[tuple[str, str]]:
        """Yield where a bit was flipped, and how that has broken a promise, if it has."""
        bit = number * STRIDE % self._bits
        for path in self._files:
            if bit < 8 * len(self._files[path]):
                break
            bit -= 8 * len(self._files[path])
        data = self._files[path]
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        self._write(path, bytes(damaged))
        where = f"bit {bit % 8} of byte {bit // 8} of {path.name}"
        if end := self._end():
            yield where, end
        elif number % FALLBACK == 0 and self._fallen_back() != self._earlier:
            yield where, "another state than that of the checkpoint before"
        self._write(path, data)

    def _end(self) -> str:
        """Return how the ranks end if not with CheckpointError, and nothing changed."""
        before, end = self._state(), "taken without a word"
        try:
            self._load(False)
        except CheckpointError:
            end = "" if self._state() == before else "refused after a change"
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        ends = all_gather_object(self._comm, end)
        return end if len(set(ends)) == 1 else f"ranks end with {ends}"

    def _fallen_back(self) -> bytes:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert self._load(True) == EARLIER
        assert self._comm.rank > 0 or len(caught) == 1
        return self._state()

    def _write(self, path: Path, data: bytes) -> None:
        self._comm.barrier()
        if self._comm.rank == 0:
            path.write_bytes(data)
        self._comm.barrier()

    def _restore(self) -> None:
        for path, data in self._files.items():
            self._write(path, data)


SAMPLES = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)


def tagi() -> Any:
    return Sequential(Linear(2, 4), ReLU(), Linear(4, 1))


def flips_of_a_run(comm: Any, folder: str, first: int, flips: int | None) -> tuple[int, list[str]]:
    """Flip bits of what `Checkpoints` has saved: a network, a module and a generator."""
    merges: dict[str, Any] = {"reduction": "precision", "sync_every": 3} if comm.size > 1 else {}
    module, generator = nn.Linear(2, 1), np.random.default_rng(comm.rank)
    sampler = DistributedSampler(8, comm.size, comm.rank)
    with DDPSequential(tagi(), communicator=comm, **merges) as model:
        checkpoints = Checkpoints(
            folder,
            {"model": model, "module": module},
            generators={"own": generator},
            sampler=sampler,
        )

        def state() -> bytes:
            arrays = [value.numpy() for value in module.state_dict().values()]
            arrays += [array for _, array in model._local.replica.state()]
            draws = f"{generator.bit_generator.state} {sampler.batch_sizes} {checkpoints.extra}"
            return b"".join([*(array.tobytes() for array in arrays), draws.encode()])

        with checkpoints:
            for step in (EARLIER, LAST):
                model.learn(SAMPLES, SAMPLES[:, :1], 0.1)
                generator.random()
                module.load_state_dict({n: v + 1 for n, v in module.state_dict().items()})
                checkpoints.save(step, {"noise": 0.1 * step})
            checkpoints.wait()
            load = checkpoints.resume
            return Flips(comm, Path(folder), lambda back: load(fallback=back), state).run(
                first, flips
            )


class Fit(Task):
    """A task for networks."""

    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        return model(batch[0])

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> Any:
        return GaussianLoss(model, output, batch[1], 0.1)


class FitModule(nn.Module, Fit):
    """A task for modules, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> Any:
        return (output * self.scale - batch[1]).square().mean()


def flips_of_a_trainer(
    kind: str, folder: str, first: int, flips: int | None
) -> tuple[int, list[str]]:
    """Flip bits of what the trainer has saved, of a torch module or a network."""
    task: Any = FitModule() if kind == "module" else Fit()
    model = nn.Linear(2, 1) if kind == "module" else tagi()
    optimizer = partial(torch.optim.Adam, lr=0.1) if kind == "module" else None
    config = BaseTrainerConfig("flips", exp_dir=folder, checkpoint=CheckpointConfig(1))
    trainer: Any = BaseTrainer(config)
    data = SAMPLES, SAMPLES[:, :1]
    trainer.train(task, model, data, epochs=LAST, batch_size=8, optimizer=optimizer)
    trainer.close()

    def state() -> bytes:
        if kind == "module":
            tensors = [*model.state_dict().values(), *task.state_dict().values()]
            arrays = [tensor.numpy() for tensor in tensors]
        else:
            arrays = [*named_parameters(attach(model)).values()]
        return b"".join([*(array.tobytes() for array in arrays), repr(trainer.state).encode()])

    def load(fallback: bool) -> int:
        return int(trainer.load_checkpoint(task, model, fallback=fallback).num_steps)

    flipped = Flips(SingleCommunicator(), Path(folder, "checkpoints"), load, state)
    return flipped.run(first, flips)


def rank_main(folder: str, first: int, flips: int | None) -> tuple[int, list[str]]:
    with init() as comm:
        return flips_of_a_run(comm, folder, first, flips)


def of_kind(kind: str, folder: str, first: int, flips: int | None) -> tuple[int, list[str]]:
    """Return the number of flips of a kind of checkpoint, and which promises were broken."""
    if kind == "1 rank":
        return flips_of_a_run(SingleCommunicator(), folder, first, flips)
    if kind == "2 ranks":
        return launch(rank_main, 2, (folder, first, flips))[0]
    return flips_of_a_trainer(kind.partition(" of a ")[2], folder, first, flips)


KINDS = ("1 rank", "2 ranks", "trainer of a module", "trainer of a network")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, help="of each kind; every bit by default")
    parser.add_argument("--first", type=int, default=0, help="number of the first flip")
    given = parser.parse_args()
    total = 0
    print("| checkpoint of | flips | broke a promise |\n|---|---|---|")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            flips, broken = of_kind(kind, f"{folder}/run", given.first, given.flips)
        total += len(broken)
        print(f"| {kind} | {flips} | {len(broken)} |", flush=True)
        for text in broken[:20]:
            print(f"    {text}", flush=True)
    sys.exit(total > 0)


if __name__ == "__main__":
    main()

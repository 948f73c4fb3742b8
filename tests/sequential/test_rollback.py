"""A step that is not made leaves nothing behind: random programs with steps that are refused.

Two equal networks go through the same steps, evaluations and resets. One of them also gets steps
that are refused, or calls that raise, and must then hold what the other one holds, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import after_series, after_words, last_step, options_of
from support.on_device import on_gpu
from support.rank_pool import RankPool

import tagi_ddp
from tagi_ddp import DDPSequential, NotFiniteError
from tagi_ddp.communicators.single import SingleCommunicator

CATEGORIES, SAMPLES = 6, 13  # of the embedding; of the series: 3 for each event, and the last step


@dataclass(frozen=True)
class Kind:
    """A network with a state beside its parameters."""

    build: Callable[[], list[Any]]
    inputs: int
    sizes: tuple[int, ...] = (1, 3, 4)  # of batches
    categories: bool = False
    smooths: bool = False


def batch_norm() -> list[Any]:
    from pytagi.nn import BatchNorm2d, Conv2d, LayerBlock, Linear, ReLU, ResNetBlock

    block = LayerBlock(Conv2d(3, 3, 3, padding=1), BatchNorm2d(3), ReLU(), Conv2d(3, 3, 1))
    first = Conv2d(1, 3, 3, padding=1, in_width=4, in_height=4)
    return [first, BatchNorm2d(3), ReLU(), ResNetBlock(block), Linear(48, 2)]


def lstm() -> list[Any]:
    from pytagi.nn import LSTM, Linear

    return [LSTM(3, 5, seq_len=1), LSTM(5, 4, seq_len=1), Linear(4, 2)]


def sequences() -> list[Any]:
    from pytagi.nn import LSTM, Linear

    return [LSTM(3, 4, seq_len=2, **last_step()), Linear(after_series(4, 2), 2)]


def slstm() -> list[Any]:
    from pytagi.nn import SLSTM, SLinear

    return [SLSTM(3, 4, seq_len=1), SLSTM(4, 5, seq_len=1), SLinear(5, 1)]


def embedding() -> list[Any]:
    from pytagi.nn import LSTM, Embedding, Linear, ReLU

    return [
        Embedding(CATEGORIES, 2, 3),
        *after_words(2, 3),
        ReLU(),
        LSTM(after_series(2, 3), 4, seq_len=1),
        Linear(4, 2),
    ]


KINDS = {
    "batch norm": Kind(batch_norm, 16, sizes=(3, 4, 8)),
    "lstm": Kind(lstm, 3),
    "sequences": Kind(sequences, 6),
    "slstm": Kind(slstm, 3, sizes=(1,), smooths=True),
    "embedding": Kind(embedding, 3, categories=True),
}
COMPUTES = {
    "batch norm": ["engine", "torch", "cpu:0"],
    "lstm": ["engine", "native", "torch", "auto", "cpu:0"],
    "sequences": ["engine", "native", "torch", "auto", "cpu:0"],
    "slstm": ["engine", "native", "auto"],
    "embedding": ["engine", "native", "torch", "auto", "cpu:0"],
}
CASES = [(name, compute) for name, computes in COMPUTES.items() for compute in computes]
ON_GPU = [on_gpu(name, "cuda:0") for name, computes in COMPUTES.items() if "cpu:0" in computes]

GOOD = ("learn", "by hand", "micro-batches", "evaluate", "forward only", "reset", "set states")
BAD = ("infinite observation", "NaN input", "large input", "wrong observations", "wrong input")


class Program:
    """One network's part: the same ``seed`` gives the same network and the same events."""

    def __init__(self, name: str, compute: str, comm: Any, **options: Any) -> None:
        import pytagi
        import pytagi.nn as nn

        self.kind, self._comm = KINDS[name], comm
        pytagi.manual_seed(3)
        net = nn.Sequential(*self.kind.build())
        if self.kind.categories:  # the engine draws an embedding's means regardless of its seed
            means = np.random.default_rng(5).normal(size=CATEGORIES * 2)
            net._cpp_backend.layers[0].mu_w = means.tolist()
        if self.kind.smooths:
            net.num_samples = SAMPLES
        self.model = DDPSequential(net, communicator=comm, **options, **options_of(compute))
        self.outputs = 1 if self.kind.smooths else 2
        self.later = self.model._local.replica.device != "cpu"  # refused steps are told later
        self.merges = options.get("reduction") == "precision"

    def data(self, rng: np.random.Generator) -> tuple[Any, Any, Any]:
        """Return inputs, as an array or a tensor, observations and the noise's variance."""
        size = int(rng.choice(self.kind.sizes))
        if self.kind.categories:
            x = rng.integers(0, CATEGORIES, (size, self.kind.inputs)).astype(np.float32)
        else:
            x = rng.normal(size=(size, self.kind.inputs)).astype(np.float32)
        y = rng.normal(size=(size, self.outputs)).astype(np.float32)
        return x, y, 0.25

    def run(self, event: str, seed: int, spare: bool = False) -> bool:
        """Run an event; return whether it was refused. ``spare``: the guilty rank gets no data."""
        model, rng = self.model, np.random.default_rng([seed, self._comm.rank])
        x, y, noise = self.data(rng)
        if rng.random() < 0.3 and model.compute.name != "engine":
            import torch

            if model._local.computes.takes_tensors:
                x = torch.from_numpy(x) if not self.kind.smooths else x
        if event == "learn":
            model.learn(x, y, noise)
        elif event == "by hand":
            self.step_by_hand(x, y, noise)
        elif event == "micro-batches":
            with model.no_sync():
                for _ in range(2):
                    self.backward(*self.data(rng))
            self.step_by_hand(x, y, noise)
        elif event == "evaluate":
            model.eval()
            model(x)
            model.train()
        elif event == "forward only":
            model(x)
        elif event == "reset":
            model.reset_lstm_states()
        elif event == "set states":
            states = model.get_lstm_states()
            model.set_lstm_states(
                {
                    i: tuple(np.abs(np.array(part)) + 0.1 for part in parts)
                    for i, parts in states.items()
                }
            )
        else:
            return self.fail(event, x, y, noise, rng, spare)
        return False

    def fail(
        self, event: str, x: Any, y: Any, noise: float, rng: np.random.Generator, spare: bool
    ) -> bool:
        """Do what is to be refused."""
        model, guilty = self.model, self._comm.rank == self._comm.size - 1
        if guilty and spare:
            model.learn(x[:0], y[:0], noise)
            return False
        if event == "wrong observations":
            with pytest.raises(ValueError, match="elements"):
                model.learn(x, y[:, :0], noise)
            return True
        if event == "wrong input":
            with pytest.raises(ValueError, match=r"elements|index|shape"):
                model.learn(np.full((2, self.kind.inputs - 1), 1e6, np.float32), y, noise)
            return True
        if guilty:
            if event == "infinite observation" or self.kind.categories:
                y[0, 0] = np.inf
            else:
                x[0, 0] = np.nan if event == "NaN input" else 1e38
        try:
            if rng.random() < 0.3:
                with model.no_sync():
                    self.backward(*self.data(rng))
                self.step_by_hand(x, y, noise)
            else:
                model.learn(x, y, noise)
            if self.later:
                model.check_replicas()
        except NotFiniteError:
            return True
        return False

    def backward(self, x: Any, y: Any, noise: float) -> None:
        self.model(x)
        tagi_ddp.OutputUpdater(self.model).update(y, np.full_like(y, noise))
        self.model.backward()

    def step_by_hand(self, x: Any, y: Any, noise: float) -> None:
        self.backward(x, y, noise)
        self.model.step()


def difference(a: Any, b: Any, bits: bool = True, path: str = "") -> str:
    """Return where two run states differ, or ""; unless ``bits``, by more than roundings."""
    if isinstance(a, dict):
        keys = a.keys() | b.keys()
        found = (difference(a.get(k), b.get(k), bits, f"{path}.{k}") for k in sorted(keys, key=str))
        return next(filter(None, found), "")
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return path
        found = (
            difference(x, y, bits, f"{path}[{i}]")
            for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
        return next(filter(None, found), "")
    if isinstance(a, np.ndarray):
        if not bits and a.shape == b.shape and a.dtype.kind == "f":
            return "" if np.allclose(a, b, 1e-3, 1e-4, equal_nan=True) else f"{path}: {a} and {b}"
        return "" if np.array_equal(a, b, equal_nan=True) else f"{path}: {a} and {b}"
    return "" if a == b else f"{path}: {a} and {b}"


def go_through(
    comm: Any, name: str, compute: str, events: list[tuple[str, int]], options: dict[str, Any]
) -> str:
    """Return what differs after ``events``, or ""."""
    found, bits = "", compute != "cuda:0"  # which adds up in another order in each run
    tested, control = (Program(name, compute, comm, **options) for _ in range(2))
    for number, (event, seed) in enumerate(events):
        for program in (tested, control):
            if event in GOOD:
                program.run(event, seed)
        if event in BAD:
            refused = tested.run(event, seed)
            if not refused:
                assert event == "large input", f"{event} was not refused"
                control.run(event, seed)
            elif tested.merges:  # of which the other ranks' parts stand
                control.run(event, seed, spare=True)
        states = [program.model.run_state() for program in (tested, control)]
        if event != "forward only" and not found and (differs := difference(*states, bits)):
            found = f"event {number}, {event}: {differs}"  # the other ranks go on
    ends = []
    for program in (tested, control):
        program.run("learn", 1)
        end = [np.concatenate([np.array(part) for part in program.model.get_outputs()])]
        if KINDS[name].smooths:
            end += map(np.array, program.model.smoother())
        program.model.eval()
        x, _, _ = program.data(np.random.default_rng(2))
        ends.append([*end, *map(np.array, program.model(x))])
    return found or difference(*ends, bits)


def programs(most: int, bad: tuple[str, ...] = BAD) -> Any:
    event = st.tuples(st.sampled_from(GOOD + bad + bad), st.integers(0, 2**31))
    return st.lists(event, max_size=most)


@pytest.mark.parametrize(("name", "compute"), [*CASES, *ON_GPU])
@settings(max_examples=15)
@given(events=programs(SAMPLES // 3))
def test_one_process(name: str, compute: str, events: list[tuple[str, int]]) -> None:
    assert not go_through(SingleCommunicator(), name, compute, events, {"average": False})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compute"), CASES)
@settings(max_examples=100)
@given(events=programs(SAMPLES // 3))
def test_one_process_at_length(name: str, compute: str, events: list[tuple[str, int]]) -> None:
    assert not go_through(SingleCommunicator(), name, compute, events, {"average": False})


def draw(seed: int, bad: tuple[str, ...]) -> list[tuple[str, int]]:
    rng = np.random.default_rng(seed)
    return [(str(rng.choice(GOOD + bad)), int(rng.integers(2**31))) for _ in range(SAMPLES // 3)]


WAYS: dict[str, dict[str, Any]] = {
    "sum": {"average": False},
    "precision": {"reduction": "precision"},
    "mean": {"average": True},
    "sharded": {"average": False, "sharded": True},
}
TWO_RANKS = [
    (name, compute, way)
    for name, compute in CASES
    for way in WAYS
    if compute != "cpu:0" and (way in ("sum", "precision") or compute in ("auto", "torch"))
]


@pytest.mark.parametrize(("name", "compute", "way"), TWO_RANKS)
def test_two_ranks(shm: RankPool, name: str, compute: str, way: str) -> None:
    events = [*draw(TWO_RANKS.index((name, compute, way)), BAD[:3]), (BAD[0], 1)]
    assert shm.run(go_through, name, compute, events, WAYS[way], size=2) == ["", ""]

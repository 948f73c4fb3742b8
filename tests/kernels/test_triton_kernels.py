"""Kernels for GPUs, by Triton's interpreter on the CPU: what torch's operators compute."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import NETWORKS, distance, fresh, parameters
from support.rank_pool import Nursery, RankPool
from torch import Tensor

from tagi_ddp import accelerate, kernels
from tagi_ddp._backend import LEAST_VARIANCE
from tagi_ddp.compute import innovation
from tagi_ddp.compute.states import Dense, States
from tagi_ddp.replica.device_parameters import move

SIZES = st.integers(1, 70)
close = torch.testing.assert_close


@pytest.fixture(scope="module")
def interpreter() -> Iterator[RankPool]:
    """A process in which Triton interprets; it must know that before it is imported."""
    pytest.importorskip("triton", minversion="3.9")  # older ones do not know numpy 2.4
    nursery = Nursery({"TRITON_INTERPRET": "1"})
    pool = RankPool("shm", 1, nursery)
    yield pool
    pool.close()
    nursery.close()


def interpreted() -> ModuleType:
    from tagi_ddp.kernels import triton_kernels

    triton_kernels._SHARE = 16  # so that shares are added up
    return triton_kernels


def layer(samples: int, inputs: int, outputs: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "mean": (samples, inputs),
        "w_mu": (outputs, inputs),
        "b_mu": (outputs,),
        "moved": (samples, outputs),
        "shrunk": (samples, outputs),
    }
    variances = {"variance": (samples, inputs), "w_var": (outputs, inputs), "b_var": (outputs,)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return tensors | {name: torch.rand(s, generator=random) + 0.01 for name, s in variances.items()}


@settings(max_examples=12, deadline=None)
@given(case=st.tuples(SIZES, SIZES, SIZES, *[st.booleans()] * 3, st.integers(0, 99)))
def test_forward(interpreter: RankPool, case: tuple[Any, ...]) -> None:
    interpreter.run(check_forward, *case)


def check_forward(
    comm: Any,
    samples: int,
    inputs: int,
    outputs: int,
    exact: bool,
    biases: bool,
    rectify: bool,
    seed: int,
) -> None:
    t = layer(samples, inputs, outputs, seed)
    mean = t["mean"] @ t["w_mu"].t()
    variance = (t["mean"] ** 2) @ t["w_var"].t()
    if not exact:
        variance += t["variance"] @ (t["w_mu"] ** 2 + t["w_var"]).t()
    if biases:
        mean, variance = mean + t["b_mu"], variance + t["b_var"]
    given_biases = (t["b_mu"], t["b_var"]) if biases else None
    spread = None if exact else t["variance"]
    weights = t["w_mu"], t["w_var"]
    found = interpreted().forward(t["mean"], spread, weights, given_biases, rectify, False)
    if rectify:
        variance, mean = torch.where(found[0] > 0, variance, 0), mean.relu()
    for ours, theirs in zip(found, (mean, variance), strict=True):
        close(ours, theirs, rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(case=st.tuples(SIZES, SIZES, SIZES, st.booleans(), st.integers(0, 99)))
def test_deltas(interpreter: RankPool, case: tuple[Any, ...]) -> None:
    interpreter.run(check_deltas, *case)


def check_deltas(
    comm: Any, samples: int, inputs: int, outputs: int, biases: bool, seed: int
) -> None:
    t = layer(samples, inputs, outputs, seed)
    w_delta = torch.empty(outputs, inputs), torch.empty(outputs, inputs)
    b_delta = torch.empty(outputs), torch.empty(outputs)
    b_var, into = (t["b_var"], b_delta) if biases else (None, None)
    innovations = t["moved"], t["shrunk"]
    interpreted().write_deltas(innovations, t["mean"], t["w_var"], w_delta, b_var, into, False)
    sums = t["moved"].t() @ t["mean"], t["shrunk"].t() @ t["mean"] ** 2
    close(w_delta[0], sums[0] * t["w_var"], rtol=1e-4, atol=1e-4)
    close(w_delta[1], sums[1] * t["w_var"] ** 2, rtol=1e-4, atol=1e-4)
    if biases:
        close(b_delta[0], t["moved"].sum(0) * t["b_var"], rtol=1e-4, atol=1e-4)
        close(b_delta[1], t["shrunk"].sum(0) * t["b_var"] ** 2, rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(case=st.tuples(SIZES, SIZES, SIZES, st.booleans(), st.integers(0, 99)))
def test_below(interpreter: RankPool, case: tuple[Any, ...]) -> None:
    interpreter.run(check_below, *case)


def check_below(
    comm: Any, samples: int, inputs: int, outputs: int, rectified: bool, seed: int
) -> None:
    t = layer(samples, inputs, outputs, seed)
    output = t["mean"] if rectified else None
    found = interpreted().below((t["moved"], t["shrunk"]), t["w_mu"], output, False)
    factor = (t["mean"] > 0).float() if rectified else 1.0
    close(found[0], (t["moved"] @ t["w_mu"]) * factor, rtol=1e-4, atol=1e-4)
    close(found[1], (t["shrunk"] @ t["w_mu"] ** 2) * factor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_innovation(interpreter: RankPool, exact: bool, linear: bool) -> None:
    """Zero where nothing was observed, or the gain is not finite."""
    interpreter.run(check_innovation, exact, linear)


def check_innovation(comm: Any, exact: bool, linear: bool) -> None:
    t = layer(30, 50, 1, 0)
    t["mean"][0, 0], observed = 5, t["mean"] + 1
    observed[1, 1] = torch.nan
    noise = t["variance"].clone()
    noise[2, 2] = 0
    slope = torch.rand(30, 50)
    spread = None if exact else t["variance"].index_fill(0, torch.tensor(2), 0)
    jacobian = None if linear else Dense(slope)
    expected = innovation.innovation(States(t["mean"], spread, jacobian), observed, noise)
    given_slope = None if linear else slope
    found = interpreted().innovation(t["mean"], spread, given_slope, observed, noise)
    assert found[0][1, 1] == found[1][2, 2] == 0
    close(found[0], expected.mean)
    close(found[1], expected.variance)


@pytest.mark.parametrize("refused", [None, False, True])
@pytest.mark.parametrize("cap", [0.1, torch.tensor(3.0)], ids=["number", "tensor"])
def test_move(interpreter: RankPool, cap: float | Tensor, refused: bool | None) -> None:
    interpreter.run(check_move, cap, refused)


def check_move(comm: Any, cap: float | Tensor, refused: bool | None) -> None:
    random = torch.Generator().manual_seed(0)
    gaussians = torch.rand(2, 3000, generator=random)
    deltas = torch.randn(2, 3000, generator=random)
    deltas[0, 7] = torch.nan
    expected, negative = gaussians.clone(), torch.empty(3000, dtype=torch.bool)
    stays = None if refused is None else torch.tensor(refused)
    move(expected, deltas, negative, cap, stays)
    found = torch.empty_like(negative)
    interpreted().move(gaussians, deltas, found, cap, stays, LEAST_VARIANCE)
    assert torch.equal(found, negative)
    assert refused or negative.any()
    close(gaussians, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["mlp", "batch_norm", "layer_norm"])
def test_networks(interpreter: RankPool, name: str) -> None:
    """Check networks whose Linear layers stand alone, before a ReLU, and after other layers."""
    interpreter.run(check_network, name)


def check_network(comm: Any, name: str) -> None:
    used: set[str] = set()
    on_cpu = interpreted()

    class Kernels:
        def __getattr__(self, kernel: str) -> Any:
            used.add(kernel)
            return getattr(on_cpu, kernel)

    plain, ours = (accelerate(fresh(name), "torch", "cpu:0") for _ in range(2))
    for step in range(2):
        for model in (plain, ours):
            with pytest.MonkeyPatch.context() as patch:
                if model is ours:
                    patch.setattr(kernels, "find", lambda tensor: Kernels())
                model.learn(*map(torch.from_numpy, NETWORKS[name].batch(step, 9)), 0.25)
    assert used >= {"forward", "write_deltas", "innovation", "move"}
    assert distance(parameters(ours), parameters(plain)) < 1e-5


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, that says why, and torch's operators instead."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "tagi_ddp.kernels.triton_kernels", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu = kernels._on_gpu.__wrapped__
    with pytest.warns(RuntimeWarning, match="take longer, as Triton does not work here: .*triton"):
        assert on_gpu(torch.device("cuda:1")) is None
    assert kernels.find(torch.zeros(3)) is None

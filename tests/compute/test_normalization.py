"""BatchNorm2d and LayerNorm, on images and on vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.oracle import Both, compare
from tagi_ddp.compute.states import Deltas


def tolerance(features: int) -> float:
    """Return what sums of numbers of both signs allow: few of them may all be nearly zero."""
    return 3e-5 if features >= 4 else 1e-3


def with_parameters(layer: Any, seed: int) -> Any:
    """Return the layer with random parameters, as its own weights are all 1."""
    rng = np.random.default_rng(seed)
    handle = layer._cpp_backend
    count = len(handle.mu_w)
    handle.mu_w = rng.normal(1, 0.5, count).tolist()
    handle.var_w = rng.uniform(0.1, 1, count).tolist()
    if handle.mu_b:
        handle.mu_b = rng.normal(0, 1, count).tolist()
        handle.var_b = rng.uniform(0.1, 1, count).tolist()
    return layer


@settings(deadline=None)
@given(
    features=st.integers(1, 20),
    batch=st.integers(1, 12),
    bias=st.booleans(),
    exact=st.booleans(),
    before=st.booleans(),
    epsilon=st.sampled_from([1e-5, 1e-3, 0.5]),
    kind=st.sampled_from(["BatchNorm2d", "LayerNorm"]),
    seed=st.integers(0, 2**31 - 1),
)
def test_vectors(
    features: int,
    batch: int,
    bias: bool,
    exact: bool,
    before: bool,
    epsilon: float,
    kind: str,
    seed: int,
) -> None:
    def layers() -> list[Any]:
        import pytagi
        import pytagi.nn as nn

        pytagi.manual_seed(seed)
        shape = features if kind == "BatchNorm2d" else [features]
        return [
            nn.Linear(6, features),
            *([nn.ReLU()] if before else []),
            with_parameters(getattr(nn, kind)(shape, eps=epsilon, bias=bias), seed),
            nn.ReLU(),
            nn.Linear(features, 3),
        ]

    # A sample of one number has the variance of that number, divided by 0; that of an exact 0,
    # which ReLU makes, is not a number.
    single = batch == 1 if kind == "BatchNorm2d" else features == 1
    if not (single and before):
        compare(layers, 6, batch, seed, exact, tolerance(features))


@settings(deadline=None)
@given(
    channels=st.integers(1, 8),
    size=st.integers(1, 6),
    batch=st.integers(2, 6),
    bias=st.booleans(),
    exact=st.booleans(),
    last=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_images(
    channels: int, size: int, batch: int, bias: bool, exact: bool, last: bool, seed: int
) -> None:
    def layers() -> list[Any]:
        import pytagi
        import pytagi.nn as nn

        pytagi.manual_seed(seed)
        first = nn.Conv2d(2, channels, 1, in_width=size, in_height=size)
        return [
            first,
            with_parameters(nn.BatchNorm2d(channels, bias=bias), seed),
            nn.ReLU(),
            with_parameters(nn.LayerNorm([channels, size, size], bias=bias), seed + 1),
            *([] if last else [nn.ReLU(), nn.Linear(channels * size * size, 3)]),
        ]

    # LayerNorm of one number, see above
    if channels * size * size > 1:
        compare(layers, 2 * size * size, batch, seed, exact, tolerance(channels))


@pytest.mark.parametrize("exact", [False, True])
def test_digits(exact: bool) -> None:
    """Compare layers that sum many numbers with the engine, at the default tolerance."""

    def layers() -> list[Any]:
        import pytagi
        import pytagi.nn as nn

        pytagi.manual_seed(1)
        first = nn.Conv2d(3, 16, 3, padding=1, in_width=8, in_height=8)
        batch = with_parameters(nn.BatchNorm2d(16), 1)
        layer = with_parameters(nn.LayerNorm([16, 8, 8]), 2)
        return [first, batch, nn.ReLU(), layer, nn.ReLU(), nn.Linear(1024, 10)]

    compare(layers, 192, 8, exact=exact)


@pytest.mark.parametrize("exact", [False, True])
def test_first_layer(exact: bool) -> None:
    """Only a LayerNorm tells the engine the size of the network's inputs."""

    def layers() -> list[Any]:
        import pytagi.nn as nn

        norm = nn.LayerNorm([3, 4, 2])
        return [with_parameters(norm, 0), with_parameters(nn.BatchNorm2d(3), 1), nn.ReLU()]

    compare(layers, 24, 5, exact=exact)


# A BatchNorm2d of vectors in a network that begins with images is not compared: there the engine's
# backward takes the vectors for images, and reads beyond its memory.


def network(momentum: float, seed: int) -> Both:
    import pytagi.nn as nn

    norms = [nn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm2d(7, momentum=momentum)]
    images = Both(
        nn.Conv2d(2, 3, 3, in_width=4, in_height=4), with_parameters(norms[0], seed), nn.ReLU()
    )
    vectors = Both(nn.Linear(32, 7), with_parameters(norms[1], seed), nn.ReLU())
    return images if seed % 2 else vectors


def state(both: Both) -> list[np.ndarray]:
    return [array.copy() for _, array in both.replica.state()]


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(2, 9)), min_size=1, max_size=5),
    momentum=st.sampled_from([0.9, 0.25]),
    seed=st.integers(0, 2**31 - 1),
)
def test_running_averages(steps: list[tuple[bool, int]], momentum: float, seed: int) -> None:
    """Forwards in training and in evaluation, in any order, leave what the engine leaves."""
    rng = np.random.default_rng(seed)
    both = network(momentum, seed)
    before = state(both)
    batches = [
        (training, rng.normal(1, 2, (batch, 32)).astype(np.float32)) for training, batch in steps
    ]
    ours = []
    for training, mean in batches:
        states = both.network.forward(torch.from_numpy(mean), None, training)
        ours.append((states.mean.numpy().ravel(), states.variance.numpy().ravel()))
    left = state(both)
    # The engine writes beyond its memory when the batch grows, or when its very first forward is in
    # evaluation and the batch changes.
    both.model.forward(np.zeros(9 * 32, np.float32))
    for (_, array), values in zip(both.replica.state(), before, strict=True):
        array[...] = values
    for (training, mean), (our_mean, our_variance) in zip(batches, ours, strict=True):
        both.model.train() if training else both.model.eval()
        their_mean, their_variance = both.model.forward(mean.ravel())
        np.testing.assert_allclose(our_mean, their_mean, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(our_variance, their_variance, rtol=1e-4, atol=1e-4)
    for our_array, their_array in zip(left, state(both), strict=True):
        np.testing.assert_allclose(our_array, their_array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_loaded_statistics(seed: int, tmp_path: Path) -> None:
    """A file's statistics and parameters are what evaluation uses."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(1, 2, (6, 32)).astype(np.float32)
    trained, fresh = network(0.9, seed), network(0.9, seed)
    trained.network.forward(torch.from_numpy(mean), None, training=True)
    trained.model.save(str(tmp_path / "model"))
    fresh.model.load(str(tmp_path / "model"))
    fresh.model.load_state_dict(trained.model.state_dict())
    fresh.replica.pull()
    fresh.network.bind()
    outputs = fresh.network.forward(torch.from_numpy(mean), None, training=False)
    trained.model.eval()
    theirs, _ = trained.model.forward(mean.ravel())
    np.testing.assert_allclose(outputs.mean.numpy().ravel(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_innovation_of_the_inputs(seed: int) -> None:
    """Check that the innovation of the network's inputs, too, equals the engine's."""
    import pytagi.nn as nn

    both = Both(with_parameters(nn.LayerNorm([2, 4, 4] if seed else [32]), seed), nn.ReLU())
    both.model.input_state_update = True
    rng = np.random.default_rng(seed)
    mean, variance = rng.uniform(0.1, 1, (2, 3, 32)).astype(np.float32)
    innovation = rng.normal(0, 1, (2, 96)).astype(np.float32)
    both.engine(mean, variance, innovation)
    theirs = both.model.get_input_states()
    states = both.network.forward(torch.from_numpy(mean), torch.from_numpy(variance), True)
    deltas = [torch.from_numpy(part.copy()).view_as(states.mean) for part in innovation]
    ours = both.network.backward(Deltas(*deltas), to_input=True)
    np.testing.assert_allclose(ours.mean.numpy().ravel(), theirs[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.variance.numpy().ravel(), theirs[1], rtol=1e-5, atol=1e-6)

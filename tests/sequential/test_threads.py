"""Networks in several threads: one network for all of them, and one for each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, fresh, options_of
from support.on_device import on_gpu
from support.threads import THREADS, in_threads

from tagi_ddp import accelerate

KINDS = ["mlp", "cnn", "batch_norm", "lstm", "embedding", "layer_norm"]
Answer = tuple[np.ndarray, ...]


def computes(kind: str) -> list[str]:
    """Return who can compute a network."""
    natively = [] if kind in ("cnn", "batch_norm") else ["native"]
    return ["engine", "torch", *natively, "auto", "cpu:0"]  # the last: a replica on a device


def wrapped(kind: str, compute: str) -> Any:
    model = accelerate(fresh(kind), **options_of(compute))
    model.set_threads(2)
    return model


def assert_same(got: Any, wanted: Any, compute: str) -> None:
    """Compare bit by bit; on a GPU closely, as it adds up in another order in each run."""
    for a, b in zip(got, wanted, strict=True):
        if compute == "cuda:0":
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        else:
            np.testing.assert_array_equal(a, b)


CASES = [(kind, compute) for kind in KINDS for compute in computes(kind)]
ON_GPU = [on_gpu(kind, "cuda:0") for kind in KINDS]
# What an LSTM predicts depends on the batch before.
STATELESS = [(kind, compute) for kind, compute in CASES if kind != "lstm"]
ON_GPU_STATELESS = [on_gpu(kind, "cuda:0") for kind in KINDS if kind != "lstm"]


@pytest.mark.parametrize(("kind", "compute"), [*STATELESS, *ON_GPU_STATELESS])
def test_one_network_predicts_in_several_threads(kind: str, compute: str) -> None:
    model, data = wrapped(kind, compute), NETWORKS[kind]
    model.learn(*data.batch(0, 16), 0.3)
    model.eval()
    sizes = np.random.default_rng(KINDS.index(kind)).integers(1, 200, 40)
    batches = [data.batch(seed, int(size))[0] for seed, size in enumerate(sizes)]
    wanted = [model(x) for x in batches]
    got = in_threads([lambda x=x: model(x) for x in batches])
    for answer, right in zip(got, wanted, strict=True):
        assert_same(answer, right, compute)


@pytest.mark.parametrize(("kind", "compute"), [*CASES, *ON_GPU])
def test_each_thread_trains_a_network_of_its_own(kind: str, compute: str) -> None:
    data = NETWORKS[kind]

    def train(model: Any, seed: int) -> Answer:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(2, 24, 6) if kind != "lstm" else [8] * 6
        outputs = [model.learn(*data.batch(seed + k, int(n)), 0.5) for k, n in enumerate(sizes)]
        return (*outputs[-1], *(p for parts in model.state_dict().values() for p in parts))

    models = [wrapped(kind, compute) for _ in range(THREADS)]
    got = in_threads([lambda m=m, s=s: train(m, s) for s, m in enumerate(models)])
    for seed, answer in enumerate(got):
        assert_same(answer, train(wrapped(kind, compute), seed), compute)


@pytest.mark.parametrize("compute", ["engine", "native", "torch", "cpu:0"])
def test_a_step_of_learn_is_whole(compute: str) -> None:
    """Steps of several threads are those of one thread in some order: here they are all alike."""
    data = NETWORKS["mlp"]
    batch = data.batch(0, 32)
    alone, shared = wrapped("mlp", compute), wrapped("mlp", compute)
    wanted = [alone.learn(*batch, 0.5) for _ in range(24)]
    got = in_threads([lambda: shared.learn(*batch, 0.5)] * 24)
    assert alone.check_replicas() == shared.check_replicas()
    order = [np.asarray(mean).tobytes() for mean, _ in wanted]
    assert sorted(np.asarray(mean).tobytes() for mean, _ in got) == sorted(order)


def test_no_mixture_of_calls_does_harm() -> None:
    """Whatever threads call at once on one network, none crashes it, and it learns on."""
    model, data = wrapped("mlp", "auto"), NETWORKS["mlp"]
    model.learn(*data.batch(0, 8), 0.5)

    def call(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            x, y = data.batch(seed, int(rng.integers(1, 300)))
            calls: list[Callable[[], Any]] = [
                lambda x=x: model(x),
                lambda x=x, y=y: model.learn(x, y, 0.5),
                model.get_outputs,
                model.state_dict,
                model.train,
                model.eval,
                model.check_replicas,
                lambda: model.output_z_buffer.mu_a,
                lambda: model.load_state_dict(model.state_dict()),
            ]
            try:
                calls[rng.integers(len(calls))]()
            except RuntimeError as error:  # backward() of learn() after another thread's eval()
                assert "train()" in str(error)  # noqa: PT017

    in_threads([lambda s=s: call(s) for s in range(THREADS)])
    model.train()
    mean, variance = model.learn(*data.batch(1, 8), 0.5)
    assert np.isfinite(mean).all()
    assert (variance > 0).all()


SCRIPT = """
import sys, threading, time
import numpy as np
from pytagi.nn import Linear, ReLU, Sequential
from tagi_ddp import accelerate
from tagi_ddp.sklearn import TAGIRegressor

x, y = np.ones((512, 64), np.float32), np.ones((512, 2), np.float32)
model = accelerate(Sequential(Linear(64, 256), ReLU(), Linear(256, 2)), "{compute}")
estimator = TAGIRegressor((256,), max_iter=1_000_000, early_stopping=False)

def learn():
    while True:
        model.learn(x, y, 1.0)

def fit():
    estimator.fit(x + np.random.normal(size=x.shape), np.random.normal(size=512))

threading.Thread(target={what}, daemon=True).start()
time.sleep(0.5)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("what", "compute"),
    [("learn", "engine"), ("learn", "native"), ("learn", "torch"), ("fit", "auto")],
)
def test_a_daemon_thread_that_trains_does_not_abort_the_process(what: str, compute: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(what=what, compute=compute)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(10))
def test_threads_at_length(turn: int) -> None:
    for kind, compute in CASES:
        if kind != "lstm":
            test_one_network_predicts_in_several_threads(kind, compute)
        test_each_thread_trains_a_network_of_its_own(kind, compute)
    test_no_mixture_of_calls_does_harm()

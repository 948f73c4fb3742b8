"""Networks in a fork of a process that has computed: multiprocessing's way on Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, of which all is ended when a fork gives no answer.
SCRIPT = """
import multiprocessing, sys, threading
kind, compute, tests = sys.argv[1:]
sys.path.insert(0, tests)
import numpy as np
from tagi_ddp import accelerate
from support.networks import NETWORKS, fresh

data = NETWORKS[kind]
x, y = (np.tile(part, (200, 1)) for part in data.batch(0, 16))

def model():
    made = accelerate(fresh(kind), compute)
    made.set_threads(2)
    return made

def train(seed):
    made = model()
    for _ in range(3):
        mean, variance = made.learn(x, y, 0.5)
    return np.array([mean, variance])

def predict(seed):
    return np.array(trained(x))

def go_on(seed):
    trained.train()
    trained.learn(x, y, 0.5)
    return np.array(trained.get_outputs())

def in_thread(seed):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(seed)))
    thread.start()
    thread.join(60)
    return found[0]

def in_fork(call):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map_async(call, [0]).get(60)[0]

trained = model()
trained.learn(x, y, 0.5)
trained.eval()
for call in (predict, in_thread, train, go_on):
    got = in_fork(call)
    assert np.allclose(got, call(0), rtol=1e-3, atol=1e-4), call.__name__
print("alike")
"""
TESTS = Path(__file__).parents[1]
CASES = [("mlp", "native"), ("mlp", "auto"), ("cnn", "torch"), ("lstm", "engine")]
MORE = [("mlp", "engine"), ("mlp", "torch"), ("cnn", "engine"), ("lstm", "torch")]


@pytest.mark.parametrize(
    ("kind", "compute"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_fork_computes_as_its_parent(kind: str, compute: str) -> None:
    command = [sys.executable, "-c", SCRIPT, kind, compute, str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "alike\n", done.stderr

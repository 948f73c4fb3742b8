"""Estimators in a fork of a process that has computed: joblib's "multiprocessing"."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own, of which all is ended when a fork gives no answer.
SCRIPT = """
import multiprocessing
import numpy as np
from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor

kind = TAGIRegressor
x = np.random.default_rng(0).normal(size=(600, 20))
targets = {TAGIRegressor: x.sum(axis=1), TAGIClassifier: x.sum(axis=1) > 0}

def fitted(seed):
    settings = {"max_iter": 1, "n_networks": 1, "batch_size": 200, "noise": 1.0}
    return kind((400, 400), random_state=seed, **settings).fit(x, targets[kind])

def answer(model):
    return model.predict(x) if kind is TAGIRegressor else model.predict_proba(x)

def predict(_):
    return answer(model)

def fit(seed):
    return answer(fitted(seed))

def go_on(_):
    return answer(model.partial_fit(x, targets[kind]))

for kind in targets:
    model = fitted(0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for call, given in ((predict, None), (answer, model), (fit, 1), (go_on, None)):
            got = pool.map_async(call, [given]).get(60)[0]
            assert np.allclose(got, call(given), rtol=1e-3, atol=1e-3), call.__name__
print("alike")
"""


@pytest.mark.slow
def test_a_fork_predicts_and_fits_as_its_parent() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "alike\n", done.stderr

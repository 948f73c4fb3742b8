"""partial_fit: samples of any size are learned or refused, and a call that fails was none."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from tagi_ddp.sequential import DDPSequential
from tagi_ddp.sklearn import TAGIClassifier, TAGIRegressor

KINDS = [TAGIRegressor, TAGIClassifier]


def samples(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs of three units and a curve of them, of about 1 in size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    return x, np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=count)


def labelled(kind: type, y: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Return targets of an estimator, and what else its partial_fit takes."""
    return ((y > 0).astype(int), {"classes": [0, 1]}) if kind is TAGIClassifier else (y, {})


@pytest.mark.parametrize(
    ("offset", "scale"),
    [
        (0.0, 1e-3),
        (1000.0, 1e6),
        *(
            pytest.param(*units, marks=pytest.mark.slow)
            for units in [(0.0, 1.0), (0.0, 1e6), (1000.0, 1e-3), (1000.0, 1.0)]
        ),
    ],
)
@pytest.mark.parametrize("chunk", [1, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_any_size_is_learned(
    kind: type, chunk: int, offset: float, scale: float
) -> None:
    x, y = samples(0, 700)
    x = (x + offset) * scale * [1, 1e-3, 1e3]
    y, classes = labelled(kind, y)
    if kind is TAGIRegressor:
        y = (y + offset) * scale
    noises = [None, 0.1 * scale] if chunk > 1 and kind is TAGIRegressor else [None]
    for noise in noises:
        model = kind((50,), noise=noise, random_state=0)
        for _ in range(2):
            for begin in range(0, 500, chunk):
                rows = slice(begin, min(500, begin + chunk))
                model.partial_fit(x[rows], y[rows], **classes)
        fitted = clone(model).set_params(max_iter=2, n_networks=1).fit(x[:500], y[:500])
        assert model.score(x[500:], y[500:]) > fitted.score(x[500:], y[500:]) - 0.05
        if kind is TAGIRegressor:
            _, deviation = model.predict(x[500:], return_std=True)
            assert 0.05 * scale < np.median(deviation) < scale


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_may_be_cut_between_any_batches(kind: type) -> None:
    x, y = samples(1, 120)
    x = 1e4 * x + 1e5
    y, classes = labelled(kind, y)
    whole, cut = (kind(random_state=0, batch_size=4) for _ in range(2))
    whole.partial_fit(x, y, **classes)
    for begin in range(0, 120, 12):
        cut.partial_fit(x[begin : begin + 12], y[begin : begin + 12], **classes)
    np.testing.assert_array_equal(cut.predict(x), whole.predict(x))
    np.testing.assert_allclose(whole.x_mean_, x.mean(axis=0))
    np.testing.assert_allclose(whole.x_scale_, x.std(axis=0))


@pytest.mark.parametrize("factor", [1e3, 1e6, 1e12])
@pytest.mark.parametrize("kind", KINDS)
def test_other_units_than_those_of_fit_are_refused(kind: type, factor: float) -> None:
    x, y = samples(0, 200)
    y, _ = labelled(kind, y)
    model = kind(max_iter=2, random_state=0).fit(x, y)
    before = everything(model)
    with pytest.raises(
        ValueError, match=r"X is .* standard deviations from the samples of fit, in"
    ):
        model.partial_fit(factor * x, y)
    if kind is TAGIRegressor:
        with pytest.raises(ValueError, match=r"y is .* give the units of fit, or fit anew"):
            model.partial_fit(x, factor * y)
    assert everything(model) == before


def test_a_value_that_would_hide_all_others_is_refused() -> None:
    x, y = samples(0, 200)
    model = TAGIRegressor(random_state=0).partial_fit(x, y)
    wrong = x[:20].copy()
    wrong[7, 1] = 1e36
    with pytest.raises(ValueError, match="X has a value in column 1 that is"):
        model.partial_fit(wrong, y[:20])
    with pytest.raises(ValueError, match="cannot be scaled"), np.errstate(over="ignore"):
        TAGIRegressor().fit(np.where(wrong == 1e36, 1e300, wrong), y[:20])


def test_noise_that_can_never_be_learned_is_told() -> None:
    x, y = samples(0, 40)
    model = TAGIRegressor(random_state=0, max_iter=2).fit(x, y)
    before = everything(model)
    far = np.full((1, 3), 90.0) * model.x_scale_
    with pytest.raises(ValueError, match="no batch could be learned"):
        model.partial_fit(far, [0.0])
    assert everything(model) == before


def everything(model: Any) -> dict[str, Any]:
    """Return all that an estimator is, to the bit, but for its lock and its network's memory."""
    state = {k: v for k, v in vars(model).items() if k not in ("_lock", "_models", "_posteriors")}
    if hasattr(model, "_networks"):
        pairs = [pair for posterior in model.posteriors_ for pair in posterior.values()]
        state["parameters"] = [part.tobytes() for pair in pairs for part in pair]
    if (pool := state.get("_pool")) is not None:
        line = pool.line.predict(np.random.default_rng(0).normal(size=(20, 3)))
        state["_pool"] = pool.powers.tobytes(), line.tobytes()
    if isinstance(model.random_state, np.random.RandomState):
        state["random_state"] = model.random_state.get_state()
    state["numpy"] = np.random.get_state()
    return {name: pickle.dumps(value) for name, value in state.items()}


def failing(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Make `learn` raise ``error`` in every call after the first ``after`` ones."""
    left, learn = after, DDPSequential.learn

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return learn(*args, **kwargs)

    monkeypatch.setattr(DDPSequential, "learn", fails)


def spoiled(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    wrong = x.copy()
    wrong[rng.integers(len(x)), rng.integers(3)] = rng.choice([np.nan, 1e36, np.inf])
    return wrong


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 200))]
)
def test_calls_that_fail_were_none(seed: int) -> None:
    """Two estimators learn the same; one of them is also called with what fails."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % 2]
    settings = {"batch_size": int(rng.integers(1, 12)), "max_iter": 2}
    settings["noise"] = [None, 0.4][int(rng.integers(2))]
    settings["early_stopping"] = bool(rng.integers(2))
    settings["n_networks"] = int(rng.integers(1, 4))
    # Whose generator gives the seed of fit: their own, or the one of numpy.
    one, other = (
        kind(**settings, random_state=np.random.RandomState(seed) if seed % 3 else None)
        for _ in range(2)
    )

    def calls(model: Any, which: str, rows: int, wrong: bool) -> None:
        x, y = samples(rows, rows)
        y, classes = labelled(kind, y)
        x = spoiled(np.random.default_rng(rows), x) if wrong else x
        if which == "fit":
            model.fit(x, y)
        else:
            model.partial_fit(x, y, **classes)

    failed = 0
    for _ in range(8):
        which, rows = rng.choice(["fit", "partial_fit", "partial_fit"]), int(rng.integers(20, 60))
        wrong, spoil = bool(rng.integers(2)), bool(rng.integers(2))
        numpys = np.random.get_state()
        if wrong:
            one = pickle.loads(pickle.dumps(one)) if seed % 3 == 0 else one
            before = everything(one)
            with pytest.MonkeyPatch.context() as patch:
                if not spoil:
                    errors = [KeyboardInterrupt(), RuntimeError("full"), MemoryError()]
                    failing(patch, int(rng.integers(4)), errors[rng.integers(3)])
                try:
                    calls(one, which, rows, spoil)
                except (Exception, KeyboardInterrupt):
                    failed += 1
                    assert everything(one) == before
                    wrong = False
        if not wrong:
            spoil = False
            calls(one, which, rows, False)
        np.random.set_state(numpys)
        calls(other, which, rows, wrong and spoil)
        assert everything(one) == everything(other)
    assert failed


MASKED = np.ma.masked_greater(samples(0, 30)[0], 1)
ROWS = np.ma.array(samples(0, 30)[1], mask=np.arange(30) == 3)
CALLS: list[tuple[str, Callable[[Any, Any, Any], Any]]] = [
    ("X has 18 masked values", lambda m, x, y: m.fit(MASKED, y)),
    ("X has 18 masked values", lambda m, x, y: m.partial_fit(MASKED, y)),
    ("X has 18 masked values", lambda m, x, y: m.predict(MASKED)),
    ("X has 18 masked values", lambda m, x, y: m.score(MASKED, y)),
    ("y has 1 masked values", lambda m, x, y: m.fit(x, np.ma.array(y, mask=ROWS.mask))),
    ("y has 1 masked values", lambda m, x, y: m.partial_fit(x, np.ma.array(y, mask=ROWS.mask))),
    ("y has 1 masked values", lambda m, x, y: m.score(x, np.ma.array(y, mask=ROWS.mask))),
    ("sample_weight has 1 masked", lambda m, x, y: m.score(x, y, sample_weight=ROWS)),
]


@pytest.mark.parametrize(("text", "call"), CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_values_are_refused(kind: type, text: str, call: Callable[..., Any]) -> None:
    x, y = samples(0, 30)
    y, _ = labelled(kind, y)
    settings = {"max_iter": 1, "n_networks": 1, "random_state": 0}
    model = kind(**settings).fit(x, y)
    with pytest.raises(ValueError, match=text):
        call(model, x, y)
    unmasked = kind(**settings).fit(np.ma.array(x), np.ma.array(y))
    np.testing.assert_array_equal(unmasked.predict(np.ma.array(x)), model.predict(x))

"""Networks of engines with sequences: an LSTM carries its states from step to step of a sample.

The wheel has no such LSTM. There, one that is asked step by step, without updates, is the oracle of
the outputs; the deltas of the two kernels are compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.networks import last_step

from compute.oracle import Both
from tagi_ddp import accelerate
from tagi_ddp.compute import native, recurrent_lstm
from tagi_ddp.engine import dialect as dialects
from tagi_ddp.engine import shapes
from tagi_ddp.engine.dialect import dialect, learns_from_all_steps, passes_steps_on
from tagi_ddp.engine.shapes import input_rows, sample_shape


@pytest.fixture(params=[False, True], ids=["all steps", "last step"])
def last(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Make the kernels those of engines with sequences; the value is the last LSTM's option."""
    if dialect().sequences:
        pytest.skip("tests/compute/test_lstm.py compares with this engine")
    monkeypatch.setattr(dialects, "_has_sequences", lambda: True)
    dialect.cache_clear()

    def returns_last_step(handle: Any) -> bool:
        return bool(request.param) and int(handle.output_size) == 4  # the second one

    for module in (native, recurrent_lstm, shapes):
        monkeypatch.setattr(module, "returns_last_step", returns_last_step)
    yield request.param
    monkeypatch.undo()
    dialect.cache_clear()


def steps_of(layers: list[Any], inputs: np.ndarray) -> np.ndarray:
    """Return the outputs of all steps of a sample, [2, steps, outputs], by LSTMs of one step."""
    from pytagi.nn import LSTM, Sequential

    single = Sequential(*(LSTM(*sizes, seq_len=1) for sizes in ((3, 5), (5, 4))))
    single._cpp_backend.preinit_layer()
    for layer, other in zip(single._cpp_backend.layers, layers, strict=True):
        for name in ("mu_w", "var_w", "mu_b", "var_b"):
            setattr(layer, name, getattr(other._cpp_backend, name))
    single.eval()
    outputs = []
    for row in inputs:
        single.forward(row)
        states = single.output_z_buffer
        outputs.append((states.mu_a[:4], states.var_a[:4]))
    return np.array(outputs, np.float32).swapaxes(0, 1)


@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (1, 4), (3, 1), (3, 4), (9, 7)])
def test_recurrence(last: bool, batch: int, steps: int) -> None:
    import pytagi
    from pytagi.nn import LSTM

    pytagi.manual_seed(1)
    layers = [LSTM(3, 5, seq_len=steps), LSTM(5, 4, seq_len=steps)]
    both = Both(*layers)
    assert both.native is not None
    assert input_rows(both.model) == steps
    assert sample_shape(both.model) == ((steps, 3) if steps > 1 else (3,))
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(batch, steps * 3)).astype(np.float32)
    rows = 1 if last else steps
    innovation = rng.normal(size=(2, batch * rows * 4)).astype(np.float32)
    ours, natively = both.torch(mean, None, innovation), both.natively(mean, None, innovation)
    ours.assert_close(natively)
    expected = np.stack([steps_of(layers, one.reshape(steps, 3)) for one in mean], 1)
    expected = expected[:, :, -rows:]
    for name, array in zip(("means", "variances"), expected, strict=True):
        np.testing.assert_allclose(
            ours.arrays[f"outputs' {name}"], array.ravel(), rtol=1e-4, atol=1e-6
        )


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of networks by which engines with sequences would use memory of others."""
    from pytagi.nn import LSTM, Embedding, Linear, MixtureTanh, ReLU, Sequential, Softmax

    if not dialect().sequences:
        pytest.skip("in this engine a layer sees all steps of a sample")
    assert not learns_from_all_steps()
    assert passes_steps_on("ReLU")
    assert not passes_steps_on("MixtureTanh")

    def wrap(*layers: Any) -> None:
        accelerate(Sequential(*layers))

    series = LSTM(2, 4, seq_len=3)
    with pytest.raises(ValueError, match="takes 12 inputs, but the one before has 4 outputs"):
        wrap(LSTM(2, 4, seq_len=3, **last_step()), Linear(12, 1))
    with pytest.raises(ValueError, match=r"gets 3 steps of a sample, .*last_timestep=True"):
        wrap(series, Linear(4, 1))
    with pytest.raises(ValueError, match=r"gets 3 steps of a sample"):
        wrap(Embedding(5, 2, 3), Linear(2, 1))
    with pytest.raises(ValueError, match="Softmax writes to memory of others"):
        wrap(Linear(3, 4), Softmax())
    with pytest.raises(ValueError, match="MixtureTanh does not pass on how many steps"):
        wrap(LSTM(2, 4, seq_len=3, **last_step()), MixtureTanh(), Linear(4, 1))
    wrap(LSTM(2, 4, seq_len=3), ReLU(), LSTM(4, 4, seq_len=3, **last_step()), Linear(4, 1))

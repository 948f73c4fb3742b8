"""Arrays of other libraries, by DLPack or numpy's protocol."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.networks import NETWORKS, fresh

from tagi_ddp import accelerate
from tagi_ddp.checks import flat_floats


class Exported:
    """An array that only exports its memory, as those of some libraries do."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = array.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


class Converted(Exported):
    """An array that also converts itself, as JAX's do."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self._array, dtype)


class OnGpu(Exported):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # CUDA


@pytest.mark.parametrize("kind", [Exported, Converted])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_training_is_the_same(kind: type[Exported], dtype: str) -> None:
    x, y = NETWORKS["mlp"].batch(0, 8)
    states = []
    for wrap in (np.asarray, kind):
        with accelerate(fresh("mlp")) as model:
            inputs = wrap(np.round(10 * x).astype(dtype))
            model.learn(inputs, wrap(y.astype("float64")), 0.1)
            model.predict(inputs)
            states.append(model.check_replicas())
    assert states[0] == states[1]


@pytest.mark.parametrize("keep", [True, False])
def test_an_array_on_a_gpu_becomes_torch_s(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.from_dlpack is a stand-in here: it returns a tensor of the host."""
    array = OnGpu(np.ones((2, 3), np.float32))
    monkeypatch.setattr(torch, "from_dlpack", lambda value: torch.from_numpy(value._array))
    flat = flat_floats("mu_x", array, keep)  # type: ignore[arg-type]
    assert isinstance(flat, torch.Tensor if keep else np.ndarray)
    assert flat.tolist() == [1.0] * 6


def test_what_is_no_array_is_named() -> None:
    with pytest.raises(TypeError, match="mu_x must be an array of numbers, got a SimpleNamespace"):
        flat_floats("mu_x", SimpleNamespace(), False)  # type: ignore[arg-type]


def test_jax() -> None:
    jax = pytest.importorskip("jax.numpy")
    x, y = NETWORKS["mlp"].batch(0, 8)
    states = []
    for wrap in (np.asarray, jax.asarray):
        with accelerate(fresh("mlp")) as model:
            model.learn(wrap(x), wrap(y), 0.1)
            states.append(model.check_replicas())
    assert states[0] == states[1]

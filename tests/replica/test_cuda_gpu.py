"""A replica on a GPU in the engine's memory; skipped where there is none.

Nothing here needs the engine's kernels, of which its wheel has none for the newest GPUs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from support.networks import NETWORKS, fresh, parameters

from tagi_ddp import _backend
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.engine.loader import cuda_available
from tagi_ddp.replica.cuda import CudaReplica
from tagi_ddp.replica.cuda_memory import CudaMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


def test_memory_is_shared() -> None:
    tensor = torch.arange(8.0, device="cuda:0")
    memory = CudaMemory(0)
    assert memory.owns(tensor.data_ptr(), 8)
    assert not memory.owns(np.zeros(8, np.float32).ctypes.data, 8)
    memory.tensor_at(tensor.data_ptr() + 8, 3).fill_(9)
    assert tensor.tolist() == [0, 1, 9, 9, 9, 5, 6, 7]


@pytest.mark.parametrize("other_stream", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_step(name: str, other_stream: bool) -> None:
    if not cuda_available():
        pytest.skip("the engine finds no GPU")
    model = fresh(name)
    model._cpp_backend.preinit_layer()
    model.to_device("cuda:0")
    stream = torch.cuda.stream(torch.cuda.Stream()) if other_stream else contextlib.nullcontext()
    with stream:
        replica = CudaReplica(model)
        cpu, expected = _backend.Parameters(), []
        for layer, views in zip(replica.layers, replica._engine.views, strict=True):
            arrays: dict[str, Any] = {"counter": np.zeros(1, np.int32)}
            for key, view in views.items():
                if key.startswith("delta"):
                    view.copy_(torch.randn(view.shape) / 10)
                arrays[key] = view.cpu().numpy()
            blocks = [
                [arrays[kind + part] for kind in ("mu", "var", "delta_mu", "delta_var")]
                for part in ("_w", "_b")
            ]
            cpu.add_layer(layer.name, *blocks, arrays["counter"])
            expected.append(arrays)
        torch.cuda.synchronize()
        replica.pull()
        replica.agree(SingleCommunicator(), _backend.Contribution(7), average=False)
    cpu.apply_own(_backend.cap_factor(7))
    state = parameters(model)  # the engine copies it from the device
    keys = [found.key for found in replica._engine._found]
    for key, arrays in zip(keys, expected, strict=True):
        np.testing.assert_allclose(state[key][0], arrays["mu_w"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state[key][1], arrays["var_w"], rtol=1e-5, atol=1e-6)

"""The devices of the replicas in tests of what computes."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> str:
    """A GPU, or "cpu:0", which stands in for one."""
    import torch

    if request.param == "cuda:0" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return str(request.param)

"""The contract over NCCL, on stand-ins for its library and CUDA's: no GPU is needed or used."""

from __future__ import annotations

from contract.whole import SoloContract, WholeContract


class TestNcclOfOne(SoloContract):
    backend = "nccl"
    sizes = (1,)


class TestNccl(WholeContract):
    backend = "nccl"
    sizes = (2, 4)

"""One network, one process, as fast as it can be."""

from __future__ import annotations

from typing import Any

from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.compute import Choice, Precision
from tagi_ddp.sequential.ddp_sequential import DDPSequential


def accelerate(
    model: Any,
    compute: Choice = "auto",
    device: str = "cpu",
    precision: Precision = "float32",
    cuda_graph: bool = False,
) -> DDPSequential:
    """Return ``model`` with Sequential's own methods, and `learn`; one process, no group.

    It is trained in place, as by the engine and with the same results. The options are those of
    `DDPSequential`.
    """
    return DDPSequential(
        model,
        average=False,
        communicator=SingleCommunicator(),
        compute=compute,
        device=device,
        precision=precision,
        cuda_graph=cuda_graph,
    )

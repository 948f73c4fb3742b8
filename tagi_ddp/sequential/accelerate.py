"""One network, trained by one process as fast as possible."""

from __future__ import annotations

from typing import Any

from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.compute.interface import Choice, Precision
from tagi_ddp.sequential.ddp_sequential import DDPSequential


def accelerate(
    model: Any,
    compute: Choice = "auto",
    device: str = "cpu",
    precision: Precision = "float32",
    cuda_graph: bool = False,
    cap_factor: float | None = None,
) -> DDPSequential:
    """Return ``model`` wrapped for one process, with Sequential's own methods and `learn`.

    It is trained in place, with the results of the engine. The options are those of
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
        cap_factor=cap_factor,
    )

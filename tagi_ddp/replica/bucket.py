"""Memory for the deltas of all parameters, in the flat sequence that a collective takes."""

from __future__ import annotations

import numpy as np

from tagi_ddp._backend import Parameters, ShmCommunicator
from tagi_ddp.communicators import Communicator
from tagi_ddp.engine.buffers import FloatArray


def make_bucket(communicator: Communicator, parameters: Parameters) -> FloatArray:
    """Return memory for all deltas, [means | variances], zeros; the communicator's own if it can.

    There, a reduction needs no staging.
    """
    size = 2 * parameters.size
    if isinstance(communicator, ShmCommunicator):
        bucket = communicator.empty(size)
        bucket.fill(0)
        return bucket
    return np.zeros(size, np.float32)

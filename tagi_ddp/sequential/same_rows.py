"""A warning if all ranks train on the same rows, as they do without a sampler."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import numpy as np

from tagi_ddp.communicators import Communicator, all_gather_object


class SameRows:
    """A comparison of the first batches of all ranks whose deltas are summed.

    Equal rows on R ranks count R times in a sum. In a mean they change nothing, and ranks that
    merge posteriors may learn from the same rows, so neither is compared.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._digest = ""  # of the rows of the last forward pass, "" if it had none

    def look(self, mean: Any) -> None:
        """Record the rows of a forward pass, flat: an array or a tensor."""
        rows = mean if isinstance(mean, np.ndarray) else mean.detach().cpu().float().numpy()
        self._digest = hashlib.blake2b(rows.data, digest_size=8).hexdigest() if rows.size else ""

    def compare(self, stepped: bool) -> None:
        """Warn on rank 0 if two or more ranks have rows, and all the same; a collective call.

        ``stepped``: True if this rank has made a step of the last forward pass.
        """
        own = self._digest if stepped else ""
        found = [each for each in all_gather_object(self._communicator, own) if each]
        if self._communicator.rank == 0 and len(found) > 1 and len(set(found)) == 1:
            warnings.warn(
                f"{len(found)} ranks have trained on the same rows in the first step, and their "
                f"deltas are summed, so each row counts {len(found)} times. Give each rank its "
                "share: for share in DistributedSampler(x).batches(256): "
                "model.learn(x[share], y[share], noise)",
                RuntimeWarning,
                stacklevel=2,
            )

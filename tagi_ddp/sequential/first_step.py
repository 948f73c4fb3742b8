"""The comparison of what all ranks train on, before the first exchange."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import numpy as np

from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.equality import Entry, RanksDiffer, first_difference
from tagi_ddp.data.sampler import last_drawn
from tagi_ddp.trace import script_step
from tagi_ddp.trace.timeline import traced


class FirstStep:
    """A comparison of the ranks' data in the first step that they make together.

    Ranks that share out one order of the same data draw it from the same settings. If not, some
    samples come twice, and others never. And ranks whose deltas are summed have different rows:
    equal rows on R ranks count R times. (In a mean they change nothing, and ranks that merge
    posteriors may learn from the same rows.)
    """

    def __init__(self, communicator: Communicator, sums: bool) -> None:
        """Compare the ranks of ``communicator``; ``sums``: also their rows."""
        self._communicator = communicator
        self._sums = sums
        self._digest = ""  # of the rows of the last forward pass, "" if it had none

    def look(self, mean: Any) -> None:
        """Record the rows of a forward pass, flat: an array or a tensor."""
        if self._sums:
            rows = mean if isinstance(mean, np.ndarray) else mean.detach().cpu().float().numpy()
            digest = hashlib.blake2b(rows.data, digest_size=8).hexdigest()
            self._digest = digest if rows.size else ""

    @traced("waiting")
    def compare(self, steps: bool) -> None:
        """Compare all ranks; a collective call. ``steps``: True if this rank makes a step.

        Raise RanksDiffer, on all ranks, if their samplers share out the same samples in different
        orders. Warn on rank 0 if two or more have rows, and all the same.
        """
        script_step.began = True
        sampler = last_drawn() if steps else None
        if sampler is not None and sampler.num_replicas != self._communicator.size:
            sampler = None  # It does not share out over these ranks.
        own: list[Entry] = [] if sampler is None else sampler.description
        found = all_gather_object(self._communicator, [self._digest if steps else "", own])
        shared = {rank: [*map(tuple, theirs)] for rank, (_, theirs) in enumerate(found) if theirs}
        first = min(shared, default=0)
        for rank, theirs in shared.items():
            names = f"rank {first}", f"rank {rank}"
            if difference := first_difference(shared[first], theirs, names):
                raise RanksDiffer(
                    f"the ranks' samplers differ, first at {difference}. Give DistributedSampler "
                    "the same data and arguments on all ranks; for ranks with data of their own "
                    "num_replicas=1 and rank=0"
                )
        digests = [digest for digest, _ in found if digest]
        if self._communicator.rank == 0 and len(digests) > 1 and len(set(digests)) == 1:
            warnings.warn(
                f"{len(digests)} ranks train on the same rows in the first step, and their deltas "
                f"are summed, so each row counts {len(digests)} times. Give each rank its share: "
                "for share in DistributedSampler(x).batches(256): "
                "model.learn(x[share], y[share], noise)",
                RuntimeWarning,
                stacklevel=2,
            )

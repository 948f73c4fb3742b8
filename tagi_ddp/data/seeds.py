"""Seeds of the generators of Python, numpy, torch and the engine."""

from __future__ import annotations

import importlib.util
import random

import numpy as np

from tagi_ddp.checks import integer
from tagi_ddp.environment import rank_and_size


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, the engine, and torch if it is installed; ``seed`` has 32 bits."""
    from tagi_ddp.engine.loader import load_engine

    random.seed(seed)
    np.random.seed(seed)
    load_engine().manual_seed(seed - (seed >> 31 << 32))  # It takes signed numbers of 32 bits.
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.manual_seed(seed)


def seed_ranks(seed: int, *, rank: int | None = None) -> int:
    """Seed the global generators, as `seed_everything` does, differently on each rank.

    For what ranks draw apart, like augmentations of their own samples: with one seed for all, the
    ranks would draw the same. The seed of a DistributedSampler is another thing, equal on all.

    Args:
        seed: the same on all ranks.
        rank: this process's number; None: that of torch's default group, or the launcher's.

    Returns:
        the seed of this rank, 32 bits.
    """
    own = rank_and_size()[0] if rank is None else integer("rank", rank, 0)
    number = int(np.random.SeedSequence([integer("seed", seed, 0), own]).generate_state(1)[0])
    seed_everything(number)
    return number

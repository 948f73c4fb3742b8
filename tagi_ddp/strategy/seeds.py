"""Random seeds: equal on the ranks that share a model, different between models."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

import numpy as np

from tagi_ddp.checks import integer
from tagi_ddp.communicators.equality import Same, all_or_none
from tagi_ddp.data.seeds import seed_everything
from tagi_ddp.strategy.layout import GroupLayout

__all__ = ["base_seed", "compared_seed", "group_seed", "same_groups", "seed_everything"]

same_groups = partial(
    all_or_none,
    what="the ranks' groups",
    remedy="Give the same numbers and seed on all ranks.",
)

_VARIABLES = ("TAGI_DDP_BASE_SEED", "ANEMOI_BASE_SEED", "SLURM_JOB_ID")
_DEFAULT = 42


def base_seed(base: int | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Return the base of all seeds, the same on all ranks.

    It is ``base``, or the first that is set of TAGI_DDP_BASE_SEED, ANEMOI_BASE_SEED and
    SLURM_JOB_ID, else 42, with a warning. Raises TypeError or ValueError that names a non-integer.
    """
    if base is not None:
        return integer("base", base)
    for name in _VARIABLES:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if re.fullmatch(r"[+-]?\d+", text) is None:
            raise ValueError(f"{name} must be an integer, got {environ[name]!r}")
        return int(text)
    warnings.warn(
        f"no base seed is set, so it is {_DEFAULT}: pass one, or set {_VARIABLES[0]}",
        RuntimeWarning,
        stacklevel=2,
    )
    return _DEFAULT


def compared_seed(same: Same, layout: GroupLayout, seed: int | None) -> int:
    """Compare the ranks' layouts and base seeds; return the base seed."""
    for name, number in asdict(layout).items():
        if name != "rank":
            same(name, number)
    base = base_seed(seed)
    same("seed", base)
    return base


def group_seed(base: int, model_group: int) -> int:
    """Return the seed, 32 bits, of all ranks of a model group."""
    # SeedSequence takes no negative numbers, so their sign is a number of its own.
    entropy = [abs(base), int(base < 0), model_group]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])

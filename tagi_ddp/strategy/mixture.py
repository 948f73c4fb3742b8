"""The prediction of an ensemble: the mixture of its members' Gaussians."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import flat_floats
from tagi_ddp.communicators import Communicator
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.data import gather
from tagi_ddp.engine.buffers import FloatArray


def mixture(
    members: Communicator, mu: npt.ArrayLike, var: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance of the mixture of all members' Gaussians, with equal weights.

    mean = E[mu], variance = E[var] + Var[mu]: the law of total variance, as for ensembles in
    Lakshminarayanan, Pritzel and Blundell 2017 (arXiv:1612.01474), section 2.4.

    A collective call of one rank of each member.

    Args:
        members: those ranks.
        mu: the means that this member predicts, floats of any shape.
        var: their variances.

    Returns:
        both as float32 arrays of that shape, equal bit for bit on all members. An element is NaN
        if a member's prediction of it is.

    Raises:
        TypeError, ValueError: on all members, if on one of them mu or var are no numbers, a
            variance is negative, or shapes differ, between mu and var or between members.
    """
    with all_or_none(members, "predictions", "Give those for the same inputs.") as same:
        shape = np.shape(mu)
        if np.shape(var) != shape:
            raise ValueError(
                f"var has shape {np.shape(var)}, mu {shape}; give one variance for each mean"
            )
        own = np.stack([flat_floats("mu", mu, False), flat_floats("var", var, False)])
        if (own[1] < 0).any():
            raise ValueError(f"var has negative elements, the least is {own[1].min()}")
        same("the shape", shape)
    means, variances = np.moveaxis(gather(members, own[None]).astype(np.float64), 1, 0)
    mean = means.mean(axis=0)
    variance = variances.mean(axis=0) + means.var(axis=0)
    return mean.astype(np.float32).reshape(shape), variance.astype(np.float32).reshape(shape)

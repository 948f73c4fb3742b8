"""The prediction of an ensemble: the mixture of its members' Gaussians."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import flat_floats
from tagi_ddp.communicators import Communicator, all_gather_object
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
    answers = all_gather_object(members, _checked(mu, var))
    for rank, answer in enumerate(answers):
        if "problem" in answer:
            kind = TypeError if answer["is_type_error"] else ValueError
            raise kind(f"member {rank}: {answer['problem']}")
    shapes = [tuple(answer["shape"]) for answer in answers]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"the members' predictions have shapes {shapes}: give those for the same inputs"
        )
    means, variances = (
        np.stack([np.frombuffer(bytes.fromhex(answer[name]), np.float32) for answer in answers])
        for name in ("mu", "var")
    )
    means, variances = means.astype(np.float64), variances.astype(np.float64)
    mean, variance = means.mean(axis=0), variances.mean(axis=0) + means.var(axis=0)
    return _shaped(mean, shapes[0]), _shaped(variance, shapes[0])


def _checked(mu: Any, var: Any) -> dict[str, Any]:
    """Return the shape, means and variances, float32 as hex digits; or the error about them."""
    try:
        shape, other = tuple(np.shape(mu)), tuple(np.shape(var))
        if other != shape:
            raise ValueError(f"var has shape {other}, mu {shape}; give one variance for each mean")
        means, variances = flat_floats("mu", mu, False), flat_floats("var", var, False)
        if (variances < 0).any():
            raise ValueError(f"var has negative elements, the least is {variances.min()}")
    except (TypeError, ValueError) as error:
        return {"problem": str(error), "is_type_error": isinstance(error, TypeError)}
    return {"shape": shape, "mu": means.tobytes().hex(), "var": variances.tobytes().hex()}


def _shaped(values: npt.NDArray[np.float64], shape: tuple[int, ...]) -> FloatArray:
    return values.astype(np.float32).reshape(shape)

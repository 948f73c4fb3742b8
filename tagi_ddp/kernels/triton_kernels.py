"""Kernels of linear layers, of the outputs' innovation, and of the update of parameters.

Tensors are float32 and contiguous. Triton launches on the current device, so it is set to theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Means and variances, or their innovations."""

_BLOCK = 1024  # the elements of a program
# These are the fastest on an H100: fewer programs than _FEW use smaller tiles; a share has _SHARE
# samples or more; shares make _PROGRAMS programs at most.
_FEW, _SHARE, _PROGRAMS = 200, 128, 800


@triton.jit
def _forward(
    mean, variance, w_mu, w_var, b_mu, b_var, out_mean, out_variance,
    samples, outputs, inputs,
    RECTIFY: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows, columns = row[:, None] < samples, column[None, :] < outputs
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    spread = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, inputs, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        left, right = rows & (k[None, :] < inputs), columns & (k[:, None] < inputs)
        offsets = row[:, None] * inputs + k[None, :]
        weight = column[None, :] * inputs + k[:, None]
        a = tl.load(mean + offsets, left, 0.0)
        w = tl.load(w_mu + weight, right, 0.0)
        s = tl.load(w_var + weight, right, 0.0)
        sums = tl.dot(a, w, sums, input_precision=PRECISION)
        spread = tl.dot(a * a, s, spread, input_precision=PRECISION)
        if variance is not None:
            v = tl.load(variance + offsets, left, 0.0)
            spread = tl.dot(v, w * w + s, spread, input_precision=PRECISION)
    if b_mu is not None:
        sums += tl.load(b_mu + column, column < outputs, 0.0)[None, :]
        spread += tl.load(b_var + column, column < outputs, 0.0)[None, :]
    if RECTIFY:
        spread = tl.where(sums > 0, spread, 0.0)
        sums = tl.where(sums > 0, sums, 0.0)
    to = row[:, None] * outputs + column[None, :]
    tl.store(out_mean + to, sums, rows & columns)
    tl.store(out_variance + to, spread, rows & columns)


@triton.jit
def _deltas(
    moved, shrunk, mean, w_var, b_var, w_delta_mu, w_delta_var, b_delta_mu, b_delta_var, parts,
    samples, outputs, inputs, share,
    SHARED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows, columns = row[:, None] < outputs, column[None, :] < inputs
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    spread = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_mean = tl.zeros((ROWS, DEPTH), tl.float32)
    of_variance = tl.zeros((ROWS, DEPTH), tl.float32)
    first = tl.program_id(2) * share
    for begin in range(first, min(first + share, samples), DEPTH):
        k = begin + tl.arange(0, DEPTH)
        left, right = rows & (k[None, :] < samples), columns & (k[:, None] < samples)
        offsets = k[None, :] * outputs + row[:, None]
        m = tl.load(moved + offsets, left, 0.0)
        v = tl.load(shrunk + offsets, left, 0.0)
        a = tl.load(mean + k[:, None] * inputs + column[None, :], right, 0.0)
        sums = tl.dot(m, a, sums, input_precision=PRECISION)
        spread = tl.dot(v, a * a, spread, input_precision=PRECISION)
        of_mean += m
        of_variance += v
    to = row[:, None] * inputs + column[None, :]
    if SHARED:  # `_add_up` adds up the parts of all programs.
        target = parts + tl.program_id(2) * 2 * outputs * (inputs + 1)
        tl.store(target + to, sums, rows & columns)
        tl.store(target + outputs * (inputs + 1) + to, spread, rows & columns)
        if tl.program_id(1) == 0:
            biases = target + outputs * inputs + row
            tl.store(biases, tl.sum(of_mean, 1), row < outputs)
            tl.store(biases + outputs * (inputs + 1), tl.sum(of_variance, 1), row < outputs)
    else:
        s = tl.load(w_var + to, rows & columns, 0.0)
        tl.store(w_delta_mu + to, sums * s, rows & columns)
        tl.store(w_delta_var + to, spread * s * s, rows & columns)
        if b_var is not None:  # noqa: SIM102
            if tl.program_id(1) == 0:
                b = tl.load(b_var + row, row < outputs, 0.0)
                tl.store(b_delta_mu + row, tl.sum(of_mean, 1) * b, row < outputs)
                tl.store(b_delta_var + row, tl.sum(of_variance, 1) * b * b, row < outputs)


@triton.jit
def _add_up(
    parts, w_var, b_var, w_delta_mu, w_delta_var, b_delta_mu, b_delta_var, count, weights, biases,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = weights + biases
    sums = tl.zeros((BLOCK,), tl.float32)
    spread = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        source = parts + part * 2 * size + index
        sums += tl.load(source, index < size, 0.0)
        spread += tl.load(source + size, index < size, 0.0)
    inside = index < weights
    s = tl.load(w_var + index, inside, 0.0)
    tl.store(w_delta_mu + index, sums * s, inside)
    tl.store(w_delta_var + index, spread * s * s, inside)
    if b_var is not None:
        inside = (index >= weights) & (index < size)
        index -= weights
        s = tl.load(b_var + index, inside, 0.0)
        tl.store(b_delta_mu + index, sums * s, inside)
        tl.store(b_delta_var + index, spread * s * s, inside)


@triton.jit
def _below(
    moved, shrunk, w_mu, output, out_moved, out_shrunk,
    samples, outputs, inputs,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows, columns = row[:, None] < samples, column[None, :] < inputs
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    spread = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, outputs, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        left, right = rows & (k[None, :] < outputs), columns & (k[:, None] < outputs)
        offsets = row[:, None] * outputs + k[None, :]
        m = tl.load(moved + offsets, left, 0.0)
        v = tl.load(shrunk + offsets, left, 0.0)
        w = tl.load(w_mu + k[:, None] * inputs + column[None, :], right, 0.0)
        sums = tl.dot(m, w, sums, input_precision=PRECISION)
        spread = tl.dot(v, w * w, spread, input_precision=PRECISION)
    to = row[:, None] * inputs + column[None, :]
    if output is not None:
        positive = tl.load(output + to, rows & columns, 0.0) > 0
        sums = tl.where(positive, sums, 0.0)
        spread = tl.where(positive, spread, 0.0)
    tl.store(out_moved + to, sums, rows & columns)
    tl.store(out_shrunk + to, spread, rows & columns)


@triton.jit
def _move(
    gaussians, deltas, negative, cap, refused, floor, size,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    mu = tl.load(gaussians + index, inside, 0.0)
    var = tl.load(gaussians + size + index, inside, 1.0)
    moved = tl.load(deltas + index, inside, 0.0)
    shrunk = tl.load(deltas + size + index, inside, 0.0)
    factor = tl.load(cap) if CAP else cap
    bar = tl.div_rn(tl.sqrt_rn(var), factor.to(tl.float32))
    moved = _clamp(moved, bar)
    shrunk = _clamp(shrunk, bar)
    if refused is not None:
        unchanged = tl.load(refused) != 0
        moved = tl.where(unchanged, 0.0, moved)
        shrunk = tl.where(unchanged, 0.0, shrunk)
    mu += moved
    var += shrunk
    below = var <= 0
    tl.store(gaussians + index, mu, inside)
    tl.store(gaussians + size + index, tl.where(below, floor, var), inside)
    tl.store(negative + index, below, inside)


@triton.jit
def _clamp(value, bar):
    value = tl.where(value < -bar, -bar, value)
    return tl.where(value > bar, bar, value)


@triton.jit
def _innovation(
    mean, variance, jacobian, observed, noise, moved, shrunk, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    y = tl.load(observed + index, inside, 0.0)
    total = tl.load(noise + index, inside, 1.0)
    if variance is not None:
        total += tl.load(variance + index, inside, 0.0)
    slope = tl.full((BLOCK,), 1.0, tl.float32)
    if jacobian is not None:
        slope = tl.load(jacobian + index, inside, 0.0)
    gain = tl.div_rn(slope, total)
    seen = (tl.abs(gain) < float("inf")) & (y == y)
    error = y - tl.load(mean + index, inside, 0.0)
    tl.store(moved + index, tl.where(seen, error * gain, 0.0), inside)
    tl.store(shrunk + index, tl.where(seen, -gain * slope, 0.0), inside)


def forward(
    mean: Tensor,
    variance: Tensor | None,
    weights: Pair,
    biases: Pair | None,
    rectify: bool,
    tf32: bool,
) -> Pair:
    """Return means and variances, [samples, outputs], of a layer's outputs; see `Linear.forward`.

    ``variance`` None: the inputs are exact. ``rectify``: return those of max(0, output).
    """
    samples, (outputs, inputs) = len(mean), weights[0].shape
    result = mean.new_empty(2, samples, outputs)
    grid, tile = _tiles(samples, outputs)
    with torch.cuda.device_of(mean):
        _forward[grid](
            mean, variance, *weights, *(biases or (None, None)), result[0], result[1],
            samples, outputs, inputs, RECTIFY=rectify, PRECISION=_precision(tf32), **tile,
        )  # fmt: skip
    return result[0], result[1]


def write_deltas(
    innovation: Pair,
    mean: Tensor,
    weights_var: Tensor,
    weights_delta: Pair,
    biases_var: Tensor | None,
    biases_delta: Pair | None,
    tf32: bool,
) -> None:
    """Write the deltas of a layer's parameters; see `Linear.backward`.

    For many samples and few parameters, several programs sum shares, which are added in order.
    """
    samples, (outputs, inputs) = len(mean), weights_var.shape
    (down, across), tile = _tiles(outputs, inputs)
    shares = max(1, min(samples // _SHARE, _PROGRAMS // (down * across)))
    share = triton.cdiv(triton.cdiv(samples, shares), tile["DEPTH"]) * tile["DEPTH"]
    parts = mean.new_empty(shares, 2, outputs * (inputs + 1)) if shares > 1 else None
    parameters = weights_var, biases_var, *weights_delta, *(biases_delta or (None, None))
    with torch.cuda.device_of(mean):
        _deltas[down, across, shares](
            *innovation, mean, *parameters, parts, samples, outputs, inputs, share,
            SHARED=shares > 1, PRECISION=_precision(tf32), **tile,
        )  # fmt: skip
        if shares > 1:
            _add_up[(triton.cdiv(outputs * (inputs + 1), _BLOCK),)](
                parts, *parameters, shares, outputs * inputs, outputs, BLOCK=_BLOCK
            )


def below(innovation: Pair, weights_mu: Tensor, rectified: Tensor | None, tf32: bool) -> Pair:
    """Return the innovation of a layer's inputs; ``rectified`` is these inputs after a ReLU."""
    samples, (outputs, inputs) = len(innovation[0]), weights_mu.shape
    result = weights_mu.new_empty(2, samples, inputs)
    grid, tile = _tiles(samples, inputs)
    with torch.cuda.device_of(weights_mu):
        _below[grid](
            *innovation, weights_mu, rectified, result[0], result[1],
            samples, outputs, inputs, PRECISION=_precision(tf32), **tile,
        )  # fmt: skip
    return result[0], result[1]


def innovation(
    mean: Tensor, variance: Tensor | None, jacobian: Tensor | None, observed: Tensor, noise: Tensor
) -> Pair:
    """Do what `compute.innovation.innovation` does."""
    moved, shrunk = torch.empty_like(mean), torch.empty_like(mean)
    size = mean.numel()
    with torch.cuda.device_of(mean):
        _innovation[(triton.cdiv(size, _BLOCK),)](
            mean, variance, jacobian, observed, noise, moved, shrunk, size, BLOCK=_BLOCK
        )
    return moved, shrunk


def move(
    gaussians: Tensor,
    deltas: Tensor,
    negative: Tensor,
    cap: float | Tensor,
    refused: Tensor | None,
    floor: float,
) -> None:
    """Do what `replica.device_parameters.move` does."""
    size = gaussians.shape[1]
    with torch.cuda.device_of(gaussians):
        _move[(triton.cdiv(size, _BLOCK),)](
            gaussians, deltas, negative, cap, refused, floor, size,
            CAP=isinstance(cap, Tensor), BLOCK=_BLOCK,
        )  # fmt: skip


def try_out(device: torch.device) -> None:
    """Compile and run the smallest kernel."""
    gaussians = torch.ones(2, 1, device=device)
    negative = torch.empty(1, dtype=torch.bool, device=device)
    move(gaussians, torch.zeros_like(gaussians), negative, 1.0, None, 0.0)


def _tiles(rows: int, columns: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs for a matrix, and the options of a program's tile."""
    grid = triton.cdiv(rows, 64), triton.cdiv(columns, 32)
    if grid[0] * grid[1] < _FEW:
        tile = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
        return (triton.cdiv(rows, 16), grid[1]), tile
    return grid, {"ROWS": 64, "COLUMNS": 32, "DEPTH": 32, "num_warps": 4, "num_stages": 3}


def _precision(tf32: bool) -> str:
    """Return Triton's precision of products; three passes of TF32 are as exact as float32."""
    return "tf32" if tf32 else "tf32x3"

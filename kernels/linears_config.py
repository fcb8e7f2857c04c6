"""Launch configurations of `triton_linears.py`: pure functions of shapes, no autotuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cascade.kernels.launch_config import padded

# More rows than this are no longer bound by reading the weights.
MOST_ROWS = 64
# Weights of one launch.
MOST_WEIGHTS = 3
# Every weight's columns are a multiple of the first, and its features of the second.
COLUMNS, FEATURES = 16, 64
# The generation that these figures were measured on.
GENERATION = 9


@dataclass(frozen=True)
class LinearsConfig:
    """One launch of `linears_tile`: its tile, the depth of its pipeline, warps of a program."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


def takes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> bool:
    """Whether the kernel computes these products; adds no guard.

    Sizes and strides are numbers, what a program reads of a row lies side by side, and so do the
    elements of a bias: one that is a column of a table, or one number for all, does not.
    """
    operands = [x, *weights, *(biases or ())]
    numbers = [n for operand in operands for n in (*operand.shape, *operand.stride())]
    if len(weights) > MOST_WEIGHTS or not all(isinstance(n, int) for n in numbers):
        return False
    if x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if any(operand.stride(-1) != 1 or operand.numel() == 0 for operand in operands):
        return False
    if x.size(0) > MOST_ROWS or x.size(1) % FEATURES:
        return False
    return not any(weight.size(0) % COLUMNS for weight in weights)


def linears_config(
    rows: int, features: int, columns: Sequence[int], processors: int
) -> LinearsConfig:
    """The configuration for the products of `rows` rows of `features` features.

    What is in flight on a multiprocessor is what counts: the fewer programs there are for each,
    the deeper the pipeline of one. Measured on an H200: benchmarks/LOG.md, entry 14.

    Args:
        rows: M, up to `MOST_ROWS`.
        features: K, a multiple of `FEATURES`.
        columns: of each weight, multiples of `COLUMNS`.
        processors: multiprocessors of the device.
    """
    few = rows <= 16
    wide, total = _divisor(columns, 64), sum(columns)
    if wide == 64 and 2 * total >= 3 * 64 * processors:
        return _config(rows, 64, features, 128, stages=3, warps=2 if few else 4)
    if wide == 64 and not few and 5 * total >= 3 * 64 * processors:
        return _config(rows, 64, features, 128, stages=6, warps=4)
    if few and 4 * total < 3 * 32 * processors:
        return _config(rows, 16, features, 512, stages=4, warps=2)
    narrow = min(wide, 32)
    if not few:
        return _config(rows, narrow, features, 128, stages=6, warps=4)
    stages = 4 if total > 32 * processors else 6
    return _config(rows, narrow, features, 256, stages=stages, warps=2)


def _config(
    rows: int, block_n: int, features: int, block_k: int, *, stages: int, warps: int
) -> LinearsConfig:
    return LinearsConfig(padded(rows), block_n, _divisor([features], block_k), stages, warps)


def _divisor(sizes: Sequence[int], most: int) -> int:
    """The largest power of two up to `most` that divides all sizes."""
    while any(size % most for size in sizes):
        most //= 2
    return most

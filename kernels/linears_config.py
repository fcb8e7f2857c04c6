"""Launch configurations of `triton_linears.py`: pure functions of shapes, no autotuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_cascade.kernels.launch_config import padded

# More rows than this are no longer bound by reading the weights.
MOST_ROWS = 64
# Weights of one launch.
MOST_WEIGHTS = 3
# Every product's columns come in tiles of this many at least, and features in steps of this many.
COLUMNS, FEATURES = 16, 64


@dataclass(frozen=True)
class LinearsConfig:
    """One launch of `linears_tile`: its tile, the depth of its pipeline, warps of a program."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


def linears_config(rows: int, features: int, columns: Sequence[int]) -> LinearsConfig:
    """The configuration for `rows` rows of `features` features and products of `columns`.

    Args:
        rows: M, at most `MOST_ROWS`.
        features: K, a multiple of `FEATURES`.
        columns: of each weight, multiples of `COLUMNS`.
    """
    block_m = padded(rows)
    block_n = _divisor(columns, 32)
    block_k = _divisor([features], 256 if block_m == 16 else 128)
    return LinearsConfig(block_m, block_n, block_k, stages=4, warps=2)


def _divisor(sizes: Sequence[int], most: int) -> int:
    """The largest power of two up to `most` that divides all sizes."""
    while any(size % most for size in sizes):
        most //= 2
    return most

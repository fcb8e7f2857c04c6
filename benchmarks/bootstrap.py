"""Intervals of means, from samples drawn again; paired where arms share their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure and the interval that holds 95 % of the resampled ones."""

    value: float
    low: float
    high: float


def _draws(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (DRAWS, count), generator=generator)


def _interval(value: float, resampled: Tensor) -> Interval:
    tail = (1 - LEVEL) / 2
    ends = torch.quantile(resampled, torch.tensor([tail, 1 - tail], dtype=resampled.dtype))
    return Interval(value, float(ends[0]), float(ends[1]))


def mean(values: Sequence[float], seed: int = 0) -> Interval:
    """Of a mean.

    Raises:
        ValueError: no values.

    Example:
        >>> mean([1.0, 1.0, 1.0])
        Interval(value=1.0, low=1.0, high=1.0)
    """
    x = _samples(values)
    return _interval(float(x.mean()), x[_draws(len(x), seed)].mean(1))


def difference(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval:
    """Of the mean of `values - others`, sample by sample.

    Raises:
        ValueError: no values, or not as many of both.
    """
    return mean((_samples(values) - _samples(others, len(values))).tolist(), seed)


def removed(values: Sequence[float], worst: Sequence[float], seed: int = 0) -> Interval:
    """Of the share of `worst` that `values` removes: 1 - mean(values) / mean(worst).

    Samples of both are drawn together.

    Raises:
        ValueError: no values, or not as many of both, or `worst` has nothing to remove.

    Example:
        >>> removed([1.0, 2.0], [4.0, 8.0])
        Interval(value=0.75, low=0.75, high=0.75)
    """
    x, y = _samples(values), _samples(worst, len(values))
    if not bool((y > 0).all()):
        raise ValueError(f"worst must be positive, got {worst}")
    at = _draws(len(x), seed)
    return _interval(float(1 - x.mean() / y.mean()), 1 - x[at].mean(1) / y[at].mean(1))


def _samples(values: Sequence[float], count: int | None = None) -> Tensor:
    if not values or count not in (None, len(values)):
        wanted = "some" if count is None else str(count)
        raise ValueError(f"expected {wanted} values, got {len(values)}")
    return torch.tensor(values, dtype=torch.float64)

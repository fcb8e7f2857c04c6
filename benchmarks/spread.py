"""Repeated measurements as a median and how far they lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """What repeated measurements of one thing say, in their unit.

    Attributes:
        median: the figure to quote.
        low: first quartile.
        high: third quartile.
        least: the smallest.
        count: how many there were.
    """

    median: float
    low: float
    high: float
    least: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value.

        Raises:
            ValueError: there is none.
        """
        if not values:
            raise ValueError("values is empty: nothing was measured")
        if len(values) == 1:
            low = high = values[0]
        else:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, min(values), len(values))

"""Masks that are bounds on the distance of key and query: causal rules and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy

from torch_cascade.compiler.graph import Size
from torch_cascade.passes.mask_elements import Elements
from torch_cascade.passes.mask_sight import Scores
from torch_cascade.passes.predicate import AtLeastZero, Tree, branches
from torch_cascade.passes.prover import Box, Prover


@dataclass(frozen=True)
class Bounds:
    """key >= query + low and key <= query + high, where they are not None.

    The query is counted from 0, the key over the whole key axis.
    """

    low: Size | None = None
    high: Size | None = None

    @property
    def window(self) -> Size | None:
        """Number of keys that both bounds leave to a query."""
        if self.low is None or self.high is None:
            return None
        return sympy.expand(self.high - self.low + 1)

    def joined(self, other: Bounds, prover: Prover) -> Bounds | None:
        """Both at once; None where it is not known which is tighter."""
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        low = next((x for x in lows if all(prover.known(x - y) for y in lows)), None)
        high = next((x for x in highs if all(prover.known(y - x) for y in highs)), None)
        if (lows and low is None) or (highs and high is None):
            return None
        return Bounds(low, high)

    def __str__(self) -> str:
        query = sympy.Symbol("q")
        low = [] if self.low is None else [f"k >= {query + self.low}"]
        high = [] if self.high is None else [f"k <= {query + self.high}"]
        return " and ".join(high + low)


def bound_of(read: Elements, scores: Scores, expr: Size) -> Bounds | None:
    """`expr >= 0` as a bound that depends on sizes only, None if it is none."""
    expr = sympy.expand(expr)
    slope = _slope(scores, expr)
    if slope == 0:
        return None
    limit = sympy.expand(scores.key - scores.query - slope * expr)
    if limit.free_symbols & read.box.keys():
        return None
    return Bounds(low=limit) if slope == 1 else Bounds(high=limit)


def vacuous(read: Elements, scores: Scores, box: Box, last: Size) -> Bounds:
    """An upper bound that holds everywhere on a box: one of the masks' own, else `last`."""
    for atom in _comparisons(scores.trees):
        for expr in (atom.expr, -atom.expr - 1):
            bound = bound_of(read, scores, expr)
            if bound and bound.high is not None and read.prover.always(expr, box):
                return bound
    return Bounds(high=last)


def edges(scores: Scores, trees: Sequence[Tree]) -> Iterator[Size]:
    """The keys, as functions of the query, at which some condition begins or ceases to hold."""
    for atom in _comparisons(trees):
        slope = _slope(scores, atom.expr)
        if slope != 0:
            edge = sympy.expand(scores.key - slope * atom.expr)
            yield from (edge, edge - slope)


def _comparisons(trees: Sequence[Tree]) -> Iterator[AtLeastZero]:
    for tree in trees:
        yield from (b.atom for b in branches(tree) if isinstance(b.atom, AtLeastZero))


def _slope(scores: Scores, expr: Size) -> int:
    """The slope in the key if it is 1 or -1, else 0 (as where there is one key only)."""
    slope = expr.coeff(scores.key) if isinstance(scores.key, sympy.Symbol) else 0
    return int(slope) if slope in (1, -1) else 0

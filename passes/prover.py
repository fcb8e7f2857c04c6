"""What can be proved of integer expressions and of decision trees on a box of indices.

Proofs are one-sided: True is answered only where a worst case over the box proves it for every
admitted size. Sizes are never guarded.

Example:
    >>> k = sympy.Symbol("k", integer=True)
    >>> box = {k: Range(sympy.Integer(5), sympy.Integer(9))}
    >>> prover = Prover(Sizes(None))
    >>> prover.always(k - 5, box), prover.always(k - 6, box)
    (True, False)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from torch_cascade.compiler.graph import Size, Sizes
from torch_cascade.passes.predicate import Branch, Datum, Tree, choose, size

# Up to this size a tree is searched for atoms that the others make superfluous.
_FEW_LEAVES = 12


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of an integer variable by expressions of sizes; None is unbounded."""

    low: Size | None = None
    high: Size | None = None


Box: TypeAlias = Mapping[sympy.Symbol, Range]


@dataclass(frozen=True)
class Affine:
    """`rest` + the sum of slope * variable; slopes and rest depend on sizes only."""

    slopes: Mapping[sympy.Symbol, Size]
    rest: Size

    def minus(self, other: Affine) -> Affine:
        """The difference of two forms."""
        slopes = dict(self.slopes)
        for variable, slope in other.slopes.items():
            slopes[variable] = slopes.get(variable, sympy.Integer(0)) - slope
        return Affine({v: s for v, s in slopes.items() if s != 0}, self.rest - other.rest)


class Prover:
    """Proves affine inequalities by their worst case over a box, without adding guards."""

    def __init__(self, sizes: Sizes) -> None:
        """Uses what is known of the sizes of one graph."""
        self._sizes = sizes
        self._known: dict[Size, bool] = {}
        self._forms: dict[Size, Affine | None] = {}

    def known(self, expr: Size) -> bool:
        """True iff an expression of sizes is provably >= 0."""
        if expr.is_number:
            return bool(expr >= 0)
        if expr not in self._known:
            self._known[expr] = self._sizes.known(sympy.Ge(expr, 0))
        return self._known[expr]

    def lowest(self, expr: Size, box: Box) -> Size | None:
        """A lower bound of an expression over a box, in sizes only; None where none is found."""
        form = self._form(expr, box)
        return None if form is None else self._lowest(form, box)

    def highest(self, expr: Size, box: Box) -> Size | None:
        """An upper bound, as `lowest`."""
        negated = self.lowest(-expr, box)
        return None if negated is None else -negated

    def always(self, expr: Size, box: Box) -> bool:
        """True iff `expr >= 0` is proved everywhere on a box (trivially on an empty one)."""
        form = self._form(expr, box)
        return form is not None and self._always(form, box)

    def restrict(self, tree: Tree, box: Box, shorten: bool = True) -> Tree:
        """A tree that equals the given one on a box, without the atoms that are decided there.

        Args:
            tree: any tree.
            box: bounds of the variables.
            shorten: also leave out atoms that the others make superfluous.
        """
        return self._restricted(tree, box, (), shorten)

    def _restricted(self, tree: Tree, box: Box, facts: tuple[Size, ...], shorten: bool) -> Tree:
        """`restrict` where the facts are expressions that are >= 0 (the path from the root)."""
        if not isinstance(tree, Branch):
            return tree
        if isinstance(tree.atom, Datum):
            then = self._restricted(tree.then, box, facts, shorten)
            return choose(tree, then, self._restricted(tree.other, box, facts, shorten))
        holds, fails = tree.atom.expr, -tree.atom.expr - 1
        if self._follows(holds, box, facts):
            return self._restricted(tree.then, box, facts, shorten)
        if self._follows(fails, box, facts):
            return self._restricted(tree.other, box, facts, shorten)
        then = self._restricted(tree.then, box, (*facts, holds), shorten)
        other = self._restricted(tree.other, box, (*facts, fails), shorten)
        if shorten and size(then) + size(other) <= _FEW_LEAVES:
            # `k < p or k <= q + p` is just the latter.
            if self._restricted(other, box, (*facts, holds), False) == then:
                return other
            if self._restricted(then, box, (*facts, fails), False) == other:
                return then
        return choose(tree, then, other)

    def _follows(self, expr: Size, box: Box, facts: tuple[Size, ...]) -> bool:
        """True iff `expr >= 0` on a box, alone or because it is at least one of the facts."""
        form = self._form(expr, box)
        if form is None:
            return False
        if self._always(form, box):
            return True
        forms = [self._form(fact, box) for fact in facts]
        near = [f for f in forms if f is not None and not form.slopes.keys().isdisjoint(f.slopes)]
        return any(self._always(form.minus(fact), box) for fact in near)

    def _form(self, expr: Size, box: Box) -> Affine | None:
        if expr not in self._forms:
            self._forms[expr] = _affine(expr, box)
        return self._forms[expr]

    def _lowest(self, form: Affine, box: Box) -> Size | None:
        total = form.rest
        for variable, slope in form.slopes.items():
            end = self._worst_end(slope, box[variable])
            if end is None:
                return None
            total = total + slope * end
        return sympy.expand(total)

    def _worst_end(self, slope: Size, span: Range) -> Size | None:
        if self.known(slope):
            return span.low
        return span.high if self.known(-slope) else None

    def _always(self, form: Affine, box: Box) -> bool:
        low = self._lowest(form, box)
        return low is not None and self.known(low)


def _affine(expr: Size, box: Box) -> Affine | None:
    """An expression as an affine form in the variables of a box, None if it is not."""
    rest = sympy.expand(expr)
    slopes: dict[sympy.Symbol, Size] = {}
    for variable in sorted(rest.free_symbols & box.keys(), key=str):
        slopes[variable] = rest.coeff(variable)
        rest = sympy.expand(rest - slopes[variable] * variable)
    sizes = set().union(rest.free_symbols, *(slope.free_symbols for slope in slopes.values()))
    return Affine(slopes, rest) if sizes.isdisjoint(box) else None

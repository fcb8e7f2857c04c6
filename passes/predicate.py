"""Decision trees over integer facts, and what can be proved of them on a box of indices.

A mask element is a function of indices. It is kept as a reduced ordered decision tree (a binary
decision diagram, Bryant 1986, with any hashable leaves): inner nodes ask an `Atom`, either
"an integer expression is at least zero" or one bool element of a data tensor. Equal functions
of the same atoms are equal trees, so `a | ~a` is simply True.

Proofs are one-sided: `Prover.always` answers True only where a worst case over the box of all
indices proves it for every admitted size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes

Index: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True)
class AtLeastZero:
    """The integer expression is >= 0."""

    expr: Size


@dataclass(frozen=True)
class Datum:
    """The bool element of a tensor whose values are not known when compiling."""

    node: fx.Node
    index: Index


Atom: TypeAlias = "AtLeastZero | Datum"


@dataclass(frozen=True)
class Branch:
    """`then` where the atom holds, `other` elsewhere; ranks grow from the root to the leaves."""

    rank: int
    atom: Atom
    then: Tree
    other: Tree


# A leaf is a bool, a `Real`, a sympy expression (an integer), or a caller's own value.
Tree: TypeAlias = "Branch | Hashable"


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of an integer variable by expressions of sizes; None is unbounded."""

    low: Size | None = None
    high: Size | None = None


Box: TypeAlias = Mapping[sympy.Symbol, Range]


class Atoms:
    """The atoms of one graph; each has one rank, so that trees are ordered and comparable."""

    def __init__(self) -> None:
        """No atoms yet."""
        self._ranks: dict[Atom, int] = {}

    def at_least_zero(self, expr: Size) -> Tree:
        """The tree of `expr >= 0`; `x <= y` and `x > y` share one atom."""
        expr = sympy.expand(expr)
        if expr.is_number:
            return bool(expr >= 0)
        lead = min(expr.free_symbols, key=str)
        if expr.coeff(lead).is_negative:
            return self._ask(AtLeastZero(sympy.expand(-expr - 1)), False, True)
        return self._ask(AtLeastZero(expr), True, False)

    def datum(self, node: fx.Node, index: Index) -> Tree:
        """The tree of one bool element of a data tensor."""
        return self._ask(Datum(node, index), True, False)

    def _ask(self, atom: Atom, then: bool, other: bool) -> Branch:
        return Branch(self._ranks.setdefault(atom, len(self._ranks)), atom, then, other)


def apply(function: Callable[..., Tree], *trees: Tree) -> Tree:
    """The tree of a function of the leaves of some trees; the function may answer with trees."""
    tops = [tree for tree in trees if isinstance(tree, Branch)]
    if not tops:
        return function(*trees)
    top = min(tops, key=lambda tree: tree.rank)
    then = apply(function, *(_side(tree, top, True) for tree in trees))
    other = apply(function, *(_side(tree, top, False) for tree in trees))
    return choose(top, then, other)


def choose(top: Branch, then: Tree, other: Tree) -> Tree:
    """`then` where the atom of `top` holds, else `other`: reduced and in order of rank."""
    if then == other:
        return then
    tops = [tree for tree in (then, other) if isinstance(tree, Branch)]
    first = min(tops, key=lambda tree: tree.rank, default=None)
    if first is None or first.rank > top.rank:
        return Branch(top.rank, top.atom, then, other)
    if first.rank == top.rank:
        return choose(top, _side(then, top, True), _side(other, top, False))
    yes = choose(top, _side(then, first, True), _side(other, first, True))
    no = choose(top, _side(then, first, False), _side(other, first, False))
    return choose(first, yes, no)


def _side(tree: Tree, top: Branch, holds: bool) -> Tree:
    """A tree, given whether the atom of `top` holds; no atom of the tree has a lower rank."""
    if not isinstance(tree, Branch) or tree.rank != top.rank:
        return tree
    return tree.then if holds else tree.other


def if_else(condition: Tree, then: Tree, other: Tree) -> Tree:
    """`then` where a tree of bools is True, else `other`."""
    return apply(lambda c, a, b: a if c else b, condition, then, other)


def both(a: Tree, b: Tree) -> Tree:
    """Conjunction of two trees of bools."""
    return if_else(a, b, False)


def size(tree: Tree) -> int:
    """Number of leaves."""
    return size(tree.then) + size(tree.other) if isinstance(tree, Branch) else 1


def leaves(tree: Tree) -> Iterator[Hashable]:
    """Every leaf, once for each path to it."""
    if isinstance(tree, Branch):
        yield from leaves(tree.then)
        yield from leaves(tree.other)
    else:
        yield tree


def questions(tree: Tree) -> Iterator[Atom]:
    """Every atom asked in a tree, once for each place."""
    if isinstance(tree, Branch):
        yield tree.atom
        yield from questions(tree.then)
        yield from questions(tree.other)


def substitute(tree: Tree, atoms: Atoms, variable: sympy.Symbol, by: Size) -> Tree:
    """A tree with an index variable replaced in its integer atoms.

    A `Datum` stays the same unknown: what is proved afterwards holds whatever its value is.
    """
    if not isinstance(tree, Branch):
        return tree
    then = substitute(tree.then, atoms, variable, by)
    other = substitute(tree.other, atoms, variable, by)
    if isinstance(tree.atom, Datum):
        return choose(tree, then, other)
    return if_else(atoms.at_least_zero(tree.atom.expr.subs(variable, by)), then, other)


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

    def restrict(self, tree: Tree, box: Box, facts: tuple[Size, ...] = ()) -> Tree:
        """A tree that equals the given one on a box, without the atoms that are decided there.

        Args:
            tree: any tree.
            box: bounds of the variables.
            facts: expressions that are >= 0 (those of the path from the root).
        """
        if not isinstance(tree, Branch):
            return tree
        if isinstance(tree.atom, Datum):
            then = self.restrict(tree.then, box, facts)
            return choose(tree, then, self.restrict(tree.other, box, facts))
        holds, fails = tree.atom.expr, -tree.atom.expr - 1
        if self._follows(holds, box, facts):
            return self.restrict(tree.then, box, facts)
        if self._follows(fails, box, facts):
            return self.restrict(tree.other, box, facts)
        then = self.restrict(tree.then, box, (*facts, holds))
        return choose(tree, then, self.restrict(tree.other, box, (*facts, fails)))

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

"""Decision trees over facts about indices, sizes and data.

A mask element is a function of indices. It is kept as a reduced ordered decision tree (a binary
decision diagram, Bryant 1986, with any hashable leaves): inner nodes ask an `Atom`, either
"an integer expression is at least zero" or one bool element of a data tensor. Equal functions
of the same atoms are equal trees, so `a | ~a` is simply True.

Example:
    >>> k, q = sympy.symbols("k q", integer=True)
    >>> atoms = Atoms()
    >>> late = atoms.at_least_zero(k - q - 1)
    >>> both(late, atoms.at_least_zero(q - k))
    False
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import sympy
from torch import fx

from torch_cascade.compiler.graph import Size

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


class Atoms:
    """The atoms of one graph; each has one rank, so that trees are ordered and comparable."""

    def __init__(self) -> None:
        """No atoms yet."""
        self._ranks: dict[Atom, int] = {}

    def at_least_zero(self, expr: Size) -> Tree:
        """The tree of `expr >= 0`; `x <= y` and `x > y` share one atom."""
        expr = _reduced(sympy.expand(expr))
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


def _reduced(expr: Size) -> Size:
    """`2*x - 3` as `x - 2`: at least zero for the same integers, with coprime coefficients."""
    factors = expr.as_coefficients_dict()
    constant = factors.pop(sympy.S.One, sympy.Integer(0))
    if not factors or not all(f.is_Integer for f in (constant, *factors.values())):
        return expr
    divisor = abs(sympy.gcd_list(list(factors.values())))
    return sympy.Add(constant // divisor, *(t * (f / divisor) for t, f in factors.items()))


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


def given(tree: Tree, atom: Atom, holds: bool) -> Tree:
    """A tree where it is known whether an atom holds."""
    if not isinstance(tree, Branch):
        return tree
    if tree.atom == atom:
        return tree.then if holds else tree.other
    return choose(tree, given(tree.then, atom, holds), given(tree.other, atom, holds))


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


def branches(tree: Tree) -> Iterator[Branch]:
    """Every inner node, once for each place, from the root down."""
    if isinstance(tree, Branch):
        yield tree
        yield from branches(tree.then)
        yield from branches(tree.other)


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

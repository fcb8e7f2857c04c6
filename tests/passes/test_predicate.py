"""Decision trees and proofs, each against every assignment of small boxes."""

from __future__ import annotations

import itertools
import random

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_cascade.compiler.graph import Sizes
from torch_cascade.passes.predicate import (
    Atoms,
    Branch,
    apply,
    both,
    branches,
    choose,
    given,
    if_else,
    leaves,
    size,
    substitute,
)
from torch_cascade.passes.prover import Prover, Range

X, Y, T = sympy.symbols("x y t", integer=True)
VALUES = range(-2, 4)
BOX = {v: Range(sympy.Integer(-2), sympy.Integer(3)) for v in (X, Y, T)}


def draw(rng: random.Random, atoms: Atoms, depth: int):
    """A random tree of bools and the same function of an assignment."""
    if depth == 0:
        a, b, c = rng.randint(-2, 2), rng.randint(-2, 2), rng.randint(-4, 4)
        expr = a * X + b * Y + c
        return atoms.at_least_zero(sympy.sympify(expr)), lambda e: evaluate(expr, e) >= 0
    (p, f), (q, g), (r, h) = (draw(rng, atoms, depth - 1) for _ in range(3))
    return rng.choice(
        [
            (both(p, q), lambda e: f(e) and g(e)),
            (if_else(p, q, r), lambda e: g(e) if f(e) else h(e)),
            (apply(lambda x, y: x != y, p, q), lambda e: f(e) != g(e)),
            (apply(lambda x: not x, p), lambda e: not f(e)),
        ]
    )


def evaluate(expr, env):
    return int(sympy.sympify(expr).subs(env))


def walk(tree, env):
    """The leaf of a tree under an assignment."""
    while isinstance(tree, Branch):
        tree = tree.then if evaluate(tree.atom.expr, env) >= 0 else tree.other
    return tree


def assignments():
    return [{X: x, Y: y} for x, y in itertools.product(VALUES, VALUES)]


def in_order(tree) -> bool:
    """Ranks grow downwards and no node has equal sides."""
    if not isinstance(tree, Branch):
        return True
    below = [side.rank for side in (tree.then, tree.other) if isinstance(side, Branch)]
    return (
        tree.then != tree.other
        and all(rank > tree.rank for rank in below)
        and in_order(tree.then)
        and in_order(tree.other)
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_tree_is_its_function_and_stays_so_on_a_box(seed):
    rng = random.Random(seed)
    tree, function = draw(rng, Atoms(), 2)
    restricted = Prover(Sizes(None)).restrict(tree, BOX)
    assert in_order(tree) and in_order(restricted)
    assert size(restricted) <= size(tree)
    for env in assignments():
        assert walk(tree, env) == function(env)
        assert walk(restricted, env) == function(env)


@pytest.mark.parametrize("seed", range(10))
def test_a_substituted_tree_is_the_substituted_function(seed):
    atoms = Atoms()
    tree, function = draw(random.Random(seed), atoms, 2)
    moved = substitute(tree, atoms, X, Y + 1)
    for y in VALUES:
        assert walk(moved, {Y: y}) == function({X: y + 1, Y: y})


@pytest.mark.parametrize("seed", range(10))
def test_a_tree_given_an_atom_is_its_function_where_the_atom_holds(seed):
    tree, function = draw(random.Random(seed), Atoms(), 2)
    for branch in branches(tree):
        for holds in (True, False):
            known = given(tree, branch.atom, holds)
            assert in_order(known) and branch.atom not in {b.atom for b in branches(known)}
            for env in assignments():
                if (evaluate(branch.atom.expr, env) >= 0) == holds:
                    assert walk(known, env) == function(env)


def test_complements_and_scalings_are_one_atom():
    atoms = Atoms()
    late, early = atoms.at_least_zero(X - Y), atoms.at_least_zero(Y - X - 1)
    assert both(late, early) is False
    assert if_else(late, True, early) is True
    assert atoms.at_least_zero(3 * X - 3 * Y + 2) == late  # x - y >= -2/3
    assert atoms.at_least_zero(sympy.Integer(0)) is True
    assert atoms.at_least_zero(sympy.Integer(-1)) is False


def test_choose_keeps_the_order_of_ranks():
    atoms = Atoms()
    first, second = atoms.at_least_zero(X), atoms.at_least_zero(Y)
    tree = choose(second, first, False)
    assert tree == both(first, second) and in_order(tree)
    assert list(leaves(tree)) == [True, False, False]
    assert [b.atom.expr for b in branches(tree)] == [X, Y]


@pytest.mark.parametrize("seed", range(40))
def test_proofs_hold_everywhere_and_bounds_are_met(seed):
    rng = random.Random(seed)
    prover = Prover(Sizes(None))
    a, b, c = rng.randint(-3, 3), rng.randint(-3, 3), rng.randint(-9, 9)
    expr = sympy.sympify(a * X + b * Y + c)
    values = [evaluate(expr, env) for env in assignments()]
    assert prover.lowest(expr, BOX) == min(values)
    assert prover.highest(expr, BOX) == max(values)
    assert prover.always(expr, BOX) == (min(values) >= 0)


def test_what_is_not_affine_or_not_bounded_is_not_proved():
    prover = Prover(Sizes(None))
    assert prover.lowest(X * Y, BOX) is None
    assert prover.lowest(X**2 + 1, BOX) is None
    assert prover.lowest(sympy.Max(X, 0), BOX) is None
    half = {T: Range(sympy.Integer(0), None)}
    assert prover.always(T, half) and not prover.always(5 - T, half)
    assert not prover.always(T, {T: Range()})


def test_facts_of_the_path_decide_atoms_below():
    atoms, prover = Atoms(), Prover(Sizes(None))
    near, nearer = atoms.at_least_zero(X - Y), atoms.at_least_zero(X - Y - 2)
    assert prover.restrict(both(near, nearer), BOX) == nearer
    assert prover.restrict(if_else(near, True, nearer), BOX) == near
    assert prover.restrict(if_else(nearer, near, True), BOX) is True


def symbolic_sizes(*sizes: int):
    """`Sizes` of an environment, and a symbol for each size."""
    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(sizes))
    mode = FakeTensorMode(shape_env=env)
    fake = mode.from_tensor(torch.empty(sizes), symbolic_context=context)
    return Sizes(env), [s.node.expr for s in fake.shape]


def test_proofs_about_symbolic_sizes_hold_for_all_of_them_and_add_no_guard():
    sizes, (p, s) = symbolic_sizes(7, 5)
    prover = Prover(sizes)
    box = {X: Range(sympy.Integer(0), p - 1), Y: Range(sympy.Integer(0), s - 1)}
    assert prover.always(Y + p - X, box)
    assert prover.always(Y + p - X - 1, box)
    assert not prover.always(Y + p - X - 2, box)
    assert prover.always(p + s - 1 - X - Y, box)
    assert not prover.always(X - Y, box)
    assert not prover.always(p - s, box)  # true of the example, not of every size
    assert prover.always(p * X, box) and not prover.always(-p * X, box)
    assert not sizes.shape_env.guards

"""Masks of an attention, read as predicates over (row, head, query, key), a key segment at a time.

A mask that the graph builds from positions is understood: "every query sees this segment" or "key j
is visible iff j <= i + c" needs no tensor at all. Whatever is not proved stays a tensor term, which
the caller slices on the key axis; that is always right.

Finite fills: a value <= -1e30 hides a key just as -inf does, but only in rows that see another
key; a row of nothing else is the uniform mean. Such a mask is answered through its predicate only
where every row is proved to see a key.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape, tensor
from torch_cascade.passes.mask_elements import Elements
from torch_cascade.passes.mask_leaves import Real
from torch_cascade.passes.mask_rules import aligned
from torch_cascade.passes.predicate import (
    AtLeastZero,
    Atom,
    Box,
    Branch,
    Datum,
    Index,
    Range,
    Tree,
    apply,
    leaves,
    questions,
    substitute,
)
from torch_cascade.passes.site import AttentionSite, MaskTerm

# A finite mask value at or below the first absorbs every score added to it; one within the second
# leaves them (and a log-sum-exp of them) at least 2**-8 of absolute precision in float32.
_ABSORBING = -1e30
_MODERATE = 2.0**16


@dataclass(frozen=True)
class SegmentMask:
    """How the queries of a site see the keys [start, start + length) of its key axis.

    Attributes:
        terms: masks still to be read, to be sliced on the key axis; all apply.
        q_offset: not None: key j (0-based within the segment) is visible to query i only if
            j <= i + q_offset.
        window: not None: and only if j > i + q_offset - window.
        rows_see_a_key: proved: every query row sees a key of this segment, for all admitted sizes.
        hidden: proved: no query sees any key of it, so the segment can be dropped.
    """

    terms: tuple[MaskTerm, ...] = ()
    q_offset: Size | None = None
    window: Size | None = None
    rows_see_a_key: bool = False
    hidden: bool = False


class Sight(enum.Enum):
    """What a mask does to one (query, key) pair."""

    VISIBLE = "visible"
    HIDDEN = "hidden"
    ABSORBED = "hidden by a finite value, if the row sees another key"
    BIASED = "some value is added to the score"


@dataclass(frozen=True)
class _Bounds:
    """key >= query + low and key <= query + high, where they are not None."""

    low: Size | None = None
    high: Size | None = None


@dataclass(frozen=True)
class _Scores:
    """The scores of a site: index variables, and what each mask does to each of them."""

    index: Index
    query: Size
    key: Size
    keys: Size
    terms: tuple[tuple[MaskTerm | None, Tree], ...]


class MaskReader:
    """Reads the masks of the attentions of one graph; each mask is read once."""

    def __init__(self, sizes: Sizes) -> None:
        """Proves with what is known of the sizes of the graph; adds no guards."""
        self._read = Elements(sizes)
        self._prover = self._read.prover
        self._scores: dict[AttentionSite, _Scores] = {}
        self._ancestors: dict[fx.Node, set[fx.Node]] = {}

    def segment(self, site: AttentionSite, start: Size, length: Size) -> SegmentMask:
        """What is proved of the keys [start, start + length), and the terms that remain.

        Example:
            For `mask = arange(K)[None] <= arange(Q)[:, None] + P` the keys [0, P) have no terms
            and no offset; the keys [P, K) have `q_offset == 0`.
        """
        scores = self._settled(site)
        box = self._box(scores, start, length)
        local = [(term, self._prover.restrict(tree, box)) for term, tree in scores.terms]
        if any(tree is Sight.HIDDEN for _, tree in local):
            return SegmentMask(hidden=True)
        bounds, terms = _Bounds(), []
        for term, tree in local:
            found = self._expressed(scores, term, tree)
            joint = None if found is None else self._tightened(bounds, found[0])
            if found is not None and joint is not None:
                bounds = joint
                terms += found[1]
            else:
                assert term is not None, "torch's causal rule is a bound on key - query"
                terms.append(term)
        high = bounds.high
        if high is None and bounds.low is not None:
            high = self._vacuous(scores, box, start + length - 1)
        window = None if high is None or bounds.low is None else high - bounds.low + 1
        if window is not None and self._prover.known(-window):
            return SegmentMask(hidden=True)
        return SegmentMask(
            terms=tuple(terms),
            q_offset=None if high is None else sympy.expand(high - start),
            window=None if window is None else sympy.expand(window),
            rows_see_a_key=self._sees(scores, [t for _, t in local], start, length),
        )

    def sees_a_key(self, site: AttentionSite) -> bool:
        """True iff every query row provably sees a key, over the whole key axis."""
        scores = self._site(site)
        trees = [tree for _, tree in scores.terms]
        return self._sees(scores, trees, sympy.Integer(0), scores.keys)

    def finite(self, site: AttentionSite) -> bool:
        """True iff no row can consist of huge finite mask values only.

        Such a row (finfo.min everywhere) is the uniform mean over its keys, which a log-sum-exp of
        parts cannot express: it has lost the number of keys to rounding. Proved where every row
        sees a key, or where all values added are -inf or at most 2**16 in magnitude.
        """
        if self.sees_a_key(site):
            return True
        if site.fully_masked == "uniform":
            return False
        scores = self._site(site)
        box = self._box(scores, sympy.Integer(0), scores.keys)
        added = [term.node for term in site.masks if term.kind == "add"]
        trees = [self._prover.restrict(self._element(scores.index, n), box) for n in added]
        return all(_is_bounded(leaf) for tree in trees for leaf in leaves(tree))

    def describe(self, site: AttentionSite) -> str:
        """One line for the report, e.g. "k <= q + s0"."""
        scores = self._settled(site)
        box = self._box(scores, sympy.Integer(0), scores.keys)
        local = [(term, self._prover.restrict(tree, box)) for term, tree in scores.terms]
        said = [self._said(scores, term, tree) for term, tree in local if tree != Sight.VISIBLE]
        return " and ".join(dict.fromkeys(said)) or "every query sees every key"

    def _said(self, scores: _Scores, term: MaskTerm | None, tree: Tree) -> str:
        literals = _conjunction(tree)
        names = {scores.query: sympy.Symbol("q"), scores.key: sympy.Symbol("k")}
        found = None if literals is None else self._expressed(scores, term, tree)
        if found is None:
            return "no key" if term is None else f"mask {term.node.name}"
        bounds, terms = found
        said = [f"mask {t.node.name}" for t in terms]
        if bounds.high is not None:
            said.append(f"{names[scores.key]} <= {sympy.Symbol('q') + bounds.high}")
        if bounds.low is not None:
            said.append(f"{names[scores.key]} >= {sympy.Symbol('q') + bounds.low}")
        return " and ".join(said)

    def _site(self, site: AttentionSite) -> _Scores:
        """The scores of a site, with what each mask does to them."""
        if site not in self._scores:
            *outer, _ = shape(site.node)
            keys = shape(site.k.node)[site.k.axes.index("k")]
            names = ("n", "h", "q", "k") if len(outer) == 3 else ("n", "q", "k")
            sizes = (*outer, keys)
            index = tuple(self._read.axis(a, s) for a, s in zip(names, sizes, strict=True))
            terms: list[tuple[MaskTerm | None, Tree]] = []
            if site.is_causal:
                causal = self._read.atoms.at_least_zero(index[-2] - index[-1])
                terms.append((None, apply(lambda x: Sight.VISIBLE if x else Sight.HIDDEN, causal)))
            terms += [(term, self._sight(site, index, term)) for term in site.masks]
            self._scores[site] = _Scores(index, index[-2], index[-1], keys, tuple(terms))
        return self._scores[site]

    def _settled(self, site: AttentionSite) -> _Scores:
        """The scores without `ABSORBED`: hidden if every row sees a key, else some bias."""
        scores = self._site(site)
        if not any(Sight.ABSORBED in leaves(tree) for _, tree in scores.terms):
            return scores
        to = Sight.HIDDEN if self.sees_a_key(site) else Sight.BIASED
        settle = partial(apply, lambda x: to if x is Sight.ABSORBED else x)
        terms = tuple((term, settle(tree)) for term, tree in scores.terms)
        return _Scores(scores.index, scores.query, scores.key, scores.keys, terms)

    def _sight(self, site: AttentionSite, index: Index, term: MaskTerm) -> Tree:
        tree = self._element(index, term.node)
        if term.kind == "add":
            return apply(_added, tree)
        hidden = Sight.ABSORBED if site.fully_masked == "uniform" else Sight.HIDDEN
        shown = term.kind == "keep"
        if tensor(term.node).dtype != torch.bool:
            return Sight.BIASED
        return apply(lambda x: Sight.VISIBLE if x is shown else hidden, tree)

    def _element(self, index: Index, node: fx.Node) -> Tree:
        sizes = shape(node)
        if len(sizes) > len(index):
            return Sight.BIASED
        return self._read.at(node, aligned(index, sizes))

    def _box(self, scores: _Scores, start: Size, length: Size) -> Box:
        if not isinstance(scores.key, sympy.Symbol):
            return self._read.box
        return {**self._read.box, scores.key: Range(start, start + length - 1)}

    def _expressed(
        self, scores: _Scores, term: MaskTerm | None, tree: Tree
    ) -> tuple[_Bounds, list[MaskTerm]] | None:
        """A tree as bounds on key - query and as smaller masks; None: read the whole mask."""
        literals = _conjunction(tree)
        if literals is None:
            return None
        bounds, terms = _Bounds(), []
        for atom, holds in literals:
            if isinstance(atom, Datum):
                part = None if term is None else self._smaller(scores, term.node, atom, holds)
                if part is None:
                    return None
                terms.append(part)
                continue
            found = self._bound(scores, atom.expr if holds else -atom.expr - 1)
            joint = None if found is None else self._tightened(bounds, found)
            if joint is None:
                return None
            bounds = joint
        if len(terms) > 1 and bounds == _Bounds():
            return None  # nothing to gain over the mask as it stands
        return bounds, terms

    def _bound(self, scores: _Scores, expr: Size) -> _Bounds | None:
        """`expr >= 0` as a bound on key - query that depends on sizes only."""
        expr = sympy.expand(expr)
        slope = expr.coeff(scores.key) if isinstance(scores.key, sympy.Symbol) else 0
        if slope not in (1, -1):
            return None
        limit = sympy.expand(scores.key - scores.query - slope * expr)
        if limit.free_symbols & self._read.box.keys():
            return None
        return _Bounds(low=limit) if slope == 1 else _Bounds(high=limit)

    def _tightened(self, a: _Bounds, b: _Bounds) -> _Bounds | None:
        """Both bounds as one; None where it is not known which is tighter."""
        lows = [x for x in (a.low, b.low) if x is not None]
        highs = [x for x in (a.high, b.high) if x is not None]
        known = self._prover.known
        low = next((x for x in lows if all(known(x - y) for y in lows)), None)
        high = next((x for x in highs if all(known(y - x) for y in highs)), None)
        if (lows and low is None) or (highs and high is None):
            return None
        return _Bounds(low, high)

    def _vacuous(self, scores: _Scores, box: Box, last: Size) -> Size:
        """An upper bound on key - query that holds on a box: one of the mask itself, or `last`."""
        for _, tree in scores.terms:
            for atom in questions(tree):
                if not isinstance(atom, AtLeastZero):
                    continue
                for expr in (atom.expr, -atom.expr - 1):
                    bound = self._bound(scores, expr)
                    if bound and bound.high is not None and self._prover.always(expr, box):
                        return bound.high
        return last

    def _smaller(self, scores: _Scores, mask: fx.Node, atom: Datum, holds: bool) -> MaskTerm | None:
        """A bool tensor among the ancestors of a mask that says just whether a datum holds."""
        if mask not in self._ancestors:
            self._ancestors[mask] = _ancestors(mask)
        for (node, index), tree in self._read.memo.items():
            if not isinstance(tree, Branch) or tree.atom != atom or node.op == "get_attr":
                continue
            if tensor(node).dtype != torch.bool or node not in self._ancestors[mask]:
                continue
            plain = isinstance(tree.then, bool) and isinstance(tree.other, bool)
            fits = len(index) <= len(scores.index) and index == aligned(scores.index, shape(node))
            if plain and fits:
                return MaskTerm(node, "keep" if tree.then is holds else "drop")
        return None

    def _sees(self, scores: _Scores, trees: list[Tree], start: Size, length: Size) -> bool:
        """True iff one of a few candidate keys is visible in every row, and in the segment."""
        box = self._box(scores, start, length)
        last = start + length - 1
        for key in dict.fromkeys([start, last, *self._edges(scores, trees)]):
            if not (self._prover.always(key - start, box) and self._prover.always(last - key, box)):
                continue
            if all(self._visible_at(scores, tree, key, box) for tree in trees):
                return True
        return False

    def _visible_at(self, scores: _Scores, tree: Tree, key: Size, box: Box) -> bool:
        if isinstance(scores.key, sympy.Symbol):
            tree = substitute(tree, self._read.atoms, scores.key, key)
        return self._prover.restrict(tree, box) is Sight.VISIBLE

    def _edges(self, scores: _Scores, trees: list[Tree]) -> Iterator[Size]:
        """The keys, as functions of the query, at which some condition begins or ceases to hold."""
        for atom in (a for tree in trees for a in questions(tree)):
            if not isinstance(atom, AtLeastZero) or not isinstance(scores.key, sympy.Symbol):
                continue
            slope = atom.expr.coeff(scores.key)
            if slope in (1, -1):
                edge = sympy.expand(scores.key - slope * atom.expr)
                yield from (edge, edge - slope)


def _added(leaf: Any) -> Sight:
    """What an additive mask value does to a score."""
    if not isinstance(leaf, Real):
        return Sight.BIASED
    if leaf.value == 0:
        return Sight.VISIBLE
    if leaf.value == -math.inf:
        return Sight.HIDDEN
    return Sight.ABSORBED if leaf.value <= _ABSORBING else Sight.BIASED


def _is_bounded(leaf: Any) -> bool:
    if not isinstance(leaf, Real):
        return False
    return leaf.value == -math.inf or abs(leaf.value) <= _MODERATE


def _conjunction(tree: Tree) -> list[tuple[Atom, bool]] | None:
    """The atoms, and whether each must hold, if a tree says "visible iff all of these"."""
    literals: list[tuple[Atom, bool]] = []
    while isinstance(tree, Branch):
        if tree.other is Sight.HIDDEN:
            literals.append((tree.atom, True))
            tree = tree.then
        elif tree.then is Sight.HIDDEN:
            literals.append((tree.atom, False))
            tree = tree.other
        else:
            return None
    return literals if tree is Sight.VISIBLE else None


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack += current.all_input_nodes
    return seen

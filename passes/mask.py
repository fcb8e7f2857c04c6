"""Masks of an attention, read as predicates over (row, head, query, key), a key segment at a time.

A mask that the graph builds from positions is understood: "every query sees this segment" or "key j
is visible iff j <= i + c" needs no tensor at all. Whatever is not proved stays a tensor term, which
the caller slices on the key axis; that is always right.

Finite fills: a huge negative value hides a key just as -inf does, but only in rows that see another
key; a row of nothing else is the uniform mean. Such a mask is answered through its predicate only
where every row is proved to see a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape, tensor
from torch_cascade.passes.mask_elements import Elements
from torch_cascade.passes.mask_rules import aligned
from torch_cascade.passes.mask_sight import (
    Scores,
    Sight,
    added_values,
    conjunction,
    is_moderate,
    scores_of,
)
from torch_cascade.passes.predicate import (
    AtLeastZero,
    Box,
    Branch,
    Datum,
    Tree,
    leaves,
    questions,
    substitute,
)
from torch_cascade.passes.site import AttentionSite, MaskTerm

_ZERO = sympy.Integer(0)


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


@dataclass(frozen=True)
class _Bounds:
    """key >= query + low and key <= query + high, where they are not None."""

    low: Size | None = None
    high: Size | None = None

    @property
    def window(self) -> Size | None:
        """Number of keys that both bounds leave to a query."""
        if self.low is None or self.high is None:
            return None
        return sympy.expand(self.high - self.low + 1)


class MaskReader:
    """Reads the masks of the attentions of one graph; each mask is read once."""

    def __init__(self, sizes: Sizes) -> None:
        """Proves with what is known of the sizes of the graph; adds no guards."""
        self._read = Elements(sizes)
        self._prover = self._read.prover
        self._scores: dict[AttentionSite, Scores] = {}
        self._ancestors: dict[fx.Node, set[fx.Node]] = {}

    def segment(self, site: AttentionSite, start: Size, length: Size) -> SegmentMask:
        """What is proved of the keys [start, start + length), and the terms that remain.

        Example:
            For `mask = arange(K)[None] <= arange(Q)[:, None] + P` the keys [0, P) have no terms
            and no offset; the keys [P, K) have `q_offset == 0`.
        """
        scores = self._settled(site)
        box = scores.box(self._read, start, length)
        local = self._local(scores, box)
        if any(tree is Sight.HIDDEN for _, tree in local):
            return SegmentMask(hidden=True)
        bounds, terms = self._split(scores, local)
        if bounds.high is None and bounds.low is not None:
            bounds = _Bounds(bounds.low, self._vacuous(scores, box, start + length - 1))
        window = bounds.window
        if window is not None and self._prover.known(-window):
            return SegmentMask(hidden=True)
        trees = [tree for _, tree in local]
        return SegmentMask(
            terms=terms,
            q_offset=None if bounds.high is None else sympy.expand(bounds.high - start),
            window=window,
            rows_see_a_key=self._sees(scores, trees, start, length),
        )

    def sees_a_key(self, site: AttentionSite) -> bool:
        """True iff every query row provably sees a key, over the whole key axis."""
        scores = self._site(site)
        return self._sees(scores, scores.trees, _ZERO, scores.keys)

    def finite(self, site: AttentionSite) -> bool:
        """True iff no row can consist of huge finite mask values only.

        Such a row (finfo.min everywhere) is the uniform mean over its keys, which a log-sum-exp of
        parts cannot express: it has lost the number of keys to rounding. Proved where every row
        sees a key, or where all values added are -inf or at most 2**16 in magnitude.
        """
        if self.sees_a_key(site):
            return True
        scores = self._site(site)
        box = scores.box(self._read, _ZERO, scores.keys)
        trees = added_values(self._read, site, scores.index)
        local = [self._prover.restrict(tree, box) for tree in trees]
        return all(is_moderate(leaf) for tree in local for leaf in leaves(tree))

    def describe(self, site: AttentionSite) -> str:
        """One line for the report, e.g. "k <= q + s0"."""
        scores = self._settled(site)
        local = self._local(scores, scores.box(self._read, _ZERO, scores.keys))
        said = [self._said(scores, term, tree) for term, tree in local if tree != Sight.VISIBLE]
        return " and ".join(dict.fromkeys(said)) or "every query sees every key"

    def _said(self, scores: Scores, term: MaskTerm | None, tree: Tree) -> str:
        found = self._expressed(scores, term, tree)
        if found is None:
            return "no key" if term is None else f"mask {term.node.name}"
        bounds, terms = found
        query = sympy.Symbol("q")
        said = [f"mask {t.node.name}" for t in terms]
        said += [f"k <= {query + bounds.high}"] if bounds.high is not None else []
        said += [f"k >= {query + bounds.low}"] if bounds.low is not None else []
        return " and ".join(said)

    def _site(self, site: AttentionSite) -> Scores:
        if site not in self._scores:
            self._scores[site] = scores_of(self._read, site)
        return self._scores[site]

    def _settled(self, site: AttentionSite) -> Scores:
        """The scores without `ABSORBED`."""
        scores = self._site(site)
        return scores.settled(self.sees_a_key(site)) if scores.absorbs else scores

    def _local(self, scores: Scores, box: Box) -> list[tuple[MaskTerm | None, Tree]]:
        return [(term, self._prover.restrict(tree, box)) for term, tree in scores.terms]

    def _split(
        self, scores: Scores, local: Sequence[tuple[MaskTerm | None, Tree]]
    ) -> tuple[_Bounds, tuple[MaskTerm, ...]]:
        """All masks of a segment as one pair of bounds and the terms that remain."""
        bounds = _Bounds()
        terms: list[MaskTerm] = []
        for term, tree in local:
            found = self._expressed(scores, term, tree)
            joint = None if found is None else self._tightened(bounds, found[0])
            if found is None or joint is None:
                assert term is not None, "torch's causal rule is a bound on key - query"
                terms.append(term)
            else:
                bounds = joint
                terms += found[1]
        return bounds, tuple(terms)

    def _expressed(
        self, scores: Scores, term: MaskTerm | None, tree: Tree
    ) -> tuple[_Bounds, list[MaskTerm]] | None:
        """A tree as bounds on key - query and as smaller masks; None: read the whole mask."""
        literals = conjunction(tree)
        if literals is None:
            return None
        bounds = _Bounds()
        terms: list[MaskTerm] = []
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

    def _bound(self, scores: Scores, expr: Size) -> _Bounds | None:
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

    def _vacuous(self, scores: Scores, box: Box, last: Size) -> Size:
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

    def _smaller(self, scores: Scores, mask: fx.Node, atom: Datum, holds: bool) -> MaskTerm | None:
        """A bool tensor among the ancestors of a mask that says just whether a datum holds."""
        if mask not in self._ancestors:
            self._ancestors[mask] = _ancestors(mask)
        for (node, index), tree in self._read.memo.items():
            if not isinstance(tree, Branch) or tree.atom != atom:
                continue
            if tensor(node).dtype != torch.bool or node not in self._ancestors[mask]:
                continue
            plain = isinstance(tree.then, bool) and isinstance(tree.other, bool)
            fits = len(index) <= len(scores.index) and index == aligned(scores.index, shape(node))
            if plain and fits:
                return MaskTerm(node, "keep" if tree.then is holds else "drop")
        return None

    def _sees(self, scores: Scores, trees: Sequence[Tree], start: Size, length: Size) -> bool:
        """True iff one of a few candidate keys is visible in every row, and in the segment."""
        box = scores.box(self._read, start, length)
        last = start + length - 1
        for key in dict.fromkeys([start, last, *self._edges(scores, trees)]):
            if not (self._prover.always(key - start, box) and self._prover.always(last - key, box)):
                continue
            if all(self._visible_at(scores, tree, key, box) for tree in trees):
                return True
        return False

    def _visible_at(self, scores: Scores, tree: Tree, key: Size, box: Box) -> bool:
        if isinstance(scores.key, sympy.Symbol):
            tree = substitute(tree, self._read.atoms, scores.key, key)
        return self._prover.restrict(tree, box) is Sight.VISIBLE

    def _edges(self, scores: Scores, trees: Sequence[Tree]) -> Iterator[Size]:
        """The keys, as functions of the query, at which some condition begins or ceases to hold."""
        for atom in (a for tree in trees for a in questions(tree)):
            if not isinstance(atom, AtLeastZero) or not isinstance(scores.key, sympy.Symbol):
                continue
            slope = atom.expr.coeff(scores.key)
            if slope in (1, -1):
                edge = sympy.expand(scores.key - slope * atom.expr)
                yield from (edge, edge - slope)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack += current.all_input_nodes
    return seen

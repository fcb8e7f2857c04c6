"""Masks of an attention, read as predicates over (row, head, query, key), a key segment at a time.

A mask that the graph builds from positions is understood: "every query sees this segment" or "key j
is visible iff j <= i + c" needs no tensor at all. Whatever is not proved stays a tensor term, which
the caller slices on the key axis; that is always right.

Finite fills: a huge negative value hides a key just as -inf does, but only in rows that see another
key; a row of nothing else is the uniform mean. Such a mask is answered through its predicate only
where every row is proved to see a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape, tensor
from torch_cascade.passes.key_limits import KeyLimit, Rows, limits
from torch_cascade.passes.mask_bounds import Bounds, bound_of, edges, vacuous
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
    Branch,
    Datum,
    Tree,
    apply,
    both,
    if_else,
    leaves,
    substitute,
)
from torch_cascade.passes.prover import Box
from torch_cascade.passes.site import AttentionSite, MaskKind, MaskTerm

_ZERO = sympy.Integer(0)
_MOST_CANDIDATES = 16


@dataclass(frozen=True)
class SegmentMask:
    """How the queries of a site see the keys [start, start + length) of its key axis.

    Attributes:
        terms: masks still to be read, to be sliced on the key axis; all apply.
        q_offset: not None: key j (0-based within the segment) is visible to query i only if
            j <= i + q_offset.
        window: not None: and only if j > i + q_offset - window.
        limit: not None: and only if j is below a number that is data, one for each KV row.
        rows_see_a_key: proved: every query row sees a key of this segment, for all admitted sizes.
        hidden: proved: no query sees any key of it, so the segment can be dropped.
    """

    terms: tuple[MaskTerm, ...] = ()
    q_offset: Size | None = None
    window: Size | None = None
    limit: KeyLimit | None = None
    rows_see_a_key: bool = False
    hidden: bool = False


class MaskReader:
    """Reads the masks of the attentions of one graph; each mask is read once."""

    def __init__(self, sizes: Sizes) -> None:
        """Proves with what is known of the sizes of the graph; adds no guards."""
        self._read = Elements(sizes)
        self._prover = self._read.prover
        self._scores: dict[AttentionSite, Scores] = {}
        self._ancestors: dict[fx.Node, set[fx.Node]] = {}

    def segment(
        self, site: AttentionSite, start: Size, length: Size, rows: Rows | None = None
    ) -> SegmentMask:
        """What is proved of the keys [start, start + length), and the terms that remain.

        With `rows`, the KV rows of the segment, one number of keys a row is looked for as well.

        Example:
            For `mask = arange(K)[None] <= arange(Q)[:, None] + P` the keys [0, P) have no terms
            and no offset; the keys [P, K) have `q_offset == 0`.
        """
        scores = self._settled(site)
        box = scores.box(self._read, start, length)
        local = self._local(scores, box)
        if any(tree is Sight.HIDDEN for _, tree in local):
            return SegmentMask(hidden=True)
        limit, unlimited = self._limited(site, scores, local, start, rows)
        bounds, terms = self._split(scores, unlimited)
        if bounds.high is None and bounds.low is not None:
            high = vacuous(self._read, scores, box, start + length - 1).high
            bounds = Bounds(bounds.low, high)
        if bounds.window is not None and self._prover.known(-bounds.window):
            return SegmentMask(hidden=True)
        return SegmentMask(
            terms=terms,
            q_offset=None if bounds.high is None else sympy.expand(bounds.high - start),
            window=bounds.window,
            limit=limit,
            rows_see_a_key=self._sees(scores, [tree for _, tree in local], start, length),
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
        return " and ".join([*(f"mask {t.node.name}" for t in terms), *filter(None, [str(bounds)])])

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

    def _limited(
        self,
        site: AttentionSite,
        scores: Scores,
        local: list[tuple[MaskTerm | None, Tree]],
        start: Size,
        rows: Rows | None,
    ) -> tuple[KeyLimit | None, list[tuple[MaskTerm | None, Tree]]]:
        """The first condition that limits the keys of each KV row, and what is left of the masks.

        A row of huge finite values counts its keys by their masks, so those stay whole.
        """
        if rows is None or not self.finite(site):
            return None, local
        device = tensor(site.q.node).device
        for at, (term, tree) in enumerate(local):
            for limit, rest in limits(self._read, scores, tree, start, rows):
                if tensor(limit.node).device == device:
                    return limit, [*local[:at], (term, rest), *local[at + 1 :]]
        return None, local

    def _split(
        self, scores: Scores, local: Sequence[tuple[MaskTerm | None, Tree]]
    ) -> tuple[Bounds, tuple[MaskTerm, ...]]:
        """All masks of a segment as one pair of bounds and the terms that remain."""
        bounds = Bounds()
        terms: list[MaskTerm] = []
        for (term, tree), whole in zip(local, scores.trees, strict=True):
            found = self._expressed(scores, term, tree)
            joint = None if found is None else bounds.joined(found[0], self._prover)
            if found is not None and joint is not None:
                bounds = joint
                terms += found[1]
            else:
                assert term is not None, "torch's causal rule is a bound on key - query"
                same = self._terms(scores, term.node, [_shown(whole)], Bounds())
                terms += same or [term]
        return bounds, tuple(terms)

    def _expressed(
        self, scores: Scores, term: MaskTerm | None, tree: Tree
    ) -> tuple[Bounds, list[MaskTerm]] | None:
        """A tree as bounds and as smaller masks; None: the mask has to be read as it is."""
        conditions, rest = conjunction(tree)
        bounds = Bounds()
        left: list[Tree] = []
        for condition in conditions:
            found = self._bound(scores, condition)
            joint = None if found is None else bounds.joined(found, self._prover)
            bounds = joint or bounds
            left += [condition] if joint is None else []
        left += [] if rest is Sight.VISIBLE else [_shown(rest)]
        if not left:
            return bounds, []
        terms = None if term is None else self._terms(scores, term.node, left, bounds)
        return None if terms is None else (bounds, terms)

    def _terms(
        self, scores: Scores, mask: fx.Node, left: Sequence[Tree], bounds: Bounds
    ) -> list[MaskTerm] | None:
        """Bool tensors that say what is left of a mask beside bounds, None if there are none."""
        if None in left:
            return None
        one = self._same(scores, mask, reduce(both, left))
        if one is not None or bounds == Bounds():
            return None if one is None else [one]
        several = [self._same(scores, mask, tree) for tree in left]
        return [term for term in several if term] if None not in several else None

    def _bound(self, scores: Scores, condition: Branch) -> Bounds | None:
        if isinstance(condition.atom, Datum):
            return None
        expr = condition.atom.expr
        return bound_of(self._read, scores, expr if condition.then else -expr - 1)

    def _same(self, scores: Scores, mask: fx.Node, visible: Tree) -> MaskTerm | None:
        """The innermost bool tensor that a mask is made of and that says what `visible` says."""
        if mask not in self._ancestors:
            self._ancestors[mask] = _ancestors(mask)
        kinds: dict[Tree, MaskKind] = {visible: "keep", if_else(visible, False, True): "drop"}
        for (node, index), tree in self._read.memo.items():
            if tree not in kinds or node not in self._ancestors[mask]:
                continue
            whole = len(index) <= len(scores.index) and index == aligned(scores.index, shape(node))
            is_bool = tensor(node).dtype == torch.bool
            if whole and is_bool and tensor(node).device == tensor(mask).device:
                return MaskTerm(node, kinds[tree])
        return None

    def _sees(self, scores: Scores, trees: Sequence[Tree], start: Size, length: Size) -> bool:
        """True iff one of a few candidate keys is visible in every row, and in the segment."""
        box = scores.box(self._read, start, length)
        last = start + length - 1
        candidates = dict.fromkeys([start, last, *edges(scores, trees)])
        for key in islice(candidates, _MOST_CANDIDATES):
            if not (self._prover.always(key - start, box) and self._prover.always(last - key, box)):
                continue
            if all(self._visible_at(scores, tree, key, box) for tree in trees):
                return True
        return False

    def _visible_at(self, scores: Scores, tree: Tree, key: Size, box: Box) -> bool:
        if isinstance(scores.key, sympy.Symbol):
            tree = substitute(tree, self._read.atoms, scores.key, key)
        seen = self._prover.restrict(tree, box, shorten=False)
        return seen is Sight.VISIBLE or seen is Sight.SHIFTED


def _shown(tree: Tree) -> Tree | None:
    """Which scores are visible, as a tree of bools; None where some are neither nor."""
    if not set(leaves(tree)) <= {Sight.VISIBLE, Sight.HIDDEN}:
        return None
    return apply(lambda x: x is Sight.VISIBLE, tree)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack += current.all_input_nodes
    return seen

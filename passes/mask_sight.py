"""What the masks of one attention do to each of its scores, as decision trees over indices."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
import torch

from torch_cascade.compiler.graph import Size, shape, tensor
from torch_cascade.passes.mask_elements import Elements
from torch_cascade.passes.mask_leaves import Real, Unknown, constant
from torch_cascade.passes.mask_range import value_bounds
from torch_cascade.passes.mask_rules import aligned
from torch_cascade.passes.predicate import Branch, Index, Tree, apply, branches, given, leaves
from torch_cascade.passes.prover import Box, Range
from torch_cascade.passes.site import AttentionSite, MaskTerm

# A finite value hides a key as -inf does, in rows that see another key, once the scores it could
# not hide are so large that their dtype has no digit left for a softmax of them: ulp(1e9) = 64 in
# float32, ulp(6e4) = 32 in float16. A float64 score keeps its digits up to much larger values.
_HIDING = {torch.float16: -6e4, torch.float64: -1e30}
_HIDING_FLOAT32 = -1e9
# Added values within this leave a score, and a log-sum-exp, 2**-7 or better in float32.
_MODERATE = 2.0**16
# A fill from here on hides a key from whose score a bias of any possible position is not taken.
_HIDING_BIASED = -1e30


class Sight(enum.Enum):
    """What a mask does to one score."""

    VISIBLE = "visible"
    HIDDEN = "hidden"
    ABSORBED = "hidden by a finite value, if the row sees another key"
    SHIFTED = "a value is added that hides nothing"
    BIASED = "some value is added"


@dataclass(frozen=True)
class Scores:
    """The scores of a site.

    Attributes:
        index: the variable of each dim, [n, h, q, k] or [n, q, k]; 0 for a dim of size 1.
        keys: number of keys.
        terms: for each mask what it does (a tree of `Sight`); None is torch's causal rule.
    """

    index: Index
    keys: Size
    terms: tuple[tuple[MaskTerm | None, Tree], ...]

    @property
    def query(self) -> Size:
        """The variable of the query."""
        return self.index[-2]

    @property
    def key(self) -> Size:
        """The variable of the key, counted over the whole key axis."""
        return self.index[-1]

    @property
    def trees(self) -> list[Tree]:
        """What each mask does."""
        return [tree for _, tree in self.terms]

    def box(self, read: Elements, start: Size, length: Size) -> Box:
        """All indices whose key is in [start, start + length)."""
        if not isinstance(self.key, sympy.Symbol):
            return read.box
        return {**read.box, self.key: Range(start, start + length - 1)}

    def settled(self, hidden: bool) -> Scores:
        """With `ABSORBED` taken for hidden (every row sees a key) or for some bias."""
        to = Sight.HIDDEN if hidden else Sight.BIASED
        terms = [
            (term, apply(lambda x: to if x is Sight.ABSORBED else x, tree))
            for term, tree in self.terms
        ]
        return replace(self, terms=tuple(terms))

    @property
    def absorbs(self) -> bool:
        """True iff some score may be hidden by a finite value."""
        return any(Sight.ABSORBED in leaves(tree) for tree in self.trees)


def scores_of(read: Elements, site: AttentionSite) -> Scores:
    """The scores of a site with all of its masks read."""
    axes = site.axes or (("n", "h", "q", "d") if len(shape(site.node)) == 4 else ("n", "q", "d"))
    sizes = dict(zip(axes, shape(site.node), strict=True))
    sizes["k"] = shape(site.k.node)[site.k.axes.index("k")]
    index = tuple(read.axis(a, sizes[a]) for a in ("n", "h", "q", "k") if a in sizes)
    terms: list[tuple[MaskTerm | None, Tree]] = []
    if site.is_causal:
        causal = read.atoms.at_least_zero(index[-2] - index[-1])
        terms.append((None, apply(lambda x: Sight.VISIBLE if x else Sight.HIDDEN, causal)))
    shifts, hiding = _shifts(site, _HIDING.get(tensor(site.node).dtype, _HIDING_FLOAT32))
    for term, tree in zip(site.masks, added_values(read, site, index), strict=True):
        other = Sight.SHIFTED if term in shifts else Sight.BIASED
        terms.append((term, apply(partial(_sight, hiding=hiding, other=other), tree)))
    return Scores(index, sizes["k"], tuple(terms))


def _shifts(site: AttentionSite, hiding: float) -> tuple[list[MaskTerm], float]:
    """The masks that add moderate values only, and what a fill must be below to hide beside them.

    ALiBi is one. It may add much to far keys where their number is not known; then only fills that
    are larger by far hide.
    """
    shifts: list[MaskTerm] = []
    needed = hiding
    for term in site.masks:
        bounds = value_bounds(term.node) if term.kind == "add" else None
        if bounds is None or bounds[0] < max(-_MODERATE, hiding / 16):
            continue
        shifts.append(term)
        needed = hiding if bounds[1] <= _MODERATE and needed == hiding else _HIDING_BIASED
    if any(term.fill is not None and term.fill > needed for term in site.masks):
        return [], hiding
    return shifts, needed


def added_values(read: Elements, site: AttentionSite, index: Index) -> list[Tree]:
    """For each mask of a site the value that it adds to a score: trees of `Real` or unknown."""
    return [_values(read, site, term, index) for term in site.masks]


def is_moderate(leaf: Any) -> bool:
    """True iff an added value is -inf or loses little of the score it is added to."""
    if not isinstance(leaf, Real):
        return False
    return leaf.value == -math.inf or abs(leaf.value) <= _MODERATE


def conjunction(tree: Tree) -> tuple[list[Branch], Tree]:
    """A tree as "visible iff all of these, and the rest".

    Returns:
        Conditions (trees of bools with one atom) without which nothing is visible; and the tree
        that remains where they hold.
    """
    conditions: list[Branch] = []
    for branch in branches(tree):
        for holds in (True, False):
            if given(tree, branch.atom, not holds) is Sight.HIDDEN:
                conditions.append(replace(branch, then=holds, other=not holds))
                tree = given(tree, branch.atom, holds)
                break
    return conditions, tree


def _values(read: Elements, site: AttentionSite, term: MaskTerm, index: Index) -> Tree:
    sizes, dtype = shape(term.node), tensor(term.node).dtype
    if len(sizes) > len(index) or (dtype == torch.bool) != (term.kind != "add"):
        return Unknown.FLOAT
    tree = read.at(term.node, aligned(index, sizes))
    if term.kind == "add":
        return tree
    visible, hidden = constant(0.0), constant(_fill(site, term))
    return apply(lambda x: visible if x is (term.kind == "keep") else hidden, tree)


def _fill(site: AttentionSite, term: MaskTerm) -> float:
    """The score of a key hidden by a bool mask."""
    if term.fill is not None:
        return term.fill
    finite = site.fully_masked == "uniform" and all(m.fill is None for m in site.masks)
    return torch.finfo(torch.float32).min if finite else -math.inf


def _sight(leaf: Any, hiding: float, other: Sight) -> Sight:
    if not isinstance(leaf, Real):
        return other
    if leaf.value == 0:
        return Sight.VISIBLE
    if leaf.value == -math.inf:
        return Sight.HIDDEN
    return Sight.ABSORBED if leaf.value <= hiding else other

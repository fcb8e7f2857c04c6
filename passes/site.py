"""One attention in a functional ATen graph, however it was spelt: what matchers hand on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

# Axis names of an attention: batch rows, heads, queries, keys, features.
AxisName = Literal["n", "h", "q", "k", "d"]
MaskKind = Literal["keep", "drop", "add"]


@dataclass(frozen=True)
class Operand:
    """A tensor node with the meaning of each of its dims, e.g. `("n", "h", "d", "k")` for K^T."""

    node: fx.Node
    axes: tuple[AxisName, ...]


@dataclass(frozen=True)
class MaskTerm:
    """One mask of an attention; `node` broadcasts to the scores, [n, h, q, k] or [n, q, k].

    Attributes:
        node: the mask tensor.
        kind: "keep" (bool, True = visible), "drop" (bool, True = hidden: its score is -inf), "add"
            (floating, added to the scaled scores).
        fill: the finite score that "keep" and "drop" give a hidden key instead of -inf, after all
            scaling; None for -inf.
    """

    node: fx.Node
    kind: MaskKind
    fill: float | None = None


@dataclass(frozen=True)
class AttentionSite:
    """`softmax(cap(q k^T * scale) + masks) v` at one place of the graph; `cap` may be nothing.

    Attributes:
        node: the node whose value the attention is, [n, h, q, d] or [n, q, d].
        q, k, v: the operands. Heads of k and v may be fewer (GQA): query head h reads h // group.
            A batch size of 1 in k or v broadcasts over n.
        masks: every mask term; all apply.
        is_causal: torch's top-left causal rule, key j visible to query i iff j <= i.
        scale: a number, a node holding a SymFloat or a 0-d tensor, or None for 1/sqrt(d).
        softcap: c > 0: c * tanh(s / c) takes the place of each scaled score s, before the masks.
        sinks: scores of one more key that every query sees and whose value is zero, in the units of
            the scaled scores; a floating tensor that broadcasts to [n, h, q, 1] or [n, q, 1].
        fully_masked: what a row that sees no key (and whose sink is -inf, if there are sinks)
            yields: "zero" (SDPA), "nan" (a softmax over -inf only), "uniform" (finite fills: the
            mean of all values, if the sink is not above the fill).
        form: "sdpa" or "eager", for reports.
        axes: order of the dims of `node`, as an einsum gives [n, q, h, d]; None for [n, h, q, d]
            or [n, q, d].
    """

    node: fx.Node
    q: Operand
    k: Operand
    v: Operand
    masks: tuple[MaskTerm, ...] = ()
    is_causal: bool = False
    scale: float | fx.Node | None = None
    softcap: float | None = None
    sinks: fx.Node | None = None
    fully_masked: Literal["zero", "nan", "uniform"] = "zero"
    form: Literal["sdpa", "eager"] = "sdpa"
    axes: tuple[AxisName, ...] | None = None


_TAGS = "cascade_sites"


@dataclass(frozen=True)
class SiteTag:
    """Marks the node that holds the result of a rewritten site, for `verify=numeric`.

    Nodes are named as in the graph before the rewrite.

    Attributes:
        site: the attention.
        place: the node whose value the marked node has: the site, or what a fused kernel also does.
        q, k, v: the operands.
        q_features, k_features: the dims of q and k that are features.
        scale: of the scores; None for the default, or where it is no number.
    """

    site: str
    place: str
    q: str
    k: str
    v: str
    q_features: int
    k_features: int
    scale: float | None

    @classmethod
    def of(cls, site: AttentionSite) -> SiteTag:
        """The tag of a site that is about to be rewritten."""
        q, k, name = site.q, site.k, site.node.name
        features = q.axes.index("d"), k.axes.index("d")
        scale = site.scale if isinstance(site.scale, (int, float)) else None
        return cls(name, name, q.node.name, k.node.name, site.v.node.name, *features, scale)


def tags_of(node: fx.Node) -> tuple[SiteTag, ...]:
    """The sites whose result a node holds."""
    found: tuple[SiteTag, ...] = node.meta.get(_TAGS, ())
    return found


def tag(node: fx.Node, site: AttentionSite) -> None:
    """Mark a node that holds the result of a site, before that is replaced."""
    node.meta[_TAGS] = (*tags_of(node), SiteTag.of(site))


def move_tags(old: fx.Node, new: fx.Node, place: str | None = None) -> None:
    """Mark a node that stands for another; `place` names what else it computes."""
    tags = old.meta.pop(_TAGS, ())
    if tags:
        placed = (t if place is None else replace(t, place=place) for t in tags)
        new.meta[_TAGS] = (*tags_of(new), *placed)

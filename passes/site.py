"""One attention in a functional ATen graph, however it was spelt: what matchers hand on."""

from __future__ import annotations

from dataclasses import dataclass
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

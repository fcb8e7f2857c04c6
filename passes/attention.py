"""Finds every attention of a functional ATen graph: `cascade::sdpa` nodes and hand-written ones.

The graph is what AOTAutograd hands to Inductor's joint passes: mutation, autocast and the spelling
zoo of Python are already normalised there, so one attention has one shape per family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_cascade.compiler.graph import Sizes, shape, tensor
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.eager_attention import EagerMatcher
from torch_cascade.passes.failures import Failures
from torch_cascade.passes.site import AttentionSite, AxisName, MaskTerm, Operand

_SDPA = "cascade::sdpa"
_SDPA_AXES: dict[int, tuple[AxisName, ...]] = {3: ("n", "q", "d"), 4: ("n", "h", "q", "d")}


def find_attention(
    graph: fx.Graph, sizes: Sizes, failures: Failures | None = None
) -> list[AttentionSite | Declined]:
    """Every attention of a graph, in graph order.

    Args:
        graph: functional ATen with `meta["val"]` on every node. It is only read.
        sizes: what is known about the graph's sizes; no guard is added.
        failures: takes the exceptions of this package's own bugs; None raises them.

    Returns:
        A site for each attention that is proved to be one; a `Declined` for what looks like
        attention and is not provably the same function.
    """
    guarded = (failures or Failures()).guarded
    matcher = EagerMatcher(graph, sizes)
    found: list[AttentionSite | Declined | None] = []
    for node in graph.nodes:
        if _is_sdpa(node):
            found.append(guarded(node, sdpa_site, node, sizes))
        elif node.target is torch.ops.aten.bmm.default:
            found.append(guarded(node, matcher.match, node))
    return [site for site in found if site is not None]


def _is_sdpa(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == _SDPA


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op call by schema name, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    declared = node.target._schema.arguments
    bound = {arg.name: arg.default_value for arg in declared if arg.has_default_value()}
    bound.update(zip((arg.name for arg in declared), node.args, strict=False))
    return {**bound, **node.kwargs}


def sdpa_site(node: fx.Node, sizes: Sizes) -> AttentionSite | Declined:
    """Read a `cascade::sdpa` call; SDPA yields zeros for a row that sees no key."""
    args = bound_arguments(node)
    q, k, v, mask = args["q"], args["k"], args["v"], args["attn_mask"]
    ranks = tuple(tensor(operand).ndim for operand in (q, k, v))
    axes = _SDPA_AXES.get(ranks[0])
    if axes is None or len(set(ranks)) > 1:
        return Declined(Reason.RANK, node.name, f"q, k, v of ranks {ranks}")
    if not all(sizes.equal(a, b) for a, b in zip(shape(q)[:-1], shape(node)[:-1], strict=True)):
        return Declined(Reason.RANK, node.name, "q is broadcast over the batch or heads of k")
    keys: tuple[AxisName, ...] = tuple("k" if axis == "q" else axis for axis in axes)
    return AttentionSite(
        node=node,
        q=Operand(q, axes),
        k=Operand(k, keys),
        v=Operand(v, keys),
        masks=() if mask is None else (mask_term(mask),),
        is_causal=args["is_causal"],
        scale=args["scale"],
    )


def mask_term(mask: fx.Node) -> MaskTerm:
    """A mask as SDPA reads it: bool keeps where True, floating is added."""
    return MaskTerm(mask, "keep" if tensor(mask).dtype is torch.bool else "add")

"""Strides: what replaces a node must lie in memory as the node did."""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.torch_version import TorchVersion

from torch_cascade.compiler.graph import Emitter, Size, Sizes, product, shape, size_expr, tensor
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import ONE

aten = torch.ops.aten

Order = tuple[int, ...]

# What a size that only data tells is taken for where an order of strides is guessed.
_SOME = 193

# Older versions of Inductor fail to sort strides of which only data tells how they compare.
SORTS_UNKNOWN_STRIDES = TorchVersion(torch.__version__) >= "2.13"


def output_order(node: fx.Node, sizes: Sizes) -> Order | Declined:
    """The dims of a dense tensor from the largest stride to the smallest.

    SDPA's output lies as its query does ([n, q, h, d] in memory for a transposed query), and a
    later `view` of the user's may rely on it. A tensor with gaps or overlaps is declined.
    """
    strides = [size_expr(s) for s in tensor(node).stride()]
    dims = shape(node)
    guesses = [_guess(s, sizes) for s in strides]
    order = sorted(range(len(dims)), key=lambda d: (-guesses[d], dims[d] == 1, d))
    expected: Size = ONE
    for d in reversed(order):
        if dims[d] == 1:
            continue
        if not sizes.equal(strides[d], expected):
            detail = f"sizes {list(dims)} with strides {strides} are not dense"
            return Declined(Reason.LAYOUT, node.name, detail)
        expected = expected * dims[d]
    if any(map(free_unbacked_symbols, strides)) and not SORTS_UNKNOWN_STRIDES:
        detail = f"only data tells the strides {strides}, which torch 2.13 and newer can keep"
        return Declined(Reason.LAYOUT, node.name, detail)
    return tuple(order)


def _guess(stride: Size, sizes: Sizes) -> int:
    """The stride now, or what it might be where only data tells: enough to try an order."""
    hints = {s: sizes.hint(s) for s in stride.free_symbols}
    return int(stride.xreplace({s: _SOME if hint is None else hint for s, hint in hints.items()}))


def laid_out(emit: Emitter, node: fx.Node, dims: Order, order: Order) -> fx.Node:
    """A contiguous tensor with its dims rearranged, and its memory with them.

    Args:
        emit: where to write.
        node: a contiguous tensor.
        dims: for each dim of the result, the dim of `node` it is.
        order: the result's dims from the largest stride to the smallest.
    """
    memory = [dims[d] for d in order]
    if memory != sorted(memory):
        permuted = emit.call(aten.permute.default, node, memory)
        node = emit.call(aten.clone.default, permuted, memory_format=torch.contiguous_format)
    place = [order.index(d) for d in range(len(order))]
    return node if place == sorted(place) else emit.call(aten.permute.default, node, place)


def pinned(emit: Emitter, node: fx.Node, order: Order) -> fx.Node:
    """A dense tensor that stays in its order where only data tells its strides.

    Inductor keeps the strides of what a graph returns, but not those: it lays the tensor out as it
    likes, and a `view` behind a graph break fails.

    Args:
        emit: where to write.
        node: a dense tensor.
        order: its dims from the largest stride to the smallest.
    """
    dims = shape(node)
    if not any(map(free_unbacked_symbols, dims)):
        return node
    strides = [product(dims[d] for d in order[order.index(own) + 1 :]) for own in range(len(dims))]
    return emit.call(inductor_prims.force_stride_order, node, strides)

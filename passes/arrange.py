"""Emits a tensor whose dims are indexed by digits as a tensor with one dim an axis."""

from __future__ import annotations

import torch
from torch import fx

from torch_cascade.compiler.graph import Emitter, product, shape
from torch_cascade.passes.axes import Dims

aten = torch.ops.aten


def arranged(emit: Emitter, node: fx.Node, dims: Dims, axes: str) -> fx.Node:
    """A node as a tensor with one dim for each axis of `axes`, its digits major first.

    Sliced to the run its dims use, split into digits, sorted, joined; nothing is emitted where it
    is so already.
    """
    for index, (dim, size) in enumerate(zip(dims, shape(node), strict=True)):
        if dim.offset != 0 or not emit.sizes.equal(dim.extent, size):
            end = dim.offset + dim.extent
            node = emit.call(aten.slice.Tensor, node, index, dim.offset, end)
    digits = [digit for dim in dims for digit in dim.digits]
    hint = emit.sizes.hint
    wanted = [
        sorted((d for d in digits if d.axis == axis), key=lambda d: -(hint(d.stride) or 0))
        for axis in axes
    ]
    if [list(dim.digits) for dim in dims] == wanted:
        return node
    order = [digits.index(d) for group in wanted for d in group]
    if any(len(dim.digits) != 1 for dim in dims):
        node = emit.call(aten.reshape.default, node, [d.size for d in digits])
    if order != sorted(order):
        node = emit.call(aten.permute.default, node, order)
    return emit.call(aten.reshape.default, node, [product(d.size for d in g) for g in wanted])

"""What several Triton kernels read, written to memory once.

Inductor computes an element-wise node wherever it is read. A Triton kernel cannot be given one:
what it reads has to lie in memory, and Inductor writes the node, or the view of it, anew for each
argument that takes it. So a mask that all layers share would be written once a layer. A node whose
metadata says so is written where it is made, and what reads it, or a view of it, reads that. (A
copy alone is element-wise, too, and would be written once a layer like what it copies.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

from torch_cascade.compiler.graph import Emitter, shape, tensor

aten = torch.ops.aten
prims = torch.ops.prims

REALIZE = "inductor_realize_to_strides"
"""In a node's `meta`: Inductor writes it to memory, in the strides of its value."""

# Beside element-wise ops, what Inductor computes where it is read (joined parts not always). A
# matrix product or a sort is not among them: its result is in memory.
_COMPUTED = frozenset(
    {
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.full.default,
        aten.gather.default,
        aten.index.Tensor,
        prims.iota.default,
    }
)
_CUTS = frozenset({aten.slice.Tensor, aten.select.int, aten.diagonal.default})


def viewed(node: fx.Node) -> fx.Node | None:
    """What a node is a view of; None for any other node."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if not any(argument.alias_info for argument in node.target._schema.arguments):
        return None
    return node.all_input_nodes[0]


def is_part_of_computed(node: fx.Node) -> bool:
    """True for a view of some elements of what Inductor computes where it is read."""
    cut = False
    while (source := viewed(node)) is not None:
        cut |= node.target in _CUTS
        node = source
    return cut and _is_computed(node)


def packed(emit: Emitter, node: fx.Node) -> fx.Node:
    """A copy of a view, so that what it is a view of need not be written whole.

    Where the view repeats elements the copy is of one of each, and repeated again.
    """
    sizes, strides = shape(node), tensor(node).stride()
    repeated = [dim for dim, stride in enumerate(strides) if stride == 0 and sizes[dim] != 1]
    copy = node
    for dim in repeated:
        copy = emit.call(aten.slice.Tensor, copy, dim, 0, 1)
    copy = emit.call(aten.clone.default, copy, memory_format=torch.contiguous_format)
    return emit.call(aten.expand.default, copy, list(sizes)) if repeated else copy


def written_once(graph: fx.Graph, since: Set[fx.Node]) -> list[fx.Node]:
    """The nodes that kernels would have written for each of several arguments; edits nothing.

    Args:
        graph: functional ATen, lowered.
        since: nodes that stood there before, whose kernels are the user's own.
    """
    readers: Counter[fx.Node] = Counter()
    for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        if node not in since:
            readers.update(_whole(read) for read in _read(node))
    return [node for node, count in readers.items() if count > 1 and _is_computed(node)]


def _read(kernel: fx.Node) -> list[fx.Node]:
    """The tensors that a kernel reads only, one for each argument."""
    arguments: Any = kernel.kwargs["kwargs"]
    written: Any = kernel.kwargs["tensors_to_clone"]
    names = [name for name in arguments if name not in written]
    return [arguments[name] for name in names if isinstance(arguments[name], fx.Node)]


def _whole(node: fx.Node) -> fx.Node:
    """The node of which this is a view of all elements."""
    while node.target not in _CUTS and (source := viewed(node)) is not None:
        node = source
    return node


def _is_computed(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target in _COMPUTED or torch.Tag.pointwise in target.tags

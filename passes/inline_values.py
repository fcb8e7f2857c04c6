"""Values of inlined nodes that must be said in the very symbols of their arguments.

A trace knows one name for sizes that are equal, the graph may know two (the batch of q and that of
a suffix, tied by a guard). Where a buffer is allocated and where a Triton kernel's arguments are
recorded the names matter: Inductor compares strides as expressions, and copies what it cannot
prove to be laid out alike.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch._guards import tracing
from torch._higher_order_ops.triton_kernel_wrap import (
    triton_kernel_wrapper_functional as kernel_call,
)

from torch_cascade.compiler.graph import fake_mode, value

aten = torch.ops.aten


def settle(node: fx.Node) -> None:
    """Give a copied node the value that follows from its arguments, where names matter."""
    if node.target in (aten.sym_size.int, aten.sym_stride.int):
        node.meta["val"] = _measure(node)
    elif node.target is aten.empty.memory_format:
        node.meta["val"] = _dense(node)
    elif node.target is operator.getitem and _source(node).target is kernel_call:
        written = cast("dict[str, fx.Node]", _source(node).kwargs["kwargs"])
        node.meta["val"] = value(written[cast("str", node.args[1])])
    if "eager_input_vals" in node.meta:
        node.meta["eager_input_vals"] = fx.map_arg((node.args, node.kwargs), value)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _measure(node: fx.Node) -> Any:
    measured, dim = value(_source(node)), node.args[1]
    sizes = measured.shape if node.target is aten.sym_size.int else measured.stride()
    return sizes[dim]


def _dense(node: fx.Node) -> torch.Tensor:
    """An allocated buffer: a trace's kernels ask for contiguous ones only."""
    old = value(node)
    sizes = cast("list[int | fx.Node]", node.args[0])
    shape = [value(size) if isinstance(size, fx.Node) else size for size in sizes]
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    strides = strides[::-1] if shape else []
    with tracing(None), fake_mode(node.graph):
        return torch.empty_strided(shape, strides, dtype=old.dtype, device=old.device)

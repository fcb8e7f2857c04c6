"""Index tensors read as digits: `index_select(x, 0, arange(B).repeat_interleave(T))` is a view.

An index built in the graph from iota by expand, reshape, floor division and remainder, or held in
a constant that spells a mixed radix, picks rows by digits of the position. Anything else (a
gather by data) is not readable, and the tensor it makes is a base of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_cascade.compiler.graph import Sizes, shape, size_expr
from torch_cascade.passes.axes import Digit, Dim, Dims, distribute, quotient, split_digit
from torch_cascade.passes.views import argument, rule, source_of

aten = torch.ops.aten
prims = torch.ops.prims


@rule(aten.index_select.default)
def _index_select(node: fx.Node, dims: Dims, sizes: Sizes) -> tuple[fx.Node, Dims] | None:
    source, dim, index = node.args
    assert isinstance(source, fx.Node) and isinstance(dim, int) and isinstance(index, fx.Node)
    return _looked_up(source, dims, dim % len(dims), index, sizes)


@rule(aten.index.Tensor)
def _index(node: fx.Node, dims: Dims, sizes: Sizes) -> tuple[fx.Node, Dims] | None:
    source, indices = node.args
    assert isinstance(source, fx.Node) and isinstance(indices, (list, tuple))
    used = [(d, i) for d, i in enumerate(indices) if isinstance(i, fx.Node)]
    if len(used) != 1 or len(shape(used[0][1])) != 1:
        return None
    return _looked_up(source, dims, used[0][0], used[0][1], sizes)


def _looked_up(
    source: fx.Node, dims: Dims, dim: int, index: fx.Node, sizes: Sizes
) -> tuple[fx.Node, Dims] | None:
    position = dims[dim]
    if not index_is_integer(index) or not position.covers(shape(index)[0], sizes):
        return None
    row = read_index(index, position, sizes)
    if row is None or not sizes.at_least(row.offset, 0):
        return None  # a negative index counts from the end
    return (source, (*dims[:dim], row, *dims[dim + 1 :]))


def index_is_integer(index: fx.Node) -> bool:
    """True iff the index selects by number (a bool mask selects by data)."""
    dtype: torch.dtype = index.meta["val"].dtype
    return not dtype.is_floating_point and dtype != torch.bool


def read_index(index: fx.Node, position: Dim, sizes: Sizes) -> Dim | None:
    """The value of a 1-D index tensor at `position`: digits and an offset, None if unreadable."""
    return read_position(index, (position,), sizes)


def read_position(index: fx.Node, dims: Dims, sizes: Sizes) -> Dim | None:
    """The value of an index tensor of any rank whose dims are indexed by `dims`."""
    node = index
    while True:
        if node.target in _VALUES:
            return _VALUES[node.target](node, dims, sizes)
        if node.op == "get_attr":
            return _constant(node, dims, sizes)
        if node.target in _CONVERSIONS:
            if not _holds_the_same(node):
                return None
            (node,) = node.all_input_nodes
            continue
        source = source_of(node, dims, sizes)
        if source is None:
            return None
        node, dims = source


def _holds_the_same(node: fx.Node) -> bool:
    """Whether a conversion keeps its source's integers: on another device, or in a wide dtype.

    `torch.arange(n).to("cuda")` is both. (Apart from `views`: K and V must be where q is.)
    """
    (source,) = node.all_input_nodes
    if not index_is_integer(source):
        return False
    given, made = source.meta["val"].dtype, node.meta["val"].dtype
    return bool(given == made or (made == torch.int64 and given != torch.uint64))


def _only_dim(dims: Dims) -> Dim | None:
    """The single dim that carries digits, if at most one does."""
    carrying = [d for d in dims if d.digits or d.offset != 0]
    if len(carrying) > 1:
        return None
    return carrying[0] if carrying else Dim()


def _iota(node: fx.Node, dims: Dims, sizes: Sizes) -> Dim | None:
    start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    if step != 1:
        return None
    return Dim(dims[0].digits, dims[0].offset + size_expr(start))


def _arange(node: fx.Node, dims: Dims, sizes: Sizes) -> Dim | None:
    start = node.args[0] if len(node.args) > 1 else 0
    if argument(node, 2, "step", 1) != 1:
        return None
    return Dim(dims[0].digits, dims[0].offset + size_expr(start))


def _full(node: fx.Node, dims: Dims, sizes: Sizes) -> Dim | None:
    value = node.args[1]
    return Dim((), size_expr(value)) if _is_size(value) else None


def _divided(node: fx.Node, dims: Dims, sizes: Sizes) -> Dim | None:
    floors = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
    parts = _by_divisor(node, dims, sizes) if floors else None
    return None if parts is None else parts[0]


def _remainder(node: fx.Node, dims: Dims, sizes: Sizes) -> Dim | None:
    parts = _by_divisor(node, dims, sizes)
    return None if parts is None else parts[1]


def _by_divisor(node: fx.Node, dims: Dims, sizes: Sizes) -> tuple[Dim, Dim] | None:
    """(value // divisor, value % divisor) of an index that is one run of digits from 0."""
    dividend, divisor = node.args[0], node.args[1]
    if not isinstance(dividend, fx.Node) or not _is_size(divisor) or len(shape(dividend)) != 1:
        return None
    value = read_index(dividend, dims[0], sizes)
    size = size_expr(divisor)
    if value is None or value.offset != 0 or not value.digits:
        return None
    count = quotient(value.extent, size, sizes)
    if count is None or not sizes.at_least(size, 1):
        return None
    parts = distribute(value.digits, [count, size], sizes)
    return None if parts is None else (parts[0], parts[1])


def _is_size(arg: Any) -> bool:
    if isinstance(arg, fx.Node):
        return isinstance(arg.meta.get("val"), (int, torch.SymInt))
    return isinstance(arg, int)


def _constant(node: fx.Node, dims: Dims, sizes: Sizes) -> Dim | None:
    """A constant index tensor: its values tested against `offset + (position // run) % count`."""
    module = node.graph.owning_module
    assert module is not None and isinstance(node.target, str)
    tensor = getattr(module, node.target)
    dim = _only_dim(dims)
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1 or dim is None:
        return None
    if len(dim.digits) != 1 or not dim.covers(size_expr(tensor.shape[0]), sizes):
        return None
    with unset_fake_temporarily():  # Inductor's fake mode may be active around the passes
        values = [int(v) for v in tensor.tolist()]
    return _mixed_radix(values, dim.digits[0])


def _mixed_radix(values: list[int], digit: Digit) -> Dim | None:
    base = values[0]
    run = next((i for i, v in enumerate(values) if v != base), len(values))
    count = max(values) - base + 1
    period = run * count
    if len(values) % period:
        return None
    if any(v != base + (i // run) % count for i, v in enumerate(values)):
        return None
    parts = (len(values) // period, count, run)
    _, middle, _ = split_digit(digit, [size_expr(s) for s in parts])
    return Dim((middle,) if count > 1 else (), size_expr(base))


_CONVERSIONS = (prims.device_put.default, prims.convert_element_type.default)
_VALUES = {
    prims.iota.default: _iota,
    aten.full.default: _full,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.div.Tensor_mode: _divided,
    aten.floor_divide.default: _divided,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Tensor: _remainder,
}

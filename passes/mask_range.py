"""Bounds of the values of a tensor that a graph computes from positions and numbers alone.

ALiBi is such a tensor: slopes, made of powers of two, times positions. Its elements are no leaves
that a mask tree could hold, but it matters that none of them is -inf: what such a bias is added to
stays visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import fx

from torch_cascade.compiler.graph import Size, size_expr, tensor
from torch_cascade.passes.views import argument

aten = torch.ops.aten
prims = torch.ops.prims

Bounds: TypeAlias = tuple[float, float]

_MOST_NODES = 64
# As in `mask_leaves`: so many elements fit into no machine.
_LARGEST_SIZE = 2**40
_MOVES = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.lift_fresh_copy.default,
        aten.permute.default,
        aten.repeat.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten._unsafe_view.default,
        aten.view.default,
        prims.convert_element_type.default,
    }
)


def value_bounds(node: fx.Node) -> Bounds | None:
    """Numbers that no element of a tensor is below or above; None where they are not known.

    They are bounds of the exact values: rounding may pass them by a few units in the last place.
    No element is NaN or infinite.
    """
    return _Walk().bounds(node)


class _Walk:
    """One walk up from a tensor; every node is looked at once."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, Bounds | None] = {}

    def bounds(self, arg: Any) -> Bounds | None:
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return float(arg), float(arg)
        if not isinstance(arg, fx.Node) or not isinstance(arg.meta.get("val"), torch.Tensor):
            return None
        if arg not in self.known:
            if len(self.known) >= _MOST_NODES:
                return None
            self.known[arg] = None
            self.known[arg] = _within(self._of(arg), tensor(arg).dtype)
        return self.known[arg]

    def _of(self, node: fx.Node) -> Bounds | None:
        if node.target in _MOVES:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            truncates = tensor(source).dtype.is_floating_point
            truncates = truncates and not tensor(node).dtype.is_floating_point
            return None if truncates else self.bounds(source)
        if node.target is prims.iota.default:
            return _iota(node)
        if node.target in (aten.full.default, aten.scalar_tensor.default):
            return self.bounds(node.args[-1])
        if node.target is aten.cat.default:
            pieces = node.args[0]
            assert isinstance(pieces, Sequence)
            return _hull([self.bounds(piece) for piece in pieces])
        function = _ARITHMETIC.get(node.target)
        if function is None or "alpha" in node.kwargs or "rounding_mode" in node.kwargs:
            return None
        given = [self.bounds(arg) for arg in node.args]
        return None if None in given else function(*given)


def _within(found: Bounds | None, dtype: torch.dtype) -> Bounds | None:
    """The bounds, if a dtype holds all values between them; very small ones may round to zero."""
    if found is None or dtype == torch.bool or dtype.is_complex:
        return None
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    low, high = found
    if not info.min <= low <= high <= info.max:
        return None
    tiny = info.tiny if isinstance(info, torch.finfo) else 0.0
    return (0.0 if 0 < low < tiny else low), (0.0 if -tiny < high < 0 else high)


def _hull(found: Sequence[Bounds | None]) -> Bounds | None:
    known = [bounds for bounds in found if bounds is not None]
    if len(known) < len(found) or not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _iota(node: fx.Node) -> Bounds | None:
    start, step = argument(node, 1, "start"), argument(node, 2, "step")
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    last = start + step * (_most(argument(node, 0, "length")) - 1)
    return float(min(start, last)), float(max(start, last))


def _most(length: Any) -> int:
    expr: Size = size_expr(length)
    return max(int(expr), 1) if expr.is_number else _LARGEST_SIZE


def _corners(
    function: Callable[[float, float], float],
) -> Callable[[Bounds, Bounds], Bounds | None]:
    """Of a function that is monotone in each argument: its extremes are at the corners."""

    def bounds(a: Bounds, b: Bounds) -> Bounds | None:
        try:
            values = [function(x, y) for x, y in product(a, b)]
        except OverflowError:
            return None
        return min(values), max(values)

    return bounds


def _quotient(a: Bounds, b: Bounds) -> Bounds | None:
    return None if b[0] <= 0 <= b[1] else _corners(lambda x, y: x / y)(a, b)


def _power(a: Bounds, b: Bounds) -> Bounds | None:
    return _corners(lambda x, y: x**y)(a, b) if a[0] > 0 else None


_ARITHMETIC: dict[Any, Callable[..., Bounds | None]] = {
    aten.add.Tensor: _corners(lambda x, y: x + y),
    aten.sub.Tensor: _corners(lambda x, y: x - y),
    aten.mul.Tensor: _corners(lambda x, y: x * y),
    aten.div.Tensor: _quotient,
    aten.neg.default: lambda a: (-a[1], -a[0]),
    aten.abs.default: lambda a: (0.0, max(abs(a[0]), abs(a[1]))),
    aten.reciprocal.default: lambda a: _quotient((1.0, 1.0), a),
    aten.exp2.default: lambda a: _power((2.0, 2.0), a),
    aten.pow.Scalar: _power,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
}

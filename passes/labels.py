"""Which axis of an attention each dim of a tensor is, followed through ops that only rearrange.

The dims of a `bmm` of an attention are known by their place. From there, views, permutes, copies
and expands that expand nothing are crossed up and down with the digits of `passes/axes.py`, until a
tensor is reached whose dims are batch rows, heads, queries (or keys) and features, one each.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_cascade.compiler.graph import Sizes, shape
from torch_cascade.passes.axes import Digit, Dim, Dims, normalise, regroup
from torch_cascade.passes.site import AxisName
from torch_cascade.passes.views import RULES, Source, argument

aten = torch.ops.aten

SAME_ORDER = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.view.default,
    }
)
_SELECTING = frozenset({aten.expand.default, aten.slice.Tensor})
_PERMUTING = frozenset({aten.permute.default, aten.transpose.int})


def same_shape(a: fx.Node, b: fx.Node, sizes: Sizes) -> bool:
    """True iff two tensors provably have the same sizes."""
    first, second = shape(a), shape(b)
    return len(first) == len(second) and all(map(sizes.equal, first, second))


def rearranges(node: fx.Node, sizes: Sizes) -> bool:
    """True iff every element of the input appears in the output exactly once, unchanged."""
    if node.op != "call_function":
        return False
    if node.target in _SELECTING:
        source = node.args[0]
        whole_steps = node.target is aten.expand.default or argument(node, 4, "step", 1) == 1
        return isinstance(source, fx.Node) and whole_steps and same_shape(node, source, sizes)
    return node.target in SAME_ORDER or node.target in _PERMUTING


def above(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    """The input of a rearranging op and its dims, given the dims of the output."""
    if not rearranges(node, sizes):
        return None
    return RULES[node.target](node, dims, sizes)


def below(node: fx.Node, dims: Dims, sizes: Sizes) -> Dims | None:
    """Dims of the output of a rearranging op, given those of its input."""
    source = node.args[0]
    if not rearranges(node, sizes) or not isinstance(source, fx.Node):
        return None
    if node.target in _SELECTING:
        return dims
    if node.target is aten.permute.default:
        return tuple(dims[d] for d in argument(node, 1, "dims"))
    if node.target is aten.transpose.int:
        swapped = list(dims)
        a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        swapped[a], swapped[b] = swapped[b], swapped[a]
        return tuple(swapped)
    return regroup(dims, shape(source), shape(node), sizes)


def labels(dims: Dims, axes: tuple[AxisName, ...], sizes: Sizes) -> tuple[AxisName, ...] | None:
    """Axis names of a tensor whose dims are exactly `axes` in some order, else None.

    `dims` are reached by rearrangement alone: no digit is lost, none has an offset. A dim of size 1
    carries no digit and takes a name that is left over: among dims of size 1 the
    choice means nothing. The heads are the minor digit of the batch of a `bmm`.
    """
    joined = [normalise(dim.digits, sizes) for dim in dims]
    if len(dims) != len(axes) or any(len(digits) > 1 for digits in joined):
        return None
    digits = [run[0] if run else None for run in joined]
    names = [None if d is None else _name(d, digits, "h" in axes) for d in digits]
    known = [name for name in names if name is not None]
    left = [axis for axis in axes if axis not in known]
    if len(set(known)) != len(known) or len(known) + len(left) != len(axes):
        return None
    filled = iter(left)
    return tuple(next(filled) if name is None else name for name in names)


def _name(digit: Digit, digits: list[Digit | None], heads: bool) -> AxisName | None:
    if digit.axis != "n" or not heads:
        return digit.axis
    batch = [i for i, d in enumerate(digits) if d is not None and d.axis == "n"]
    if len(batch) == 1:
        # One row or one head: the other of the two is the dim of size 1 on that side.
        return "h" if None in digits[: batch[0]] else "n"
    return "h" if digit.stride == 1 else "n"


def broadcast(node: fx.Node, onto: fx.Node, dims: Dims, sizes: Sizes) -> Dims | None:
    """Dims of a tensor that broadcasts to `onto` (of dims `dims`); None where it may not."""
    own, full = shape(node), shape(onto)
    skip = len(full) - len(own)
    if skip < 0:
        return None
    result: list[Dim] = []
    for size, out, dim in zip(own, full[skip:], dims[skip:], strict=True):
        if size != 1 and not sizes.equal(size, out):
            return None
        result.append(Dim() if size == 1 else dim)
    return tuple(result)

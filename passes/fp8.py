"""Keys and values stored as float8_e4m3fn: `k8.to(bfloat16) * scale` read as k8 and its scale.

Converting fp8 to any wider floating dtype is exact, so a base in fp8 with conversions below it is
read as it is stored. A factor that depends on nothing but the head is carried beside it: eager code
rounds the product to its dtype, the kernels do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_cascade.compiler.graph import Sizes, shape, tensor, value
from torch_cascade.passes.axes import Dim, Dims, normalise, same_digits

FP8 = torch.float8_e4m3fn
_EXACT = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Scale:
    """A factor of K or V: a number, or a tensor that depends on the head at most.

    Attributes:
        factor: the number, or the node of the tensor (float32, bfloat16 or float16).
        dims: how each dim of the tensor is indexed by digits of h; empty for a number.
    """

    factor: fx.Node | float
    dims: Dims = ()

    def fits(self, heads: Dims, sizes: Sizes) -> bool:
        """True iff the factor is one number, or one for each head of a base of these dims."""
        own = normalise([d for dim in self.dims for d in dim.digits], sizes)
        every = [d for dim in heads for d in dim.digits if d.axis == "h"]
        return not own or same_digits(own, normalise(every, sizes), sizes.equal)


def exact_casts(casts: tuple[torch.dtype, ...]) -> bool:
    """True iff fp8 survives these conversions unchanged, and there is one."""
    return bool(casts) and all(dtype in _EXACT for dtype in casts)


def scaled(node: fx.Node, dims: Dims, sizes: Sizes) -> Iterator[tuple[fx.Node, Dims, Scale]]:
    """Each reading of a product as (the node that is scaled, its dims, the factor)."""
    if tensor(node).dtype not in _EXACT:
        return
    left, right = node.args
    for data, factor in ((left, right), (right, left)):
        scale = _scale(factor, node, dims, sizes)
        if scale is None or not isinstance(data, fx.Node):
            continue
        own = _broadcast(data, node, dims, sizes)
        if own is not None and tensor(data).dtype in _EXACT:
            yield data, own, scale


def _scale(factor: Any, node: fx.Node, dims: Dims, sizes: Sizes) -> Scale | None:
    if isinstance(factor, (int, float)):
        return Scale(float(factor))
    if not isinstance(factor, fx.Node) or not isinstance(value(factor), torch.Tensor):
        return None
    held = tensor(factor)
    own = _broadcast(factor, node, dims, sizes)
    if own is None or held.dtype not in _EXACT or held.device != tensor(node).device:
        return None
    per_head = all(d.axis == "h" for dim in own for d in dim.digits)
    whole = all(dim.covers(size, sizes) for dim, size in zip(own, shape(factor), strict=True))
    return Scale(factor, own) if per_head and whole else None


def _broadcast(node: fx.Node, onto: fx.Node, dims: Dims, sizes: Sizes) -> Dims | None:
    """Dims of an operand that broadcasts to a product indexed by `dims`."""
    if not isinstance(value(node), torch.Tensor):
        return None
    own, full = shape(node), shape(onto)
    skip = len(full) - len(own)
    found: list[Dim] = []
    for size, out, dim in zip(own, full[skip:], dims[skip:], strict=True):
        if size != 1 and not sizes.equal(size, out):
            return None
        found.append(Dim() if size == 1 else dim)
    return tuple(found)

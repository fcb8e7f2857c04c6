"""Where the values of K or V are: up from an operand, through views and cats, to its bases.

A piece is a run of keys of one operand and the node that holds it. The walk goes up through the
rules of `passes/views.py`; a cat along the key axis splits a piece into parts. An op without a
rule, or one that does not line up, ends it: its node is a *base*, which is always right, only
perhaps not shared. A cat below which nothing is shared any further is a base itself, so a cache
that grows by cat is read as one tensor. A lookup of pages ends at its pool (`passes/pages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import sympy
import torch
from torch import fx

import torch_cascade.passes.index_map  # noqa: F401  (registers the rules of index ops)
from torch_cascade.compiler.graph import Size, Sizes, product, shape, tensor
from torch_cascade.passes.axes import ZERO, Digit, Dim, Dims, normalise, same_digits, whole
from torch_cascade.passes.fp8 import FP8, Scale, exact_casts, scaled
from torch_cascade.passes.pages import Pages, looked_up
from torch_cascade.passes.site import AxisName, Operand
from torch_cascade.passes.views import argument, source_of, split_dim

aten = torch.ops.aten
prims = torch.ops.prims

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CASTS = (prims.convert_element_type.default, aten._to_copy.default)


@dataclass(frozen=True)
class Piece:
    """A run of keys of one operand: where its values are before any batch expansion.

    Attributes:
        base: the node that holds them; with `pages`, the pool they are looked up in.
        dims: how each dim of `base` is indexed by digits of n, h, k and d.
        casts: dtypes to convert to on the way down, in order.
        pages: the table of the lookup; None for a base that is read as it is.
        keys: how many keys are used, the first ones; None for all.
        scale: a factor on the way down, of an fp8 base only.
    """

    base: fx.Node
    dims: Dims
    casts: tuple[torch.dtype, ...] = ()
    pages: Pages | None = None
    keys: Size | None = None
    scale: Scale | None = None

    def digits(self, axis: AxisName) -> tuple[Digit, ...]:
        """The digits of one axis that this piece depends on, in the order of its dims."""
        dims = self.dims if self.pages is None else (*self.pages.dims, *self.dims)
        return tuple(d for dim in dims for d in dim.digits if d.axis == axis)

    @property
    def stored_length(self) -> Size:
        """Number of keys that the base (or the table) holds."""
        return product(d.size for d in self.digits("k"))

    @property
    def length(self) -> Size:
        """Number of keys."""
        return self.stored_length if self.keys is None else self.keys

    @property
    def is_fp8(self) -> bool:
        """True iff the base is stored as fp8 and reaches the attention unrounded."""
        return tensor(self.base).dtype == FP8 and exact_casts(self.casts)


def pieces_of(operand: Operand, batch: Size, sizes: Sizes) -> list[Piece]:
    """The pieces of an operand in key order; a batch of 1 that serves `batch` rows is shared."""
    dims: list[Dim] = []
    for axis, size in zip(operand.axes, shape(operand.node), strict=True):
        broadcasts = axis == "n" and size == 1 and batch != 1
        dims.append(Dim() if broadcasts else whole(axis, size))
    return _walk(Piece(operand.node, tuple(dims)), sizes)


def _walk(piece: Piece, sizes: Sizes) -> list[Piece]:
    """The pieces a piece is made of, in key order."""
    node = piece.base
    if node.op == "placeholder":
        return [_without_stride_zero(piece)]
    if node.op != "call_function":
        return [piece]
    if node.target is aten.cat.default:
        return _walk_cat(piece, sizes)
    if node.target is aten.mul.Tensor:
        return _walk_scaled(piece, sizes)
    source = source_of(node, piece.dims, sizes)
    if source is None or not _keeps_keys(piece.dims, source[1], sizes):
        return [_paged(piece, sizes) or _truncated(piece, sizes) or piece]
    casts = piece.casts
    if node.target in _CASTS:
        if not _casts_floats(node, source[0]):
            return [piece]
        casts = (tensor(node).dtype, *casts)
    return _walk(Piece(source[0], source[1], casts), sizes)


def _walk_scaled(piece: Piece, sizes: Sizes) -> list[Piece]:
    """Below a factor: looked through where everything above it is stored as fp8."""
    for node, dims, scale in scaled(piece.base, piece.dims, sizes):
        casts = (tensor(piece.base).dtype, *piece.casts)
        found = _walk(Piece(node, dims, casts), sizes)
        fits = (p.is_fp8 and p.scale is None and scale.fits(p.dims, sizes) for p in found)
        if _keeps_keys(piece.dims, dims, sizes) and all(fits):
            return [replace(p, scale=scale) for p in found]
    return [piece]


def _paged(piece: Piece, sizes: Sizes) -> Piece | None:
    """A piece that is looked up in a pool, as the pool (before it was converted) and the table."""
    found = looked_up(piece.base, piece.dims, sizes)
    if found is None:
        return None
    pool, dims, pages = found
    if not _keeps_keys(piece.dims, (*dims, *pages.dims), sizes):
        return None
    casts = piece.casts
    while pool.target in _CASTS:
        (source,) = pool.all_input_nodes
        if not _casts_floats(pool, source):
            break
        pool, casts = source, (tensor(pool).dtype, *casts)
    return Piece(pool, dims, casts, pages)


def _truncated(piece: Piece, sizes: Sizes) -> Piece | None:
    """The first keys of a view of pages: the last page of a table need not be full."""
    at = [i for i, dim in enumerate(piece.dims) if any(d.axis == "k" for d in dim.digits)]
    if len(at) != 1 or piece.keys is not None or piece.base.target not in _VIEWS:
        return None
    dim, size = piece.dims[at[0]], shape(piece.base)[at[0]]
    if len(dim.digits) != 1 or dim.offset != 0 or dim.covers(size, sizes):
        return None
    if not sizes.at_least(size, dim.extent):
        return None
    whole_dim = Dim((replace(dim.digits[0], size=size),))
    dims = (*piece.dims[: at[0]], whole_dim, *piece.dims[at[0] + 1 :])
    found = _walk(replace(piece, dims=dims), sizes)
    paged = len(found) == 1 and found[0].pages is not None and found[0].keys is None
    return replace(found[0], keys=dim.extent) if paged else None


def _keeps_keys(below: Dims, above: Dims, sizes: Sizes) -> bool:
    """True iff no digit of keys or features was dropped: only n and h may be broadcast."""
    return all(sizes.equal(_extent(below, axis), _extent(above, axis)) for axis in ("k", "d"))


def _extent(dims: Dims, axis: str) -> Size:
    return product(d.size for dim in dims for d in dim.digits if d.axis == axis)


def _casts_floats(node: fx.Node, source: fx.Node) -> bool:
    same_device = tensor(node).device == tensor(source).device
    return same_device and all(tensor(n).dtype.is_floating_point for n in (node, source))


def _without_stride_zero(piece: Piece) -> Piece:
    """A graph input with stride 0 holds one row, however many it shows (Dynamo guards strides)."""
    strides = tensor(piece.base).stride()
    dims = tuple(
        Dim() if stride == 0 and all(d.axis == "n" for d in dim.digits) else dim
        for stride, dim in zip(strides, piece.dims, strict=True)
    )
    return replace(piece, dims=dims)


def _walk_cat(piece: Piece, sizes: Sizes) -> list[Piece]:
    node = piece.base
    parts = cast("list[fx.Node]", list(node.args[0]))  # type: ignore[arg-type]
    axis: int = argument(node, 1, "dim", 0) % len(piece.dims)
    repeated = _repeated_part(piece, parts, axis, sizes)
    if repeated is not None:
        return _walk(repeated, sizes)
    inner = _parts_in_range(piece, parts, axis, sizes)
    if inner is None:
        return [piece]
    pieces = [p for part in inner for p in _walk(part, sizes)]
    own = normalise(piece.digits("n"), sizes)
    shares = any(not same_digits(normalise(p.digits("n"), sizes), own, sizes.equal) for p in pieces)
    return pieces if shares else [piece]


def _repeated_part(piece: Piece, parts: list[fx.Node], axis: int, sizes: Sizes) -> Piece | None:
    """`cat([x] * T, dim)` is `x.repeat`: its major digit is dropped."""
    if len(parts) < 2 or any(p is not parts[0] for p in parts):
        return None
    dim, size = piece.dims[axis], shape(parts[0])[axis]
    if any(d.axis == "k" for d in dim.digits) or not dim.covers(size * len(parts), sizes):
        return None
    split = split_dim(dim, [sympy.Integer(len(parts)), size], sizes)
    if split is None:
        return None
    dims = (*piece.dims[:axis], split[1], *piece.dims[axis + 1 :])
    return Piece(parts[0], dims, piece.casts)


def _parts_in_range(
    piece: Piece, parts: list[fx.Node], axis: int, sizes: Sizes
) -> list[Piece] | None:
    """The parts of a cat that a piece reads, each with its own run; None where unprovable."""
    dim = piece.dims[axis]
    along_keys = len(dim.digits) == 1 and dim.digits[0].axis == "k"
    if dim.digits and not along_keys:
        return None
    begin, end = dim.offset, dim.offset + dim.extent
    found: list[Piece] = []
    position = ZERO
    for part in parts:
        size = shape(part)[axis]
        run = _overlap(begin, end, position, position + size, sizes)
        if run is None:
            return None
        low, high = run
        if low != high and not (along_keys and high - low == 0):
            found.append(_part(piece, part, axis, low, high, position))
        position = position + size
    return found or None


def _overlap(
    begin: Size, end: Size, low: Size, high: Size, sizes: Sizes
) -> tuple[Size, Size] | None:
    """[begin, end) cut to [low, high); equal bounds where they are disjoint; None if unprovable."""
    if sizes.at_least(low, end) or sizes.at_least(begin, high):
        return low, low
    if not sizes.at_least(high, low + 1) and low == high:
        return low, low
    first = low if sizes.at_least(low, begin) else begin if sizes.at_least(begin, low) else None
    last = high if sizes.at_least(end, high) else end if sizes.at_least(high, end) else None
    return None if first is None or last is None else (first, last)


def _part(piece: Piece, part: fx.Node, axis: int, low: Size, high: Size, position: Size) -> Piece:
    """The piece a cat's part contributes: the same index, moved into the part's own dim."""
    dim = piece.dims[axis]
    digits = tuple(replace(d, size=high - low) for d in dim.digits)
    dims = (*piece.dims[:axis], Dim(digits, low - position), *piece.dims[axis + 1 :])
    return Piece(part, dims, piece.casts)

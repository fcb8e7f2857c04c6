"""Analysis: K and V of an attention as segments of keys, each with the batch rows that share it.

    k = cat([prefix.repeat_interleave(T, 0), suffix], 2)         # [B*T, H, P + S, D]

resolves to two segments: `prefix` over keys [0, P), read by row n through the digit `n // T`
(T branches share a row), and `suffix` over keys [P, P+S), read by row n itself.

The walk goes up from K (and V) through the rules of `passes/views.py`. A cat along the key axis
splits it into parts; an op without a rule, or one that does not line up, ends it: its node is a
*base*, which is always right, only perhaps not shared. A cat below which nothing is shared any
further is a base itself, so a cache that grows by cat is read as one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import sympy
import torch
from torch import fx

import torch_cascade.passes.index_map  # noqa: F401  (registers the rules of index ops)
from torch_cascade.compiler.graph import Size, Sizes, product, shape, tensor
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import (
    ONE,
    ZERO,
    Digit,
    Dim,
    Dims,
    complement,
    normalise,
    same_digits,
    whole,
)
from torch_cascade.passes.site import AttentionSite, AxisName, Operand
from torch_cascade.passes.views import RULES, argument, split_dim

aten = torch.ops.aten
prims = torch.ops.prims

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)


@dataclass(frozen=True)
class Piece:
    """A run of keys of one operand: where its values are before any batch expansion.

    Attributes:
        base: the node that holds them.
        dims: how each dim of `base` is indexed by digits of n, h, k and d.
        casts: dtypes to convert to on the way down, in order.
    """

    base: fx.Node
    dims: Dims
    casts: tuple[torch.dtype, ...] = ()

    def digits(self, axis: AxisName) -> tuple[Digit, ...]:
        """The digits of one axis that this piece depends on, in the order of its dims."""
        return tuple(d for dim in self.dims for d in dim.digits if d.axis == axis)

    @property
    def length(self) -> Size:
        """Number of keys."""
        return product(d.size for d in self.digits("k"))


@dataclass(frozen=True)
class Segment:
    """Keys [start, start+length) of a site, K and V alike.

    Attributes:
        k, v: where the values are.
        start, length: the run on the site's key axis.
        kept: digits of the batch row n that choose the KV row, major first.
        dropped: the other digits of n: the branches that share a KV row, major first.
    """

    k: Piece
    v: Piece
    start: Size
    length: Size
    kept: tuple[Digit, ...]
    dropped: tuple[Digit, ...]

    @property
    def branches(self) -> Size:
        """How many query rows read one KV row."""
        return product(d.size for d in self.dropped)

    @property
    def rows(self) -> Size:
        """How many KV rows there are."""
        return product(d.size for d in self.kept)


def segments(site: AttentionSite, sizes: Sizes) -> tuple[Segment, ...] | Declined:
    """Resolve K and V of a site into segments, in key order.

    Returns:
        The segments, or a decline: K and V do not resolve alike, heads are laid out so that they
        are no GQA group, or the batch digits do not tile the batch.
    """
    refused = _contract(site, sizes)
    if refused is not None:
        return refused
    pieces_k = _pieces(site, site.k, sizes)
    pieces_v = _pieces(site, site.v, sizes)
    if len(pieces_k) != len(pieces_v):
        detail = f"K has {len(pieces_k)} segments, V {len(pieces_v)}"
        return _mismatch(site, detail)
    found: list[Segment] = []
    start = ZERO
    for k, v in zip(pieces_k, pieces_v, strict=True):
        segment = _segment(site, k, v, start, sizes)
        if isinstance(segment, Declined):
            return segment
        found.append(segment)
        start = start + segment.length
    return tuple(found)


def _contract(site: AttentionSite, sizes: Sizes) -> Declined | None:
    """What attention itself needs to be equal; SDPA's fake kernel compares none of it."""
    q, k, v = site.q, site.k, site.v
    pairs: list[tuple[str, Operand, Operand, AxisName]]
    pairs = [("key length", k, v, "k"), ("batch", k, v, "n"), ("head_dim", q, k, "d")]
    if axis_size(k, "n") != 1:
        pairs.append(("batch", q, k, "n"))
    for name, a, b, axis in pairs:
        left, right = axis_size(a, axis), axis_size(b, axis)
        if not sizes.agree(left, right):
            detail = f"{name} {left} and {right} are not known to be equal"
            return Declined(Reason.KV_MISMATCH, site.node.name, detail)
    return None


def _mismatch(site: AttentionSite, detail: str) -> Declined:
    hint = "build K and V of the prefix by the same operations"
    return Declined(Reason.KV_MISMATCH, site.node.name, detail, hint)


def _segment(
    site: AttentionSite, k: Piece, v: Piece, start: Size, sizes: Sizes
) -> Segment | Declined:
    batch = batch_size(site)
    if not sizes.agree(k.length, v.length):
        return _mismatch(site, f"at key {start}: K has {k.length} keys, V {v.length}")
    kept = normalise(k.digits("n"), sizes)
    if not same_digits(kept, normalise(v.digits("n"), sizes), sizes.agree):
        return _mismatch(site, f"at key {start}: K and V map the batch differently")
    heads_k, heads_v = (normalise(piece.digits("h"), sizes) for piece in (k, v))
    if not same_digits(heads_k, heads_v, sizes.agree):
        return _mismatch(site, f"at key {start}: K and V map the heads differently")
    dropped = complement(kept, "n", batch, sizes)
    if dropped is None:
        detail = f"batch digits {kept} do not tile a batch of {batch}"
        return Declined(Reason.LAYOUT, site.node.name, detail)
    for piece, operand in ((k, site.k), (v, site.v)):
        if not _heads_are_groups(piece, operand, sizes):
            detail = f"heads of {piece.base.name} are not read in groups of neighbours"
            return Declined(Reason.LAYOUT, site.node.name, detail)
    return Segment(k, v, start, k.length, kept, normalise(dropped, sizes))


def batch_size(site: AttentionSite) -> Size:
    """The number of query rows N of a site."""
    return shape(site.q.node)[site.q.axes.index("n")]


def axis_size(operand: Operand, axis: AxisName) -> Size:
    """The size of one axis of an operand; 1 where it has no such axis."""
    if axis not in operand.axes:
        return ONE
    return shape(operand.node)[operand.axes.index(axis)]


def _heads_are_groups(piece: Piece, operand: Operand, sizes: Sizes) -> bool:
    """True iff query head h reads KV head h // group: only minor digits of h may be dropped."""
    kept = normalise(piece.digits("h"), sizes)
    if not kept:
        return True
    total = axis_size(operand, "h")
    return len(kept) == 1 and sizes.equal(kept[0].stride * kept[0].size, total)


def _pieces(site: AttentionSite, operand: Operand, sizes: Sizes) -> list[Piece]:
    batch = batch_size(site)
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
    rule = RULES.get(node.target)
    source = rule(node, piece.dims, sizes) if rule is not None else None
    if source is None or not _keeps_keys(piece.dims, source[1], sizes):
        return [piece]
    casts = piece.casts
    if node.target in _CASTS:
        if not _casts_floats(node, source[0]):
            return [piece]
        casts = (tensor(node).dtype, *casts)
    return _walk(Piece(source[0], source[1], casts), sizes)


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

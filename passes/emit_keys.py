"""Emits what an `attend` of one part reads: keys and values, or pools and a page table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_cascade.compiler.graph import Emitter, Size, shape, tensor
from torch_cascade.passes.arrange import arranged
from torch_cascade.passes.axes import ONE, Digit, Dim
from torch_cascade.passes.devices import reads_fp8
from torch_cascade.passes.fp8 import Scale
from torch_cascade.passes.key_limits import emit_limit
from torch_cascade.passes.pages import Pages, page_size, same_pages
from torch_cascade.passes.pieces import Piece
from torch_cascade.passes.plan import Part
from torch_cascade.passes.prefix import Segment
from torch_cascade.passes.row_index import as_indexed, row_numbers, spelled

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Keys:
    """K and V of one `attend`.

    Attributes:
        k, v: [rows, heads, keys, d], or pools [blocks, heads, page_size, d].
        length: number of keys as `attend` counts them, at least those of the part.
        options: further arguments of `attend`: page_table, k_scale, v_scale.
    """

    k: fx.Node
    v: fx.Node
    length: Size
    options: dict[str, Any] = field(default_factory=dict)


def emit_keys(emit: Emitter, part: Part) -> Keys:
    """K and V of a part; neighbours that are read as one are joined."""
    first = part.segments[0]
    if len(part.segments) > 1 or not first.is_stored:
        k = _joined(emit, [(s, s.k) for s in part.segments])
        return Keys(k, _joined(emit, [(s, s.v) for s in part.segments]), part.length)
    options: dict[str, Any] = {}
    length = part.length
    if paged(first, emit):
        length = first.k.stored_length
        options["page_table"] = _page_table(emit, first.k)
        k, v = _pool(emit, first.k), _pool(emit, first.v)
    else:
        k, v = _dense(emit, first.k), _dense(emit, first.v)
    if not fp8(first):
        return Keys(_converted(emit, k, first.k), _converted(emit, v, first.v), length, options)
    for name, piece, node in (("k_scale", first.k, k), ("v_scale", first.v, v)):
        if piece.scale is not None:
            options[name] = _scale(emit, piece.scale, shape(node)[1])
    return Keys(k, v, length, options)


def paged(segment: Segment, emit: Emitter) -> bool:
    """True iff K and V can be read by one table from pools that need no conversion."""
    k, v, sizes = segment.k, segment.v, emit.sizes
    if k.pages is None or v.pages is None or not same_pages(k.pages, v.pages, sizes):
        return False
    pools = [(shape(p.base)[p.pages.axis], page_size(p.dims)) for p in (k, v) if p.pages]
    alike = all(sizes.equal(a, b) for a, b in zip(*pools, strict=True))
    return alike and k.keys == v.keys and (fp8(segment) or not (k.casts or v.casts))


def fp8(segment: Segment) -> bool:
    """True iff K and V are both read as fp8."""
    stored = segment.k.is_fp8 and segment.v.is_fp8
    return stored and reads_fp8(tensor(segment.k.base).device)


def padded(emit: Emitter, mask: fx.Node | None, part: Part, keys: Keys) -> fx.Node | None:
    """A mask of the part's keys as one of all keys that `attend` counts; `kv_lens` hides these."""
    more = keys.length - part.length
    if mask is None or emit.sizes.equal(more, 0) or shape(mask)[-1] == 1:
        return mask
    return emit.call(aten.constant_pad_nd.default, mask, [0, more], 0)


def key_lengths(emit: Emitter, part: Part, keys: Keys) -> fx.Node | None:
    """How many keys each KV row has: int32 or int64 [rows]; None where it has all of them."""
    limit = None if part.mask.limit is None else emit_limit(emit, part.mask.limit)
    if emit.sizes.equal(keys.length, part.length):
        return limit
    device = tensor(keys.k).device
    rows = [part.segments[0].rows]
    whole = emit.call(aten.full.default, rows, part.length, dtype=torch.int64, device=device)
    return whole if limit is None else emit.call(aten.minimum.default, limit, whole)


def _joined(emit: Emitter, pieces: Sequence[tuple[Segment, Piece]]) -> fx.Node:
    """K or V as [rows, heads, keys, d]; pieces that follow one another are joined."""
    nodes = [_spread(emit, s, _converted(emit, _dense(emit, p), p)) for s, p in pieces]
    return nodes[0] if len(nodes) == 1 else emit.call(aten.cat.default, nodes, 2)


def _spread(emit: Emitter, segment: Segment, node: fx.Node) -> fx.Node:
    """K or V of a level that was given up, at the rows it is read at: [rows, heads, keys, d]."""
    if segment.source is None:
        return node
    row = row_numbers(emit, segment.rows, tensor(node).device)
    row = spelled(emit, row, as_indexed(segment.kept), [d.stride for d in segment.kept])
    kept = segment.source.kept
    row = spelled(emit, row, kept, [d.stride for d in as_indexed(kept)])
    return emit.call(aten.index.Tensor, node, [row])


def _dense(emit: Emitter, piece: Piece) -> fx.Node:
    """A piece as [rows, heads, keys, d], in the dtype it is stored in."""
    if piece.pages is None:
        return arranged(emit, piece.base, piece.dims, "nhkd")
    table = arranged(emit, piece.pages.table, piece.pages.dims, "nk")
    pages = emit.call(aten.index.Tensor, _pool(emit, piece), [table])
    rows, columns, heads, size, width = shape(pages)
    pages = emit.call(aten.permute.default, pages, [0, 2, 1, 3, 4])
    keys = emit.call(aten.reshape.default, pages, [rows, heads, columns * size, width])
    if piece.keys is None:
        return keys
    return emit.call(aten.slice.Tensor, keys, 2, 0, piece.keys)


def _pool(emit: Emitter, piece: Piece) -> fx.Node:
    """The pool of a piece as [blocks, heads, page_size, d], a view of it."""
    assert piece.pages is not None
    axis = piece.pages.axis
    # The blocks stand where rows do, so that one function arranges both.
    blocks = Dim((Digit("n", ONE, shape(piece.base)[axis]),))
    dims = (*piece.dims[:axis], blocks, *piece.dims[axis + 1 :])
    return arranged(emit, piece.base, dims, "nhkd")


def _page_table(emit: Emitter, piece: Piece) -> fx.Node:
    """The table as [rows, pages] without negative entries, which count from the end in torch."""
    pages: Pages | None = piece.pages
    assert pages is not None
    table = arranged(emit, pages.table, pages.dims, "nk")
    negative = emit.call(aten.lt.Scalar, table, 0)
    blocks = shape(piece.base)[pages.axis]
    from_end = emit.call(aten.add.Tensor, table, blocks)
    return emit.call(aten.where.self, negative, from_end, table)


def _converted(emit: Emitter, node: fx.Node, piece: Piece) -> fx.Node:
    """Keys or values in the dtype of the attention, times their factor."""
    if piece.scale is None:
        for dtype in piece.casts:
            node = emit.call(prims.convert_element_type.default, node, dtype)
        return node
    factor = emit.call(
        aten.reshape.default, _scale(emit, piece.scale, shape(node)[1]), [1, shape(node)[1], 1, 1]
    )
    exact = emit.call(prims.convert_element_type.default, node, torch.float32)
    product32 = emit.call(aten.mul.Tensor, exact, factor)
    return emit.call(prims.convert_element_type.default, product32, piece.casts[-1])


def _scale(emit: Emitter, scale: Scale, heads: Size) -> fx.Node:
    """A factor as float32 [heads]."""
    base_device = emit.anchor.meta["val"].device
    if not isinstance(scale.factor, fx.Node):
        options = {"dtype": torch.float32, "device": base_device}
        return emit.call(aten.full.default, [heads], scale.factor, **options)
    node = scale.factor
    if tensor(node).dtype != torch.float32:
        node = emit.call(prims.convert_element_type.default, node, torch.float32)
    node = arranged(emit, node, scale.dims, "h")
    if any(dim.digits for dim in scale.dims):
        return node
    spread = emit.call(aten.expand.default, node, [heads])
    return emit.call(aten.clone.default, spread, memory_format=torch.contiguous_format)

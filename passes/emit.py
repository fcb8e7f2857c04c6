"""Writes a cascade plan into the graph: attend a part, merge, and the output as it was."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Emitter, Size, Sizes, shape, tensor
from torch_cascade.passes.axes import Digit
from torch_cascade.passes.emit_keys import emit_keys, key_lengths, padded
from torch_cascade.passes.emit_merge import Partial, merged, nan_where_empty
from torch_cascade.passes.layout import laid_out, pinned
from torch_cascade.passes.plan import CascadePlan, Part
from torch_cascade.passes.prefix import Segment, axis_size
from torch_cascade.passes.row_index import as_indexed, row_numbers, spelled
from torch_cascade.passes.site import AttentionSite, MaskTerm, tag

aten = torch.ops.aten
prims = torch.ops.prims


def emit_cascade(plan: CascadePlan, sizes: Sizes) -> fx.Node:
    """Replace a site by its cascade form.

    Returns:
        The node that now stands for the attention, with the dtype, sizes and strides of the old.
    """
    site = plan.site
    emit = Emitter(site.node)
    q, scale = _query(emit, site)
    partials = [_attend(emit, site, part, q, scale, sizes) for part in plan.parts]
    out, lse = merged(emit, plan, partials)
    if site.fully_masked == "nan" and not plan.rows_see_a_key:
        out = nan_where_empty(emit, out, lse)
    if "h" not in site.q.axes:
        out = emit.call(aten.squeeze.dim, out, 1)
    dtype = tensor(site.node).dtype
    if tensor(out).dtype != dtype:
        out = emit.call(prims.convert_element_type.default, out, dtype)
    out = pinned(emit, laid_out(emit, out, _output_dims(site), plan.order), plan.order)
    out.meta["val"] = site.node.meta["val"]
    tag(out, site)
    site.node.replace_all_uses_with(out)
    site.node.graph.erase_node(site.node)
    return out


def _output_dims(site: AttentionSite) -> tuple[int, ...]:
    """For each dim of the site's output its place among n, h, q and d."""
    if site.axes is None:
        return tuple(range(len(shape(site.node))))
    natural = [axis for axis in "nhqd" if axis in set(site.axes)]
    return tuple(natural.index(axis) for axis in site.axes)


def _query(emit: Emitter, site: AttentionSite) -> tuple[fx.Node, float | None]:
    """The query as [n, h, q, d], and the scale for `attend`.

    A symbolic scale is multiplied into q: torch would specialise a symbolic float argument.
    """
    q, scale = site.q.node, site.scale
    order = ["".join(site.q.axes).index(axis) for axis in "nhqd" if axis in set(site.q.axes)]
    if order != sorted(order):
        q = emit.call(aten.permute.default, q, order)
    if "h" not in site.q.axes:
        q = emit.call(aten.unsqueeze.default, q, 1)
    if isinstance(scale, fx.Node):
        return emit.call(aten.mul.Tensor, q, scale), 1.0
    return q, scale


def _attend(
    emit: Emitter,
    site: AttentionSite,
    part: Part,
    q: fx.Node,
    scale: float | None,
    sizes: Sizes,
) -> Partial:
    """One `attend`, rows in the order of the batch."""
    rows = _RowOrder(emit, part.segments[0], sizes)
    keys = emit_keys(emit, part)
    terms = [_mask_slice(emit, site, term, part, rows) for term in part.mask.terms]
    mask = padded(emit, _one_mask(emit, terms), part, keys)
    options: dict[str, Any] = {"branches": part.segments[0].branches, "scale": scale}
    options |= keys.options
    lengths = key_lengths(emit, part, keys)
    if lengths is not None:
        options["kv_lens"] = lengths
    if part.mask.q_offset is not None:
        options["q_positions"] = _positions(emit, site, part.mask.q_offset)
    if part.mask.window is not None:
        options["window"] = part.mask.window
    if site.softcap is not None:
        options["softcap"] = site.softcap
    attend = torch.ops.cascade.attend.default
    pair = emit.call(attend, rows.grouped(q), keys.k, keys.v, mask, **options)
    out = emit.call(operator.getitem, pair, 0)
    lse = emit.call(operator.getitem, pair, 1)
    return Partial(rows.restored(out), rows.restored(lse), mask)


def _positions(emit: Emitter, site: AttentionSite, offset: Size) -> fx.Node:
    """Position of each query on the part's own key axis."""
    device = tensor(site.q.node).device
    iota = emit.call(
        prims.iota.default,
        axis_size(site.q, "q"),
        start=0,
        step=1,
        dtype=torch.int64,
        device=device,
        requires_grad=False,
    )
    return iota if offset == 0 else emit.call(aten.add.Tensor, iota, offset)


class _RowOrder:
    """Batch rows regrouped so that the branches of one KV row stand together, and back.

    `repeat_interleave` order is already so and nothing is emitted; `repeat` order is not.
    """

    def __init__(self, emit: Emitter, segment: Segment, sizes: Sizes) -> None:
        self.emit = emit
        self.digits = [*segment.kept, *segment.dropped]
        natural = sorted(self.digits, key=lambda d: -(sizes.hint(d.stride) or 0))
        self.natural = [d.size for d in natural]
        self.order = [natural.index(d) for d in self.digits]

    def grouped(self, node: fx.Node) -> fx.Node:
        """[N, ...] in batch order to kept digits major, branches minor."""
        if self._is_symbolic:
            strides = [digit.stride for digit in self.digits]
            return self._looked_up(node, as_indexed(self.digits), strides)
        return self._moved(node, self.natural, self.order)

    def restored(self, node: fx.Node) -> fx.Node:
        """The inverse of `grouped`."""
        if self._is_symbolic:
            strides = [digit.stride for digit in as_indexed(self.digits)]
            return self._looked_up(node, self.digits, strides)
        inverse = [self.order.index(d) for d in range(len(self.order))]
        return self._moved(node, [digit.size for digit in self.digits], inverse)

    @property
    def _is_ordered(self) -> bool:
        return self.order == sorted(self.order)

    @property
    def _is_symbolic(self) -> bool:
        return any(not sympy.sympify(size).is_number for size in self.natural)

    def _moved(self, node: fx.Node, split: list[Size], order: list[int]) -> fx.Node:
        if self._is_ordered:
            return node
        first, *rest = shape(node)
        opened = self.emit.call(aten.reshape.default, node, [*split, *rest])
        tail = range(len(order), len(order) + len(rest))
        moved = self.emit.call(aten.permute.default, opened, [*order, *tail])
        return self.emit.call(aten.reshape.default, moved, [first, *rest])

    def _looked_up(
        self, node: fx.Node, digits: Sequence[Digit], strides: Sequence[Size]
    ) -> fx.Node:
        """Row i of the result is the row of `node` that digits of i spell with those strides."""
        if self._is_ordered:
            return node
        row = row_numbers(self.emit, shape(node)[0], tensor(node).device)
        row = spelled(self.emit, row, digits, strides)
        return self.emit.call(aten.index.Tensor, node, [row])


def _mask_slice(
    emit: Emitter, site: AttentionSite, term: MaskTerm, part: Part, rows: _RowOrder
) -> MaskTerm:
    """A mask term cut to a part's keys, as a tensor that broadcasts to [n, h, q, k]."""
    node = term.node
    if "h" not in site.q.axes and len(shape(node)) == 3:
        node = emit.call(aten.unsqueeze.default, node, 1)
    dims = shape(node)
    if dims and dims[-1] != 1:
        start = part.segments[0].start
        node = emit.call(aten.slice.Tensor, node, len(dims) - 1, start, start + part.length)
    if len(dims) == 4 and dims[0] != 1:
        node = rows.grouped(node)
    return MaskTerm(node, term.kind)


def _one_mask(emit: Emitter, terms: Sequence[MaskTerm]) -> fx.Node | None:
    """All terms as one mask: bool (True = visible) if none adds, else floating."""
    visible: fx.Node | None = None
    added: fx.Node | None = None
    for term in terms:
        if term.kind == "add":
            added = term.node if added is None else emit.call(aten.add.Tensor, added, term.node)
            continue
        keep = term.node
        if term.kind == "drop":
            keep = emit.call(aten.bitwise_not.default, keep)
        both = aten.bitwise_and.Tensor
        visible = keep if visible is None else emit.call(both, visible, keep)
    if added is None or visible is None:
        return visible if added is None else added
    dtype, device = tensor(added).dtype, tensor(added).device
    hidden = emit.call(aten.full.default, [], -math.inf, dtype=dtype, device=device)
    return emit.call(aten.where.self, visible, added, hidden)

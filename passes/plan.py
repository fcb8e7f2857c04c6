"""Plan of the cascade rewrite of one site: decided on the graph, before anything is edited."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torch_cascade.compiler.graph import Size, Sizes, product, shape, tensor
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.compiler.work import KeyRun, Work
from torch_cascade.passes.devices import no_kernel
from torch_cascade.passes.key_limits import Rows
from torch_cascade.passes.layout import SORTS_UNKNOWN_STRIDES, output_order
from torch_cascade.passes.mask import MaskReader, SegmentMask
from torch_cascade.passes.pieces import Piece
from torch_cascade.passes.prefix import Segment, axis_size, batch_size, segments
from torch_cascade.passes.site import AttentionSite, Operand

aten = torch.ops.aten

# A softmax whose visible scores are below this has no correct digit left in float32, so a finite
# fill at or below it hides a key as -inf does, wherever the row sees another key.
_HIDING_FILL = -1e9
_HIDING_FILL_FLOAT64 = -1e30


@dataclass(frozen=True)
class Part:
    """One `attend`: neighbouring segments read through the same rows, and how they are seen."""

    segments: tuple[Segment, ...]
    mask: SegmentMask

    @property
    def length(self) -> Size:
        """Number of keys."""
        return sum((s.length for s in self.segments), sympy.Integer(0))


@dataclass(frozen=True)
class CascadePlan:
    """Everything that is needed to rewrite one site; made without touching the graph.

    Attributes:
        site: the attention.
        parts: one `attend` each, in key order.
        order: dims of the output from the largest stride to the smallest.
        rows_see_a_key: every query row provably sees a key, so nothing is fully masked.
        bounded: no row consists of huge finite masks only (see `emit._absorbed`).
        work: what the cost model is told.
    """

    site: AttentionSite
    parts: tuple[Part, ...]
    order: tuple[int, ...]
    rows_see_a_key: bool
    bounded: bool
    work: Work


def resolve(site: AttentionSite, sizes: Sizes) -> tuple[Segment, ...] | Declined:
    """The segments of a site, if something is shared in it at all."""
    refused = _unsupported(site)
    if refused is not None:
        return refused
    found = segments(site, sizes)
    if isinstance(found, Declined):
        return found
    if all(s.branches == 1 for s in found):
        bases = ", ".join(f"{s.k.base.name} ({s.k.base.target})" for s in found)
        hint = "expand the prefix inside the compiled function, or use SharedPrefixCache"
        return Declined(Reason.NO_SHARED_PREFIX, site.node.name, f"K comes from {bases}", hint)
    return found


def _unsupported(site: AttentionSite) -> Declined | None:
    device = tensor(site.q.node).device
    missing = no_kernel(device)
    if missing:
        return Declined(Reason.NO_KERNEL, site.node.name, missing)
    if device.type != "cpu" and tensor(site.q.node).dtype == torch.float64:
        detail = f"{site.q.node.name} is float64 on {device}"
        return Declined(Reason.FLOAT64, site.node.name, detail)
    dtypes = {tensor(o.node).dtype for o in (site.q, site.k, site.v)}
    if len(dtypes) > 1:
        detail = f"q, k and v of dtypes {', '.join(sorted(map(str, dtypes)))}"
        return Declined(Reason.AUTOCAST_MIXED, site.node.name, detail)
    return None


def plan(
    site: AttentionSite, found: tuple[Segment, ...], reader: MaskReader, sizes: Sizes
) -> CascadePlan | Declined:
    """Decide how a site with shared segments would be rewritten; nothing is edited."""
    order = output_order(site.node, sizes)
    if isinstance(order, Declined):
        return order
    used = tuple(s for s in found if not sizes.equal(s.length, 0))
    parts = _parts(site, used, reader, sizes)
    if all(s.branches == 1 for part in parts for s in part.segments):
        detail = "the shared keys are empty, or no query sees them"
        return Declined(Reason.EMPTY_SEGMENT, site.node.name, detail)
    seen = reader.sees_a_key(site)
    for refused in (_untold(site, parts, sizes), _fills(site, seen)):
        if refused is not None:
            return refused
    bounded = seen or reader.finite(site)
    return CascadePlan(site, parts, order, seen, bounded, work_of(site, parts))


def _untold(site: AttentionSite, parts: Sequence[Part], sizes: Sizes) -> Declined | None:
    """On a CPU, queries or keys of which only data tells whether there are any.

    Torch's flash kernel there wants one of each, and Inductor does not lower the products that are
    computed without it: it asks whether the size is 1. An older one asks that of every mask.
    """
    if tensor(site.q.node).device.type != "cpu":
        return None
    least = 1 if SORTS_UNKNOWN_STRIDES else 2
    counts = [("queries", axis_size(site.q, "q"))] + [("keys", part.length) for part in parts]
    for what, count in counts:
        if free_unbacked_symbols(count) and not sizes.at_least(count, least):
            detail = f"only data tells how many {what} there are ({count}), maybe less than {least}"
            hint = f"torch._check(n >= {least}) says that there are, n the number of {what}"
            return Declined(Reason.EMPTY_SEGMENT, site.node.name, detail, hint)
    return None


def _fills(site: AttentionSite, seen: bool) -> Declined | None:
    """Finite fills hide a key as -inf does if they are huge and every row sees a key besides."""
    hint = "mask with -inf, or make it provable that every query sees a key"
    if site.fully_masked == "uniform" and not seen:
        detail = "a finite fill value, and a query row may see no key"
        return Declined(Reason.FINITE_FILL, site.node.name, detail, hint)
    hiding = _HIDING_FILL_FLOAT64 if tensor(site.node).dtype == torch.float64 else _HIDING_FILL
    small = [t.fill for t in site.masks if t.fill is not None and t.fill > hiding]
    if small:
        detail = f"a fill value of {small[0]} may not hide a key"
        return Declined(Reason.FINITE_FILL, site.node.name, detail, hint)
    return None


def _parts(
    site: AttentionSite, used: tuple[Segment, ...], reader: MaskReader, sizes: Sizes
) -> tuple[Part, ...]:
    """One part a shared segment; neighbours that nobody shares are read as one."""
    groups: list[list[Segment]] = []
    for segment in used:
        if groups and _joinable(groups[-1][-1], segment, sizes):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    parts: list[Part] = []
    for group in groups:
        length = sum((s.length for s in group), sympy.Integer(0))
        mask = reader.segment(site, group[0].start, length, limit_rows(site, group[0]))
        if not mask.hidden:
            parts.append(Part(tuple(group), mask))
    return tuple(parts)


def limit_rows(site: AttentionSite, segment: Segment) -> Rows | None:
    """The KV rows of a segment whose numbers of visible keys are worth reading, else None.

    A page must not be read past its row's keys, and a GPU's kernels stop there. A CPU would gain
    nothing: it copies dense K and V, each time, so that what lies behind is not read.
    """
    on_cpu = tensor(site.q.node).device.type == "cpu"
    if on_cpu and not segment.is_stored:
        return None
    return Rows(segment.kept, batch_size(site))


def _joinable(a: Segment, b: Segment, sizes: Sizes) -> bool:
    """True for neighbours that nobody shares, of the same heads, that must be read anyway."""
    if a.is_stored or b.is_stored:
        return False
    heads = [product(d.size for d in s.k.digits("h")) for s in (a, b)]
    return a.branches == 1 and b.branches == 1 and sizes.equal(*heads)


def work_of(site: AttentionSite, parts: tuple[Part, ...]) -> Work:
    """What the cost model is told of the parts of a site."""
    axes = dict(zip(site.q.axes, shape(site.q.node), strict=True))
    first = parts[0].segments[0]
    q, v = tensor(site.q.node), tensor(site.v.node)
    widths = {name: shape(o.node)[o.axes.index("d")] for name, o in (("k", site.k), ("v", site.v))}
    return Work(
        batch=batch_size(site),
        heads=axes.get("h", sympy.Integer(1)),
        q_len=axes["q"],
        kv_heads=sympy.prod([d.size for d in first.k.digits("h")]),
        naive_heads=axis_size(site.k, "h"),
        d_k=widths["k"],
        d_v=widths["v"],
        q_bytes=q.element_size(),
        kv_bytes=tensor(first.k.base).element_size() if first.is_stored else v.element_size(),
        dtype=str(q.dtype).removeprefix("torch."),
        copied=any(_is_copied(o.node, s) for o, s in _keys_of(site, parts)),
        device=q.device,
        runs=tuple(KeyRun(p.segments[0].rows, p.length, _is_joined(p)) for p in parts),
    )


def _is_joined(part: Part) -> bool:
    """True iff its keys are copied into a tensor of their own before they are read."""
    return len(part.segments) > 1 or part.segments[0].source is not None


def _keys_of(site: AttentionSite, parts: tuple[Part, ...]) -> Iterator[tuple[Operand, Piece]]:
    for part in parts:
        for segment in part.segments:
            yield site.k, segment.k
            yield site.v, segment.v


_VIEWS = frozenset(
    {
        aten.view.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.permute.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
    }
)


def _is_copied(node: fx.Node, piece: Piece) -> bool:
    """True unless `node` is a chain of views of the piece's base: a join or a clone copies."""
    while node is not piece.base:
        if node.target not in _VIEWS:
            return True
        node = node.args[0]  # type: ignore[assignment]
    return False

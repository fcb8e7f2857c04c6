"""Sites, segments and masks in words, for the record of a compilation."""

from __future__ import annotations

import sympy

from torch_cascade.compiler.graph import shape
from torch_cascade.compiler.record import SegmentRecord
from torch_cascade.passes.mask import SegmentMask
from torch_cascade.passes.prefix import Segment
from torch_cascade.passes.site import AttentionSite


def describe_segment(segment: Segment, mask: SegmentMask) -> SegmentRecord:
    """One segment in words."""
    base = segment.k.base
    return SegmentRecord(
        keys=f"[{segment.start}, {segment.start + segment.length})",
        base=f"{base.name} {list(shape(base))}{_looked_up(segment)}{_spread(segment)}",
        rows=describe_rows(segment.source or segment),
        branches=str(segment.branches),
        mask=describe_mask(mask),
    )


def _looked_up(segment: Segment) -> str:
    pages = segment.k.pages
    return "" if pages is None else f" by pages {pages.table.name} {list(shape(pages.table))}"


def _spread(segment: Segment) -> str:
    source = segment.source
    if source is None:
        return ""
    if segment.branches == 1:
        return f" spread over {source.branches} branches"
    return f" joined with its neighbour for {segment.rows} rows"


def describe_shapes(site: AttentionSite) -> str:
    """The sizes of q, k and v."""
    operands = {"q": site.q, "k": site.k, "v": site.v}
    return ", ".join(f"{name} {list(shape(o.node))}" for name, o in operands.items())


def describe_scores(site: AttentionSite) -> str:
    """What is done to the scores beside scale and masks: a soft-cap, sinks; "" for nothing."""
    said = [] if site.softcap is None else [f"soft-cap {site.softcap:g}"]
    if site.sinks is not None:
        said.append(f"sinks {site.sinks.name} {list(shape(site.sinks))}")
    return ", ".join(said)


def describe_rows(segment: Segment) -> str:
    """Which KV row batch row n reads, as people write it: "n", "n // 4", "n % 3", "0"."""
    terms: list[str] = []
    below = sympy.Integer(1)
    for digit in reversed(segment.kept):
        term = "n" if digit.stride == 1 else f"n // {digit.stride}"
        major = segment.dropped[:1] + segment.kept[:1]
        if any(d.stride != digit.stride and _above(d.stride, digit.stride) for d in major):
            term = f"{term} % {digit.size}"
        terms.append(term if below == 1 else f"{below} * ({term})")
        below = below * digit.size
    return " + ".join(reversed(terms)) or "0"


def _above(stride: sympy.Expr, other: sympy.Expr) -> bool:
    """True iff `stride` is a multiple of `other`: digits of one axis always compare so."""
    return bool(sympy.denom(sympy.cancel(stride / other)) == 1)


def describe_mask(mask: SegmentMask) -> str:
    """What was proved about a segment's mask."""
    if mask.hidden:
        return "hidden"
    said = [f"{t.kind} {t.node.name}" for t in mask.terms]
    if mask.q_offset is not None:
        said.append(f"key <= query + {mask.q_offset}")
    if mask.limit is not None:
        said.append(str(mask.limit))
    if mask.window is not None:
        said.append(f"window {mask.window}")
    return ", ".join(said) or "all visible"

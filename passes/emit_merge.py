"""Writes the merge of the parts of a cascade, and what becomes of rows that see no key."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from torch_cascade.compiler.graph import Emitter, shape, tensor
from torch_cascade.passes.plan import CascadePlan, Part
from torch_cascade.passes.site import AttentionSite

aten = torch.ops.aten
prims = torch.ops.prims

# Below this every score of a row is a huge finite mask that absorbed it: float32 keeps no digit.
_ABSORBING = -1e30


@dataclass(frozen=True)
class Partial:
    """What one `attend` yields: o [n, h, q, d] and log-sum-exp [n, h, q]; and the mask it read."""

    out: fx.Node
    lse: fx.Node
    mask: fx.Node | None


def merged(emit: Emitter, plan: CascadePlan, parts: Sequence[Partial]) -> tuple[fx.Node, fx.Node]:
    """The attention over all parts, and the sinks: o [n, h, q, d] and log-sum-exp [n, h, q]."""
    sinks = _sinks(emit, plan.site)
    if len(parts) == 1 and sinks is None:
        return parts[0].out, parts[0].lse
    lses = [part.lse for part in parts]
    if not plan.bounded:
        lses, sinks = _absorbed(emit, plan, parts, sinks)
    options = {} if sinks is None else {"sinks": sinks}
    pair = emit.call(torch.ops.cascade.merge.default, [part.out for part in parts], lses, **options)
    return emit.call(operator.getitem, pair, 0), emit.call(operator.getitem, pair, 1)


def _sinks(emit: Emitter, site: AttentionSite) -> fx.Node | None:
    """The sinks of a site as a tensor that broadcasts to the log-sum-exp [n, h, q]."""
    node = site.sinks
    if node is None or not shape(node):
        return node
    node = emit.call(aten.squeeze.dim, node, -1)
    if "h" not in site.q.axes and len(shape(node)) == 2:
        node = emit.call(aten.unsqueeze.default, node, 1)
    return node


def _absorbed(
    emit: Emitter, plan: CascadePlan, parts: Sequence[Partial], sinks: fx.Node | None
) -> tuple[list[fx.Node], fx.Node | None]:
    """Log-sum-exps in which rows of huge finite masks weigh their parts by number of keys.

    A row masked everywhere with finfo.min is uniform over all its keys, but its log-sum-exp,
    finfo.min + log(count), has lost the count to rounding. Such rows get log(count) back.

    A sink above them takes the whole weight, so that row stays as it is. An equal one is one more
    key of the row, and a lower one takes no weight.
    """
    top = parts[0].lse
    for part in parts[1:]:
        top = emit.call(aten.maximum.default, top, part.lse)
    lost = emit.call(aten.le.Scalar, top, _ABSORBING)
    if sinks is not None:
        sinks = _as(emit, sinks, tensor(top).dtype)
        below = emit.call(aten.le.Tensor, sinks, top)
        lost = emit.call(aten.bitwise_and.Tensor, lost, below)
    restored: list[fx.Node] = []
    for part, planned in zip(parts, plan.parts, strict=True):
        log_count = _log_count(emit, part, planned)
        empty = emit.call(aten.eq.Scalar, part.lse, -math.inf)
        kept = emit.call(aten.where.self, empty, part.lse, log_count)
        restored.append(emit.call(aten.where.self, lost, kept, part.lse))
    return restored, None if sinks is None else _absorbed_sinks(emit, sinks, top, lost)


def _absorbed_sinks(emit: Emitter, sinks: fx.Node, top: fx.Node, lost: fx.Node) -> fx.Node:
    """Sinks in the units of `_absorbed`: in lost rows 0 where equal to the top, else -inf."""
    dtype, device = tensor(top).dtype, tensor(top).device
    zero = emit.call(aten.full.default, [], 0.0, dtype=dtype, device=device)
    hidden = emit.call(aten.full.default, [], -math.inf, dtype=dtype, device=device)
    equal = emit.call(aten.eq.Tensor, sinks, top)
    equal = emit.call(aten.bitwise_and.Tensor, equal, emit.call(aten.ne.Scalar, top, -math.inf))
    unit = emit.call(aten.where.self, equal, zero, hidden)
    return emit.call(aten.where.self, lost, unit, sinks)


def _as(emit: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if tensor(node).dtype == dtype:
        return node
    return emit.call(prims.convert_element_type.default, node, dtype)


def _log_count(emit: Emitter, partial: Partial, part: Part) -> fx.Node:
    """log(number of keys that are not -inf) a row, broadcasting to the log-sum-exp [n, h, q]."""
    lse, mask = partial.lse, partial.mask
    dtype, device = tensor(lse).dtype, tensor(lse).device
    if mask is None or tensor(mask).dtype == torch.bool or shape(mask)[-1] == 1:
        count = emit.call(aten.full.default, [], part.length, dtype=dtype, device=device)
    else:
        counted = emit.call(aten.gt.Scalar, mask, -math.inf)
        total = emit.call(aten.sum.dim_IntList, counted, [-1])
        count = emit.call(prims.convert_element_type.default, total, dtype)
    return emit.call(aten.log.default, count)


def nan_where_empty(emit: Emitter, out: fx.Node, lse: fx.Node) -> fx.Node:
    """A softmax over -inf only is NaN in eager code, and stays so."""
    empty = emit.call(aten.eq.Scalar, lse, -math.inf)
    column = emit.call(aten.unsqueeze.default, empty, -1)
    dtype, device = tensor(out).dtype, tensor(out).device
    nan = emit.call(aten.full.default, [], math.nan, dtype=dtype, device=device)
    return emit.call(aten.where.self, column, nan, out)

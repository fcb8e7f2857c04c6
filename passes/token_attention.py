"""The token rule of attention: some queries, all keys, each query seeing what it saw.

Row i of the result is not query i any more, so a causal rule is written again in positions. On a
GPU it needs no mask: `cascade::attend` takes the positions of its queries. A mask that the graph
builds from positions, such as a sliding window's, is read there as a rule, too; any other mask is
cut to its rows. On a CPU SDPA with a boolean mask is the faster form.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

import torch_cascade.kernels.ops  # noqa: F401  (defines the ops of the namespace cascade)
from torch_cascade.compiler.graph import Size, Sizes, shape, tensor
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.attention import sdpa_site
from torch_cascade.passes.axes import ONE
from torch_cascade.passes.devices import no_kernel
from torch_cascade.passes.heads import fewest_heads
from torch_cascade.passes.mask import MaskReader
from torch_cascade.passes.token_maker import Maker
from torch_cascade.passes.token_registry import (
    Arguments,
    bound,
    broadcast,
    has_size,
    mixed,
    rank_of,
    token_rule,
)
from torch_cascade.passes.token_rows import Axis, Place, Places, Rows, Tangled

aten = torch.ops.aten
prims = torch.ops.prims
cascade = torch.ops.cascade


def reads_positions(device: torch.device) -> bool:
    """Whether attention on a device is computed from positions rather than from a mask."""
    return device.type == "cuda" and not no_kernel(device)


def _attention(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    """Write the attention of some queries."""
    if rows.tokens.dim != rank_of(node) - 2:
        return maker.again(node, given)
    seen = _rule(maker, node, rows) if reads_positions(tensor(node).device) else None
    if seen is not None:
        return _attend(maker, node, rows, given, seen)
    if not given.get("is_causal", False):
        return maker.again(node, given)
    batch = None if rows.batch is None else rows.batch.dim
    mask = maker.causal_mask(rank_of(node), batch, shape(given["k"])[-2])
    options = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
    q, k, v = given["q"], given["k"], given["v"]
    return maker.call(cascade.sdpa.default, q, k, v, mask, False, **options)


@dataclass(frozen=True)
class _Seen:
    """Key j is visible at position p iff j <= p + offset and j > p + offset - window."""

    offset: Size
    window: Size | None


def _rule(maker: Maker, node: fx.Node, rows: Rows) -> _Seen | None:
    """What the masks of an attention say, if it is a rule of positions and nothing else."""
    known = maker.notes.setdefault("reader", MaskReader(maker.emit.sizes))
    site = sdpa_site(node, maker.emit.sizes)
    plain = rank_of(node) == 4 and tensor(node).dtype != torch.float64
    if isinstance(site, Declined) or not plain or not isinstance(site.scale, (float, type(None))):
        return None
    batch = rows.batch is None or (rows.batch.dim, rows.batch.outer, rows.batch.inner) == (0, 1, 1)
    alike = maker.emit.sizes.equal(shape(site.q.node)[0], shape(site.k.node)[0])
    if not (batch and alike) or (rows.tokens.outer, rows.tokens.inner) != (ONE, ONE):
        return None
    mask = known.segment(site, sympy.Integer(0), shape(site.k.node)[2])
    if mask.hidden or mask.terms or mask.q_offset is None:
        return None
    return _Seen(mask.q_offset, mask.window)


def _attend(maker: Maker, node: fx.Node, rows: Rows, given: Arguments, seen: _Seen) -> fx.Node:
    positions = maker.positions(rows.batch is not None)
    if len(shape(positions)) == 1:
        positions = maker.call(aten.unsqueeze.default, positions, 0)
    if seen.offset != 0:
        positions = maker.call(aten.add.Tensor, positions, seen.offset)
    options: dict[str, Any] = {"scale": given.get("scale"), "q_positions": positions}
    if seen.window is not None:
        options["window"] = seen.window
    k, v = (fewest_heads(given[name], maker.emit.sizes) for name in "kv")
    if shape(k)[1] != shape(v)[1]:  # the op has one group for both
        k, v = given["k"], given["v"]
    pair = maker.call(cascade.attend.default, given["q"], k, v, None, **options)
    out = maker.call(operator.getitem, pair, 0)
    dtype = tensor(node).dtype
    if tensor(out).dtype == dtype:
        return out
    return maker.call(prims.convert_element_type.default, out, dtype)


@token_rule(cascade.sdpa.default, make=_attention, counts=True)
def _sdpa(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """Queries are rows; keys and values stay whole."""
    given, rank = bound(node), rank_of(node)
    if axis.dim == rank - 1:
        return {"v": axis}
    if given.get("is_causal", False) and (axis.outer, axis.inner) != (ONE, ONE):
        return mixed(node, "the causal rule counts queries of several sequences as one")
    found: dict[str, Place] = {"q": axis}
    if given.get("attn_mask") is not None:
        found["attn_mask"] = broadcast(rank, axis, given["attn_mask"])
    if axis.dim == rank - 2:
        return found
    keys = axis if has_size(given["k"], axis, sizes) else Tangled()
    return {**found, "k": keys, "v": keys}

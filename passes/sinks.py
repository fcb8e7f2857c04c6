"""Attention sinks: a column of scores without a value, dropped again after the softmax.

    softmax(cat([scores, sinks], -1))[..., :-1] @ v

The column takes weight and gives nothing: one more key whose value is zero (gpt-oss has one a
head). It may be the first column or the last, the softmax may be spelt in any way, and views and
conversions between floating dtypes may stand between. Whatever else happens to the joined scores
would happen to the sink too, and is declined.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import Dim, Dims, whole
from torch_cascade.passes.labels import above
from torch_cascade.passes.scalars import is_float_cast
from torch_cascade.passes.scores import MATMULS, find_above
from torch_cascade.passes.softmax import Softmax
from torch_cascade.passes.views import RULES, argument

aten = torch.ops.aten

Side = Literal["first", "last"]


@dataclass(frozen=True)
class Sinks:
    """The column of a sink: `node` has the dims `dims`, of which the keys' has size 1."""

    node: fx.Node
    dims: Dims


@dataclass(frozen=True)
class Joined:
    """What a softmax is taken of.

    Attributes:
        scores, dims: the scores of the keys, and their dims.
        sinks: the column beside them, None if there is none.
    """

    scores: fx.Node
    dims: Dims
    sinks: Sinks | None = None


def dropped_column(
    node: fx.Node, dims: Dims, keys: Size, sizes: Sizes
) -> tuple[fx.Node, Dims, Side] | None:
    """A tensor of which `node` is all but the first or the last of `keys` + 1 columns.

    Returns:
        That tensor, its dims, and which column `node` leaves out; None if it is no such slice.
    """
    if node.target not in (aten.slice.Tensor, operator.getitem):
        return None
    found = RULES[node.target](node, dims, sizes)
    if found is None:
        return None
    source, kept = found
    cut = [
        i
        for i, (dim, size) in enumerate(zip(kept, shape(source), strict=True))
        if not dim.covers(size, sizes)
    ]
    if len(cut) != 1 or kept[cut[0]].digits != whole("k", keys).digits:
        return None
    (at,) = cut
    if not sizes.equal(shape(source)[at], keys + 1):
        return None
    sides: dict[int, Side] = {0: "last", 1: "first"}
    side = next((s for o, s in sides.items() if sizes.equal(kept[at].offset, o)), None)
    wide = (*kept[:at], whole("k", keys + 1), *kept[at + 1 :])
    return None if side is None else (source, wide, side)


def joined_scores(
    softmax: Softmax, dims: Dims, keys: Size, side: Side, sizes: Sizes
) -> Joined | Declined | None:
    """Take apart the `keys` + 1 columns of a softmax of which the one at `side` is dropped.

    Args:
        softmax: the softmax.
        dims: dims of its value.
        keys: number of keys.
        side: where the dropped column stands.
        sizes: what is known of sizes.

    Returns:
        The scores and the sink; a decline if matmuls stand above but the column is not provably a
        sink; None if no matmul stands above.
    """
    node = softmax.scores
    while node.target is not aten.cat.default:
        step = _step(node, dims, sizes)
        if step is None:
            return _stuck(
                node, f"a column of weights is dropped, and {node.target} made the scores"
            )
        node, dims = step
    found = _pieces(node, dims, keys, side, sizes)
    return _stuck(node, "the dropped column of weights is not one sink") if found is None else found


def _step(node: fx.Node, dims: Dims, sizes: Sizes) -> tuple[fx.Node, Dims] | None:
    source = node.args[0] if is_float_cast(node) else None
    return (source, dims) if isinstance(source, fx.Node) else above(node, dims, sizes)


def _pieces(cat: fx.Node, dims: Dims, keys: Size, side: Side, sizes: Sizes) -> Joined | None:
    pieces, at = cat.args[0], argument(cat, 1, "dim", 0) % len(dims)
    if not isinstance(pieces, Sequence) or len(pieces) != 2 or dims[at] != whole("k", keys + 1):
        return None
    scores, sinks = pieces if side == "last" else reversed(pieces)
    assert isinstance(scores, fx.Node) and isinstance(sinks, fx.Node)
    if any(len(shape(piece)) != len(dims) for piece in (scores, sinks)):
        return None
    if shape(sinks)[at] != 1 or not sizes.equal(shape(scores)[at], keys):
        return None
    left, right = dims[:at], dims[at + 1 :]
    column = Sinks(sinks, (*left, Dim(), *right))
    return Joined(scores, (*left, whole("k", keys), *right), column)


def _stuck(node: fx.Node, detail: str) -> Declined | None:
    if find_above(node, lambda n: n.target in MATMULS) is None:
        return None
    return Declined(Reason.SPELLING, node.name, detail)

"""Token rules of ops that move elements: views, slices, concatenations, lookups."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, product, shape, size_expr
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.axes import ONE, quotient
from torch_cascade.passes.token_maker import Maker
from torch_cascade.passes.token_registry import (
    Arguments,
    around,
    bound,
    broadcast,
    has_size,
    mixed,
    operands,
    rank_of,
    token_rule,
)
from torch_cascade.passes.token_rows import Axis, Places, Rows

aten = torch.ops.aten
prims = torch.ops.prims

# What was found of a view, as every layer of a model has the same ones.
_VIEWS: WeakKeyDictionary[Sizes, dict[Any, Axis | None]] = WeakKeyDictionary()


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _dim(node: fx.Node, name: str = "dim", default: int = 0) -> int:
    """A dim argument, counted from 0 in the first operand."""
    dim: int = bound(node).get(name, default)
    return dim % max(rank_of(_source(node)), 1)


def _item(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    return maker.call(operator.getitem, given["self"], node.args[1])


@token_rule(operator.getitem, make=_item)
def _getitem(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    """The op with several results is asked about the result that is meant."""
    return {"self": axis}


@token_rule(
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    prims.device_put.default,
)
def _same(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return {"self": axis, "a": axis}


@token_rule(aten.unsqueeze.default)
def _unsqueeze(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    dim = bound(node)["dim"] % rank_of(node)
    if axis.dim == dim:
        return mixed(node, "the dim is new")
    return {"self": axis.at(axis.dim - (axis.dim > dim))}


def _squeezed(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    """Only the dims that were removed: a single row is no dim to be squeezed."""
    gone = _removed(node)
    return maker.call(aten.squeeze.dims, given["self"], gone)


def _removed(node: fx.Node) -> list[int]:
    """The dims of size 1 that a squeeze removes."""
    rank = rank_of(_source(node))
    given = bound(node).get("dim", tuple(range(rank)))
    chosen = {d % rank for d in (given if isinstance(given, Sequence) else (given,))}
    return [d for d, size in enumerate(shape(_source(node))) if d in chosen and size == 1]


@token_rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, make=_squeezed)
def _squeeze(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    rank, gone = rank_of(_source(node)), _removed(node)
    kept = [d for d in range(rank) if d not in gone]
    if len(kept) != rank_of(node):
        return mixed(node, "a symbolic size may or may not be 1")
    return {"self": axis.at(kept[axis.dim])}


def _resized(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    sizes = maker.resized(shape(node), rows)
    if node.target is aten.expand.default:
        return maker.call(aten.expand.default, given["self"], sizes)
    return maker.view(given["self"], sizes)


@token_rule(aten.expand.default, make=_resized, resizes=True)
def _expand(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return {"self": broadcast(rank_of(node), axis, _source(node))}


@token_rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, make=_resized, resizes=True
)
def _view(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """The elements before and after the axis, in row-major order, are the same on both sides."""
    given, asked = shape(_source(node)), (shape(node), shape(_source(node)), axis)
    known = _VIEWS.setdefault(sizes, {})
    if asked not in known:
        before, after = around(shape(node), axis)
        cuts = (_cut(given, dim, before, after, axis, sizes) for dim in range(len(given)))
        known[asked] = next((place for place in cuts if place is not None), None)
    if known[asked] is None:
        return mixed(node, f"no dim of {list(given)} holds the tokens of dim {axis.dim}")
    return {"self": known[asked]}


def _cut(
    given: Sequence[Size], dim: int, before: Size, after: Size, axis: Axis, sizes: Sizes
) -> Axis | None:
    left, right = ONE * product(given[:dim]), ONE * product(given[dim + 1 :])
    if left == 0 or right == 0:
        return None
    outer, inner = quotient(before, left, sizes), quotient(after, right, sizes)
    if outer is None or inner is None:
        return None
    place = Axis(dim, axis.length, outer, inner)
    return place if sizes.equal(place.size, given[dim]) else None


@token_rule(aten.permute.default)
def _permute(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return {"self": axis.at(bound(node)["dims"][axis.dim] % rank_of(node))}


@token_rule(aten.transpose.int)
def _transpose(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    a, b = _dim(node, "dim0"), _dim(node, "dim1")
    return {"self": axis.at({a: b, b: a}.get(axis.dim, axis.dim))}


@token_rule(aten.t.default)
def _t(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return {"self": axis.at(rank_of(node) - 1 - axis.dim)}


def _sliced(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    whole: fx.Node = given["self"]
    return whole if rows.tokens.dim == _dim(node) else maker.again(node, given)


@token_rule(aten.slice.Tensor, make=_sliced)
def _slice(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """Of the tokens all are taken, as `x[:, :n]` does in dynamic shapes, or none are looked at."""
    everything = has_size(_source(node), axis, sizes) and bound(node).get("step", 1) == 1
    if axis.dim == _dim(node) and not everything:
        return mixed(node, "it takes some of the tokens")
    return {"self": axis}


@token_rule(aten.split.Tensor, aten.split_with_sizes.default, aten.cumsum.default)
@token_rule(aten._softmax.default, aten._log_softmax.default)
@token_rule(aten.sort.default, aten.sort.stable, aten.topk.default)
def _along(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """Each row along `dim` is treated alone."""
    last = node.target in (aten.sort.default, aten.sort.stable, aten.topk.default)
    if axis.dim == _dim(node, default=-1 if last else 0):
        return mixed(node, f"it works along the tokens, dim {axis.dim}")
    return {"self": axis}


@token_rule(aten.select.int, aten.unbind.int)
def _select(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return {"self": axis.at(axis.dim + (axis.dim >= _dim(node)))}


@token_rule(aten.flip.default, prims.rev.default)
def _flip(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    if axis.dim in {d % rank_of(node) for d in bound(node)["dims"]}:
        return mixed(node, "it reverses the tokens")
    return {"self": axis, "a": axis}


@token_rule(aten.constant_pad_nd.default)
def _pad(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    pads = bound(node)["pad"]
    last = 2 * (rank_of(node) - 1 - axis.dim)
    if any(size_expr(p) != 0 for p in pads[last : last + 2]):
        return mixed(node, "it pads the tokens")
    return {"self": axis}


@token_rule(aten.repeat.default)
def _repeat(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    if size_expr(bound(node)["repeats"][axis.dim]) != 1:
        return mixed(node, "it repeats the tokens")
    place = broadcast(rank_of(node), axis, _source(node))
    # A dim that repeat itself adds takes no lifted operand, as it would be repeated once more.
    return {"self": place if isinstance(place, Axis) else None}


@token_rule(aten.cat.default)
def _cat(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    given = bound(node)
    pieces: list[fx.Node] = given["tensors"]
    if any(rank_of(piece) != rank_of(node) for piece in pieces):
        return mixed(node, "an empty piece has other dims")
    if axis.dim == given.get("dim", 0) % rank_of(node):
        return mixed(node, "the tokens are put together here")
    return {"tensors": (axis,) * len(pieces)}


@token_rule(aten.stack.default)
def _stack(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    given = bound(node)
    dim = given.get("dim", 0) % rank_of(node)
    if axis.dim == dim:
        return mixed(node, "the dim is new")
    return {"tensors": (axis.at(axis.dim - (axis.dim > dim)),) * len(given["tensors"])}


@token_rule(aten.embedding.default)
def _embedding(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    if axis.dim == rank_of(node) - 1:
        return {"weight": axis.at(1)}
    return {"indices": axis}


@token_rule(aten.index_select.default)
def _index_select(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return {"index": axis.at(0)} if axis.dim == _dim(node) else {"self": axis}


@token_rule(aten.gather.default)
def _gather(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    if axis.dim == _dim(node):
        return {"index": axis}
    if not has_size(_source(node), axis, sizes):
        return mixed(node, "the index names fewer tokens than there are")
    return {"self": axis, "index": axis}


@token_rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _scatter(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """Of the features of each row, such as the experts that a token may take."""
    if axis.dim == _dim(node):
        return mixed(node, "it writes tokens that the data name")
    written = [given for name, _, given in operands(node) if name in ("index", "src")]
    if not all(has_size(given, axis, sizes) for given in written):
        return mixed(node, "the index names fewer tokens than there are")
    return {"self": axis, "index": axis, "src": axis}


@token_rule(aten.index.Tensor)
def _index(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """`x[i, j]`: the broadcast dims of the indices stand where the indexed dims stood."""
    indices: Sequence[Any] = bound(node)["indices"]
    used = [d for d, index in enumerate(indices) if index is not None]
    if any(indices[d].meta["val"].dtype in (torch.bool, torch.uint8) for d in used):
        return mixed(node, "which rows a mask selects is data")
    adjacent = used == list(range(used[0], used[-1] + 1))
    start, width = used[0] if adjacent else 0, max(rank_of(indices[d]) for d in used)
    local = axis.dim - start
    if 0 <= local < width:
        within = axis.at(local)
        places = [None if i is None else broadcast(width, within, i) for i in indices]
        return {"indices": tuple(places)}
    free = [d for d in range(rank_of(_source(node))) if d not in used]
    return {"self": axis.at(free[axis.dim - (width if local >= width else 0)])}

"""The indices of a sort: a permutation p, known as such with what is computed of it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_cascade.compiler.graph import shape, tensor
from torch_cascade.passes.token_frontier import is_result
from torch_cascade.passes.token_maker import Maker
from torch_cascade.passes.token_registry import bound, rank_of

aten = torch.ops.aten
prims = torch.ops.prims

SORTS = (aten.sort.default, aten.sort.stable)


def sort_of(node: fx.Node) -> fx.Node | None:
    """The sort of one dim whose indices a node is: they are a permutation."""
    if not is_result(node) or node.args[1] != 1:
        return None
    sort = node.args[0]
    assert isinstance(sort, fx.Node)
    one_dim = sort.target in SORTS and rank_of(bound(sort)["self"]) == 1
    return sort if one_dim else None


def inverted(node: fx.Node) -> fx.Node | None:
    """The sort whose indices a node is the inverse of.

    `q[p] = arange(S)` writes every entry of q; the indices of a permutation's sort are its inverse.
    """
    outer = sort_of(node)
    if outer is not None and not bound(outer).get("descending", False):
        return sort_of(bound(outer)["self"])
    given = bound(node) if node.op == "call_function" else {}
    plain = node.target is aten.index_put.default and not given.get("accumulate", False)
    if not plain or len(given["indices"]) != 1 or not _counts_up(given["values"]):
        return None
    index: fx.Node | None = given["indices"][0]
    whole = index is not None and shape(node) == shape(index) == shape(given["values"])
    return sort_of(index) if index is not None and whole else None


def _counts_up(node: fx.Node) -> bool:
    given = node.kwargs
    return node.target is prims.iota.default and (given["start"], given["step"]) == (0, 1)


def places_of(index: fx.Node) -> tuple[fx.Node, int] | None:
    """(sort, c) of `p // c`."""
    times: Any = 1
    if index.target is aten.div.Tensor_mode:  # p is not negative: floor and trunc are the same
        index, times = index.args[:2]  # type: ignore[assignment]
    sort = sort_of(index) if isinstance(index, fx.Node) else None
    return (sort, times) if sort is not None and isinstance(times, int) and times > 0 else None


def inverse_again(maker: Maker, sort: fx.Node) -> fx.Node:
    """The inverse of a sort's indices, int64 [S]."""
    known = maker.notes.setdefault("inverse", {})
    if sort not in known:
        places = maker.call(operator.getitem, sort, 1)
        options = {"dtype": torch.int64, "device": tensor(places).device}
        count = shape(places)[0]
        numbers = maker.call(
            prims.iota.default, count, start=0, step=1, requires_grad=False, **options
        )
        base = maker.call(aten.full.default, [count], 0, **options)
        known[sort] = maker.call(aten.index_put.default, base, [places], numbers)
    inverse: fx.Node = known[sort]
    return inverse


def places_again(maker: Maker, index: fx.Node, sort: fx.Node) -> fx.Node:
    """What `p // c` is for another sort."""
    found = places_of(index)
    assert found is not None, "planned so"
    places = maker.call(operator.getitem, sort, 1)
    if found[1] == 1:
        return places
    return maker.call(aten.div.Tensor_mode, places, found[1], rounding_mode="floor")

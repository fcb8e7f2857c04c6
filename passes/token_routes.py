"""Rows in the order of a sort: experts whose tokens are sorted by expert, multiplied, put back.

With e [S] the expert of each row and p the indices of `sort(e)`, a value x [S, ..] is *in the
order of the sort* if x[i] = y[p[i]], where y is a value whose rows are tokens (S = N * T * k with k
experts a token). Neither p nor the size of a group is known, and neither has to be:

- y[p] brings rows into the order, so do y[p // c] where each row of y is c rows, and sorted e;
- an op that treats all rows alike, wherever they stand, keeps the order;
- a grouped product whose offsets are the counts of the same sorted experts multiplies each row by
  the weights of its own expert, so it keeps the order, too;
- x[q] with q the inverse of p gives y back; so does z[p] = x, and z[p // c] += x gives the sums of
  c rows.

So the rows of y that are wanted are made of the same nodes: their experts are sorted anew, the
groups counted anew, and that sort's inverse puts them back. Whatever else reads p, an index that is
not the inverse, offsets of something else: declined.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_cascade.compiler.graph import Sizes, shape, tensor
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import ONE, quotient
from torch_cascade.passes.token_frontier import is_grouped, is_result
from torch_cascade.passes.token_groups import Counts, counts_of, groups_of
from torch_cascade.passes.token_maker import Maker
from torch_cascade.passes.token_registry import (
    Arguments,
    Make,
    bound,
    mixed,
    operands,
    place_of,
    rank_of,
    rule_of,
)
from torch_cascade.passes.token_rows import Axis, Operand, Rows, Tangled
from torch_cascade.passes.token_rules import without_rule
from torch_cascade.passes.token_sorts import inverse_again, inverted, places_again, places_of

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Route:
    """How a value into, in or out of the order of a sort is made.

    Attributes:
        operands: of which rows are needed. The sort itself stands for what is computed of it: its
            indices, their inverse, the offsets of the groups.
        make: writes the op; None for the op's rule.
    """

    operands: tuple[Operand, ...]
    make: Make | None = None


def route_of(node: fx.Node, rows: Rows, sizes: Sizes) -> Route | Declined | None:
    """The route of a value, if its rows are in the order of a sort or come from there.

    Args:
        node: the value.
        rows: its rows; with `sort`, they are wanted in the order of that sort.
        sizes: facts about the sizes.

    Returns:
        None for rows in the order of tokens that come from no sort: those of the ordinary rules.
    """
    if node.op != "call_function":
        return None if rows.sort is None else mixed(node, "its rows are in no order of a sort")
    if rows.sort is None:
        return _looked_up(node, rows) or _written(node, rows, sizes)
    if node is rows.sort:
        source = bound(node)["self"]
        return Route((Operand("self", None, (source, replace(rows, sort=None))),))
    if is_result(node) and node.args[0] is rows.sort:
        if node.args[1] == 1:
            return mixed(node, "the numbers of the rows that a sort moves are read")
        return Route((Operand("self", None, (rows.sort, rows)),))
    if is_grouped(node.target):
        return _grouped(node, rows, sizes)
    entering = _entering(node, rows, sizes)  # a decline is false
    return _kept(node, rows, sizes) if entering is None else entering


def _looked_up(node: fx.Node, rows: Rows) -> Route | None:
    """`x[q]`: back in the order of tokens."""
    index = _only_index(node)
    sort = None if index is None else inverted(index)
    if sort is None or not _in_first(rows):
        return None
    ordered = replace(rows, sort=sort)
    taken = (bound(node)["self"], ordered), (sort, ordered)
    return Route((Operand("self", None, taken[0]), Operand("indices", 0, taken[1])), _put_back)


def _written(node: fx.Node, rows: Rows, sizes: Sizes) -> Route | Declined | None:
    """`z[p] = x` or `z[p // c] += x`: the same, by writing."""
    given = bound(node)
    places: Sequence[Any] = given["indices"] if node.target is aten.index_put.default else ()
    found = places_of(places[0]) if len(places) == 1 and places[0] is not None else None
    if found is None or not _in_first(rows):
        return None
    sort, times = found
    added = bool(given.get("accumulate", False))
    if times != 1 and not added:
        return mixed(node, f"{times} rows of the sort are written to one")
    x: fx.Node = given["values"]
    if rank_of(x) != rank_of(node) or not all(map(sizes.equal, shape(x)[1:], shape(node)[1:])):
        return mixed(node, "what it writes is not one row for each row of the sort")
    ordered = replace(_scaled(rows, times), sort=sort)
    taken = (Operand("values", None, (x, ordered)), Operand("indices", 0, (sort, ordered)))
    if not added:  # every row is written
        return Route(taken, _put_back)
    return Route((*taken, Operand("self", None, (given["self"], rows))), _added)


def _put_back(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    """By looking up, also what was written: `x[inverse of p]` for `z[p] = x`."""
    ordered = given["self" if node.target is aten.index.Tensor else "values"]
    return maker.call(aten.index.Tensor, ordered, [inverse_again(maker, given["indices"][0])])


def _added(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    places = places_again(maker, bound(node)["indices"][0], given["indices"][0])
    return maker.again(node, {**given, "indices": [places]})


def _scaled(rows: Rows, times: int) -> Rows:
    """The rows of what has so many rows for each of these."""
    tokens, batch = rows.tokens, rows.batch
    batch = None if batch is None else replace(batch, inner=batch.inner * times)
    return replace(rows, tokens=replace(tokens, inner=tokens.inner * times), batch=batch)


def _in_first(rows: Rows) -> bool:
    return rows.tokens.dim == 0 and (rows.batch is None or rows.batch.dim == 0)


def _only_index(node: fx.Node) -> fx.Node | None:
    """I of `x[i]`."""
    if node.target is not aten.index.Tensor:
        return None
    indices = bound(node)["indices"]
    return indices[0] if len(indices) == 1 else None


def _entering(node: fx.Node, rows: Rows, sizes: Sizes) -> Route | Declined | None:
    """`y[p]`, or `y[p // c]`."""
    index = _only_index(node)
    found = None if index is None else places_of(index)
    if found is None or found[0] is not rows.sort or rows.tokens.dim != 0:
        return None
    source = _rows_of(rows, found[1], sizes)
    if source is None:
        return mixed(node, f"{found[1]} rows of the sort are not one of what it looks up")
    taken = (bound(node)["self"], source), (rows.sort, rows)
    return Route((Operand("self", None, taken[0]), Operand("indices", 0, taken[1])), _entered)


def _rows_of(rows: Rows, times: int, sizes: Sizes) -> Rows | None:
    """The rows of what has one row for each `times` rows of the sort."""
    axes: list[Axis | None] = []
    for axis in (rows.tokens, rows.batch):
        inner = ONE if axis is None else quotient(axis.inner, ONE * times, sizes)
        if inner is None:
            return None
        axes.append(None if axis is None else replace(axis, dim=0, inner=inner))
    assert axes[0] is not None
    return Rows(axes[0], axes[1])


def _entered(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    places = places_again(maker, bound(node)["indices"][0], given["indices"][0])
    return maker.call(aten.index.Tensor, given["self"], [places])


def _grouped(node: fx.Node, rows: Rows, sizes: Sizes) -> Route | Declined:
    """A product of each row with the weights of its group."""
    given = bound(node)
    (name, x), (_, weight) = list(given.items())[:2]
    plain = rows.tokens.dim == 0 and rank_of(x) == 2 and rank_of(weight) == 3
    if not plain or given.get("offs") is None or given.get("bias") is not None:
        return mixed(node, "only rows that are grouped, [S, K] by [E, K, M], are looked at")
    assert rows.sort is not None
    wrong = groups_of(given["offs"], rows.sort, shape(weight)[0], sizes)
    if wrong is not None:
        return mixed(node, wrong)
    ordered = Operand(name, None, (x, rows)), Operand("offs", None, (rows.sort, _moved(rows, 0)))
    return Route(ordered, _multiplied)


def _multiplied(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    found, sort = counts_of(bound(node)["offs"]), given["offs"]
    assert found is not None, "planned so"
    return maker.again(node, {**given, "offs": _offsets(maker, found, sort)})


def _offsets(maker: Maker, counts: Counts, sort: fx.Node) -> fx.Node:
    """The same counts, of other sorted experts."""
    known = maker.notes.setdefault("offsets", {})
    if (counts, sort) not in known:
        x = maker.call(operator.getitem, sort, 0)
        if tensor(x).dtype != counts.dtype:
            x = maker.call(prims.convert_element_type.default, x, counts.dtype)
        for step in counts.steps:
            given = bound(step)
            x = maker.again(step, {**given, next(iter(given)): x})
        known[counts, sort] = x
    offsets: fx.Node = known[counts, sort]
    return offsets


def _moved(rows: Rows, dim: int) -> Rows:
    """The same rows, in another dim."""
    batch = None if rows.batch is None else rows.batch.at(dim)
    return replace(rows, tokens=rows.tokens.at(dim), batch=batch)


def _kept(node: fx.Node, rows: Rows, sizes: Sizes) -> Route | Declined:
    """An op that treats all rows alike: its rule is asked for the dim as one axis."""
    rule = rule_of(node.target)
    if rule is None:
        return Declined(Reason.NO_TOKEN_RULE, node.name, without_rule(node.target))
    if rule.counts:
        return mixed(node, "it depends on where a row stands, which a sort decides")
    places = rule.places(node, Axis(rows.tokens.dim, rows.tokens.size), sizes)
    if isinstance(places, Declined):
        return places
    found: list[Operand] = []
    for name, index, operand in operands(node):
        place = place_of(places, name, index)
        if isinstance(place, Tangled) or (
            isinstance(place, Axis) and (place.outer, place.inner) != (ONE, ONE)
        ):
            return mixed(node, "the rows that a sort moved are not kept apart")
        if isinstance(place, Axis):
            found.append(Operand(name, index, (operand, _moved(rows, place.dim))))
    if not found and not rule.resizes:
        return mixed(node, "no operand holds the rows of the sort")
    return Route(tuple(found))

"""Writes a row plan into the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Sizes, shape, tensor
from torch_cascade.passes.token_axis import RowPlan, Step
from torch_cascade.passes.token_frontier import seen_through
from torch_cascade.passes.token_maker import Maker
from torch_cascade.passes.token_registry import bound, rule_of
from torch_cascade.passes.token_rows import Demand, Rows

Fuse: TypeAlias = Callable[[Maker, fx.Node, fx.Node, fx.Node], tuple[fx.Node, fx.Node]]
"""(maker, marker, rows of k, rows of v) -> the keys and values that later layers read whole."""


@dataclass(frozen=True)
class MadeRows:
    """What was written.

    Attributes:
        index: the rows.
        rows: for each demand of the plan, the node that holds its rows.
        fused: for each barrier, its keys and values for all tokens.
    """

    index: fx.Node
    rows: dict[Demand, fx.Node]
    fused: dict[fx.Node, tuple[fx.Node, fx.Node]]

    def of(self, node: fx.Node, rows: Rows) -> fx.Node:
        """The rows of a value that was asked for."""
        return self.rows[seen_through(node), rows]


def over_cached(maker: Maker, marker: fx.Node, k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The cached keys and values with the fresh rows written over them."""
    _, _, k_cached, v_cached, *_ = marker.args
    assert isinstance(k_cached, fx.Node) and isinstance(v_cached, fx.Node)
    return maker.scatter(k_cached, 2, k), maker.scatter(v_cached, 2, v)


@dataclass(frozen=True)
class Narrowed:
    """Rows that are some of the rows of an earlier plan (gradual filtering).

    Attributes:
        made: what the earlier plan wrote.
        local: int64, dims as the index: places in the earlier index, which at these is the index.
    """

    made: MadeRows
    local: fx.Node


def apply_rows(
    plan: RowPlan, index: fx.Node, *, narrowed: Narrowed | None = None, fuse: Fuse = over_cached
) -> MadeRows:
    """Insert the nodes of a plan; the barriers' results are replaced, nothing else is.

    The nodes that make rows of a value stand before that value, but after the index. The caller
    replaces what it asked rows of; what nobody reads any more is dead code.

    Args:
        plan: of the graph that `index` is in.
        index: int64, the tokens that are wanted: [N, K] where each batch row has its own (plan with
            a batch; [1, K] or [K] without), in any order. Positions count from 0 in the T tokens.
        narrowed: where the rows of a plan with `earlier` rows are taken from.
        fuse: how the rows of a barrier's k and v become keys and values for all tokens.

    Raises:
        ValueError: the index has another dtype or other dims.
    """
    _check_index(plan, index)
    each = plan.batch is not None
    maker, made = Maker(index, per_batch_row=each), MadeRows(index, {}, {})
    narrow = None if narrowed is None else _Narrow(narrowed, each)
    order = {node: i for i, node in enumerate(index.graph.nodes)}
    events: list[Step | fx.Node] = [*plan.steps, *plan.barriers]
    for event in sorted(events, key=lambda event: order[_node(event)]):
        if isinstance(event, Step) and event.narrowed:
            assert narrow is not None, "the plan has earlier rows"
            made.rows[event.demand] = narrow.rows(event)
        elif isinstance(event, Step):
            made.rows[event.demand] = _written(maker, event, made.rows)
        else:
            maker.place(event)
            k, v = (made.rows[demand] for demand in plan.barriers[event])
            made.fused[event] = fuse(maker, event, k, v)
    for marker, results in made.fused.items():
        for user in list(marker.users):
            which = user.args[1]
            assert isinstance(which, int)
            user.replace_all_uses_with(results[which])
    return made


class _Narrow:
    """Gathers from the rows of an earlier plan."""

    def __init__(self, narrowed: Narrowed, each: bool) -> None:
        self.made, self.maker = narrowed.made, Maker(narrowed.local, per_batch_row=each)
        self.count = shape(narrowed.made.index)[-1]

    def rows(self, step: Step) -> fx.Node:
        source, rows = self.made.rows[step.demand], step.demand[1]
        self.maker.place_after(source)
        tokens = replace(rows.tokens, length=self.count)
        batch = rows.batch
        if batch is not None and batch.dim == tokens.dim:
            inner = batch.inner * self.count / rows.tokens.length
            batch = replace(batch, inner=sympy.cancel(inner))
        return self.maker.gather(source, Rows(tokens, batch))


def _node(event: Step | fx.Node) -> fx.Node:
    return event.demand[0] if isinstance(event, Step) else event


def _check_index(plan: RowPlan, index: fx.Node) -> None:
    sizes, dtype = shape(index), tensor(index).dtype
    wanted = "[K]" if plan.batch is None else f"[{plan.batch}, K]"
    if plan.batch is None:
        right = len(sizes) == 1 or (len(sizes) == 2 and sizes[0] == 1)
    else:
        right = len(sizes) == 2 and Sizes.of(index.graph).equal(sizes[0], plan.batch)
    if not right or dtype != torch.int64:
        raise ValueError(f"index: expected int64 {wanted}, got {dtype} {list(sizes)}")


def _written(maker: Maker, step: Step, made: dict[Demand, fx.Node]) -> fx.Node:
    node, rows = step.demand
    if step.gathered:
        maker.place_after(node)
        return maker.gather(node, rows)
    maker.place(node)
    given: dict[str, Any] = bound(node)
    for operand in step.operands:
        taken = made[operand.demand]
        if operand.lift is not None:
            taken = maker.lift(taken, operand.demand[1].tokens, operand.lift)
        if operand.index is None:
            given[operand.name] = taken
        else:
            given[operand.name] = list(given[operand.name])
            given[operand.name][operand.index] = taken
    if step.make is not None:
        return step.make(maker, node, rows, given)
    rule = rule_of(node.target)
    assert rule is not None, "planned by a rule"
    return rule.make(maker, node, rows, given)

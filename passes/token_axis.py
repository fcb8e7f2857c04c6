"""Token rows on demand: a value with K token rows in place of its T tokens.

`plan_rows` is asked for rows of some values, say of the last hidden state, and goes up the graph.
A value that is computed in full anyway is gathered there, once; any other is made again from the
rows of its operands, by one rule an op. `cascade::reuse_kv` is a barrier: whoever needs its keys
or values whole gets them whole, with the fresh rows of k and v written over the cached ones, so
that expansions of heads, the masks' key axis and the cache's outputs stay as they are.

The plan is analysis: nothing is edited until `apply_rows`. An op without a rule is a decline with
its name, unless its value may be computed in full: then that is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

import torch_cascade.passes.token_attention
import torch_cascade.passes.token_views  # noqa: F401  (registers its rules)
from torch_cascade.compiler.graph import Size, Sizes, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import ONE, quotient
from torch_cascade.passes.token_frontier import (
    Frontier,
    contracts,
    is_result,
    reuse_kv,
    seen_through,
)
from torch_cascade.passes.token_registry import (
    Make,
    has_size,
    mixed,
    operands,
    place_of,
    rule_of,
)
from torch_cascade.passes.token_routes import route_of
from torch_cascade.passes.token_rows import (
    Axis,
    Demand,
    Operand,
    Place,
    Rows,
    Spread,
    Tangled,
)
from torch_cascade.passes.token_rules import without_rule


@dataclass(frozen=True)
class Step:
    """One value to be made.

    Attributes:
        demand: the value and its rows.
        operands: of which rows are needed; the other arguments are taken as they are.
        gathered: the value is gathered from the full one; there are no operands then.
        narrowed: it is gathered from the rows of an earlier plan.
        make: writes the op; None for the op's rule.
    """

    demand: Demand
    operands: tuple[Operand, ...] = ()
    gathered: bool = False
    narrowed: bool = False
    make: Make | None = None


@dataclass(frozen=True)
class RowPlan:
    """How to make the rows that were asked for.

    Attributes:
        steps: in the order of the graph, operands first.
        barriers: the `reuse_kv` whose keys and values are needed whole, with the rows they take.
        batch: N where each batch row has rows of its own, else None.
    """

    steps: tuple[Step, ...]
    barriers: Mapping[fx.Node, tuple[Demand, Demand]]
    batch: Size | None


def plan_rows(
    graph: fx.Graph,
    frontier: Frontier,
    *,
    tokens: Size,
    batch: Size | None = None,
    rows: Sequence[Demand] = (),
    whole: Sequence[fx.Node] = (),
    earlier: Collection[Demand] = (),
    sizes: Sizes,
) -> RowPlan | Declined:
    """Plan the rows of some values, and all that they need.

    Args:
        graph: functional ATen with `meta["val"]`.
        frontier: what is computed in full.
        tokens: T, the length of the token axis.
        batch: N where each batch row has rows of its own (the index is [N, K], N is not 1); None
            where all share them.
        rows: the values and the axes along which rows are wanted.
        whole: values wanted for all tokens, such as a cache's keys: below the frontier they need
            a barrier.
        earlier: rows that an earlier plan makes, of which these are some: they are gathered.
        sizes: facts about the sizes.

    Raises:
        ValueError: an axis in `rows` does not have the size of its dim.
    """
    for node, asked in rows:
        for axis in (asked.tokens, asked.batch):
            if axis is not None and not has_size(node, axis, sizes):
                raise ValueError(
                    f"rows of {node.name}: expected dim {axis.dim} of size {axis.size}, "
                    f"got {shape(node)}"
                )
    return _Planner(frontier, tokens, batch, sizes, earlier).plan(graph, rows, whole)


@dataclass
class _Planner:
    frontier: Frontier
    tokens: Size
    batch: Size | None
    sizes: Sizes
    earlier: Collection[Demand]
    steps: dict[Demand, Step] = field(default_factory=dict)
    barriers: dict[fx.Node, tuple[Demand, Demand]] = field(default_factory=dict)
    _rows: list[Demand] = field(default_factory=list)
    _whole: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    _seen: set[fx.Node] = field(default_factory=set)

    def plan(
        self, graph: fx.Graph, rows: Iterable[Demand], whole: Iterable[fx.Node]
    ) -> RowPlan | Declined:
        self._rows += [(seen_through(node), asked) for node, asked in rows]
        self._whole += [(node, node) for node in whole]
        while self._rows or self._whole:
            declined = self._next()
            if declined is not None:
                return declined
        place = {node: i for i, node in enumerate(graph.nodes)}
        steps = sorted(self.steps.values(), key=lambda step: place[step.demand[0]])
        return RowPlan(tuple(steps), self.barriers, self.batch)

    def _next(self) -> Declined | None:
        if self._whole:
            return self._need_whole(*self._whole.pop())
        demand = self._rows.pop()
        if demand in self.steps:
            return None
        step = self._step(*demand)
        if isinstance(step, Declined):
            return step
        self.steps[demand] = step
        self._rows += [operand.demand for operand in step.operands]
        if not step.gathered:
            taken = {(o.name, o.index) for o in step.operands}
            others = (n for name, i, n in operands(demand[0]) if (name, i) not in taken)
            self._whole += [(node, node) for node in others]
        return None

    def _need_whole(self, node: fx.Node, wanted: fx.Node) -> Declined | None:
        """A value for all tokens: as it is above the frontier, through barriers below it.

        Args:
            node: the value.
            wanted: what it is needed for, to be named where that fails.
        """
        if node in self._seen or node not in self.frontier.below:
            return None
        self._seen.add(node)
        if node.target is reuse_kv:
            return self._barrier(node)
        if contracts(node.target):
            return mixed(wanted, f"it would need all tokens of {node.name}, below the check layer")
        self._whole += [(source, wanted) for source in node.all_input_nodes]
        return None

    def _barrier(self, marker: fx.Node) -> Declined | None:
        k, v = marker.args[:2]
        assert isinstance(k, fx.Node) and isinstance(v, fx.Node)
        batch = None if self.batch is None else Axis(0, self.batch)
        asked = Rows(Axis(2, self.tokens), batch)
        if not all(has_size(k, axis, self.sizes) for axis in (asked.tokens, batch) if axis):
            return mixed(marker, f"its keys {shape(k)} have not the {self.tokens} tokens in dim 2")
        self.barriers[marker] = (seen_through(k), asked), (seen_through(v), asked)
        self._rows += self.barriers[marker]
        return None

    def _step(self, node: fx.Node, rows: Rows) -> Step | Declined:
        wrong = self._misplaced(node, rows)
        if wrong is not None:
            return wrong
        if rows.sort is not None:  # what is there is in the order of another sort
            return self._made(node, rows)
        step = self._gathered(node, rows) or self._made(node, rows)
        if isinstance(step, Declined) and node not in self.frontier.below:
            return Step((node, rows), gathered=True)
        return step

    def _gathered(self, node: fx.Node, rows: Rows) -> Step | None:
        """Values that are there; not constants, whose rows need no gather."""
        own_rows = self.batch is None or rows.batch is not None
        single = isinstance(node.meta["val"], torch.Tensor)
        if own_rows and single and (node, rows) in self.earlier:
            return Step((node, rows), gathered=True, narrowed=True)
        made_of_nothing = node.op == "call_function" and not node.all_input_nodes
        source = node.args[0] if is_result(node) else None
        full = node in self.frontier.full or source in self.frontier.full
        full |= source is not None and node not in self.frontier.below
        return Step((node, rows), gathered=True) if full and not made_of_nothing else None

    def _made(self, node: fx.Node, rows: Rows) -> Step | Declined:
        route = route_of(node, rows, self.sizes)
        if isinstance(route, Declined):
            return route
        if route is not None:
            return Step((node, rows), route.operands, make=route.make)
        rule = rule_of(node.target) if node.op == "call_function" else None
        if rule is None:
            return Declined(Reason.NO_TOKEN_RULE, node.name, without_rule(node.target))
        tokens = rule.places(node, rows.tokens, self.sizes)
        if isinstance(tokens, Declined):
            return tokens
        batch = {} if rows.batch is None else rule.places(node, rows.batch, self.sizes)
        if isinstance(batch, Declined):
            return batch
        found: list[Operand] = []
        for name, index, operand in operands(node):
            token, row = place_of(tokens, name, index), place_of(batch, name, index)
            needed = self._operand(node, rows, (name, index, operand), token, row)
            if isinstance(needed, Declined):
                return needed
            found += [needed] if needed is not None else []
        if not found and not rule.resizes:
            return mixed(node, "no operand holds the tokens")
        return Step((node, rows), tuple(found))

    def _misplaced(self, node: fx.Node, rows: Rows) -> Declined | None:
        if not isinstance(node.meta["val"], torch.Tensor):
            return None  # several results: the one that is meant was looked at
        for axis in (rows.tokens, rows.batch):
            if axis is not None and not has_size(node, axis, self.sizes):
                return mixed(node, f"dim {axis.dim} of {shape(node)} is not of size {axis.size}")
        return None

    def _operand(
        self,
        node: fx.Node,
        rows: Rows,
        which: tuple[str, int | None, fx.Node],
        tokens: Place,
        batch: Place,
    ) -> Operand | Declined | None:
        name, index, operand = which
        if isinstance(tokens, Tangled):
            return mixed(node, f"its operand {name} depends on the tokens in a way of its own")
        if not isinstance(tokens, Axis):
            return None
        source = seen_through(operand)
        if rows.batch is None or isinstance(batch, Axis):
            place = batch if isinstance(batch, Axis) else None
            asked = Rows(tokens, place)
            if not self._apart(asked):
                return mixed(node, "tokens and batch are merged in an order that is not understood")
            return Operand(name, index, (source, asked))
        alone = rows.batch.size == rows.batch.length and tokens.outer == ONE
        if isinstance(batch, Spread) and alone:
            return Operand(name, index, (source, Rows(tokens)), batch.from_right)
        return mixed(node, "tokens and batch rows come from different operands")

    def _apart(self, rows: Rows) -> bool:
        """Whether batch and tokens, if merged in one dim, stand there as `[.., N, .., T, ..]`."""
        tokens, batch = rows.tokens, rows.batch
        if batch is None or batch.dim != tokens.dim:
            return True
        return quotient(tokens.outer, batch.outer * batch.length, self.sizes) is not None

"""Rows of the last hidden state of a captured model, made and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support.reuse_models import BATCH, Marked
from support.tolerance import error_bound, max_error
from torch import Tensor, fx

from torch_cascade.compiler.graph import Sizes, fake_mode, shape
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.token_apply import apply_rows
from torch_cascade.passes.token_axis import RowPlan, plan_rows
from torch_cascade.passes.token_frontier import Frontier, reuse_kv
from torch_cascade.passes.token_rows import Axis, Rows
from torch_cascade.passes.verify import check_graph

EACH = torch.tensor([[10, 3, 7, 0], [2, 10, 5, 9]])
SHARED = EACH[0]


@dataclass
class Made:
    """Rows of the last hidden state, written into a copy of a captured graph."""

    plan: RowPlan
    result: Tensor
    wanted: Tensor
    graph: fx.Graph


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy, and which of its nodes stands for which."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    new.output(new.graph_copy(graph, copies))
    return new, copies


def index_input(graph: fx.Graph, index: Tensor, batch: Any) -> fx.Node:
    """A graph input for the rows; its batch is the graph's own size."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(f"rows_of_{last.name}")
    with fake_mode(graph) as mode:
        lead = () if index.dim() == 1 else (_size(mode, batch),)
        node.meta["val"] = torch.empty(*lead, index.shape[-1], dtype=torch.int64)
    return node


def _size(mode: Any, expr: Any) -> Any:
    if expr.is_number:
        return int(expr)
    return mode.shape_env.create_symintnode(expr, hint=BATCH)


def rows_of_hidden(found: Marked, index: Tensor, *, layer: int | None = 0) -> Made:
    """Rows of the last hidden state, from below the marker of a layer (None: from the ids)."""
    graph, _ = copied(found.graph)
    hidden = found.hidden(graph)
    markers = graph.find_nodes(op="call_function", target=reuse_kv)
    batch, tokens = shape(hidden)[:2]
    each = index.dim() == 2
    asked = Rows(Axis(1, tokens), Axis(0, batch) if each else None)
    plan = plan_rows(
        graph,
        Frontier.of(graph, None if layer is None else markers[layer]),
        tokens=tokens,
        batch=batch if each else None,
        rows=[(hidden, asked)],
        sizes=Sizes.of(graph),
    )
    assert not isinstance(plan, Declined), plan
    values = dict(found.inputs)
    for marker in plan.barriers:
        values |= cached_but(marker, found.values[marker.name], index)
    made = apply_rows(plan, index_input(graph, index, batch)).of(hidden, asked)
    output = next(iter(graph.find_nodes(op="output")))
    output.args = (made,)
    graph.eliminate_dead_code()
    check_graph(graph, after="rows")
    with torch.no_grad():
        result = fx.GraphModule(found.module, graph)(*values.values(), index)
    return Made(plan, result, taken(found.values[hidden.name], index), graph)


def taken(full: Tensor, index: Tensor) -> Tensor:
    """Rows of [N, T, D]."""
    if index.dim() == 1:
        return full[:, index]
    return torch.stack([row[i] for row, i in zip(full, index, strict=True)])


def cached_but(marker: fx.Node, fresh: tuple[Tensor, Tensor], index: Tensor) -> dict[str, Tensor]:
    """The cached keys and values: the full computation's, but NaN where rows are recomputed."""
    result = {}
    for node, whole in zip(marker.args[2:4], fresh, strict=True):
        whole = whole.clone()
        for row, chosen in zip(whole, index.expand(BATCH, -1), strict=True):
            row[:, chosen] = torch.nan
        result[node.name] = whole
    return result


def assert_rows(result: Tensor, wanted: Tensor) -> None:
    """Equal up to rounding: the models' norms and angles are float32 in any dtype."""
    assert result.shape == wanted.shape and result.dtype == torch.float64
    bound = error_bound(wanted, wanted, torch.float32)
    assert torch.isfinite(result).all() and max_error(result, wanted) <= bound
    if wanted.shape[1] > 1:  # the rows differ by far more than that
        assert max_error(wanted.flip(1), wanted) > 1000 * bound

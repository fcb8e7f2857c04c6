"""Rows of captured models: planned over whole graphs, and equal to rows of the full result."""

from dataclasses import dataclass

import pytest
import torch
from support.reuse_models import BATCH, REUSING, TOKENS, marked
from support.token_cases import TESTED
from support.tolerance import error_bound, max_error
from torch import fx

from torch_cascade.compiler.graph import Sizes, fake_mode, shape
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.token_apply import apply_rows
from torch_cascade.passes.token_axis import plan_rows
from torch_cascade.passes.token_frontier import Frontier, reuse_kv
from torch_cascade.passes.token_registry import rule_of
from torch_cascade.passes.token_rows import Axis, Rows
from torch_cascade.passes.token_rules import DECLINED_OPS, op_name
from torch_cascade.passes.verify import check_graph

NEITHER = {torch.ops.aten.sym_size.int}  # sizes, not values
EACH = torch.tensor([[10, 3, 7, 0], [2, 10, 5, 9]])
SHARED = torch.tensor([10, 3, 7, 0])


@dataclass
class Made:
    """Rows of the last hidden state, written into a copy of a captured graph."""

    plan: object
    result: torch.Tensor
    wanted: torch.Tensor
    graph: fx.Graph


def copied(graph):
    new, copies = fx.Graph(), {}
    new.output(new.graph_copy(graph, copies))
    return new, copies


def index_input(graph, index, batch):
    """A graph input for the rows; its batch is the graph's own size."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder("rows")
    with fake_mode(graph) as mode:
        lead = () if index.dim() == 1 else (_size(mode, batch),)
        node.meta["val"] = torch.empty(*lead, index.shape[-1], dtype=torch.int64)
    return node


def _size(mode, expr):
    if expr.is_number:
        return int(expr)
    return mode.shape_env.create_symintnode(expr, hint=BATCH)


def rows_of_hidden(found, index, *, layer=0):
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
        result = fx.GraphModule({}, graph)(*values.values(), index)
    return Made(plan, result, taken(found.values[hidden.name], index), graph)


def taken(full, index):
    if index.dim() == 1:
        return full[:, index]
    return torch.stack([row[i] for row, i in zip(full, index, strict=True)])


def cached_but(marker, fresh, index):
    """The cached keys and values: the full computation's, but NaN where rows are recomputed."""
    result = {}
    for node, whole in zip(marker.args[2:4], fresh, strict=True):
        whole = whole.clone()
        for row, chosen in zip(whole, index.expand(BATCH, -1), strict=True):
            row[:, chosen] = torch.nan
        result[node.name] = whole
    return result


def assert_rows(made):
    """Equal up to rounding: the models' norms and angles are float32 in any dtype."""
    assert made.result.shape == made.wanted.shape and made.result.dtype == torch.float64
    bound = error_bound(made.wanted, made.wanted, torch.float32)
    assert torch.isfinite(made.result).all() and max_error(made.result, made.wanted) <= bound
    if made.wanted.shape[1] > 1:  # the rows differ by far more than that
        assert max_error(made.wanted.flip(1), made.wanted) > 1000 * bound


@pytest.mark.parametrize("family", REUSING)
class TestFamilies:
    def test_every_op_has_a_rule_or_a_reason(self, family):
        for padded in (False, True):
            graph = marked(family, padded=padded).graph
            met = {node.target for node in graph.nodes if node.op == "call_function"}
            assert len(met) > 15
            for target in met - NEITHER - {reuse_kv}:
                assert rule_of(target) is not None or op_name(target) in DECLINED_OPS, target
                assert target in TESTED, f"no case in tests/support/token_cases.py for {target}"

    @pytest.mark.parametrize("layer", [0, None])
    def test_rows_of_the_last_hidden_state(self, family, layer):
        made = rows_of_hidden(marked(family), EACH, layer=layer)
        assert_rows(made)
        assert len(made.plan.barriers) == (1 if layer == 0 else 2)

    def test_with_padding(self, family):
        assert_rows(rows_of_hidden(marked(family, padded=True), EACH))


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "GPT2"])
class TestIndices:
    @pytest.mark.parametrize("dynamic", [None, True])
    @pytest.mark.parametrize("padded", [False, True])
    def test_shared_by_the_batch(self, family, padded, dynamic):
        found = marked(family, padded=padded, dynamic=dynamic)
        for layer in (0, None):
            assert_rows(rows_of_hidden(found, SHARED, layer=layer))

    @pytest.mark.parametrize("padded", [False, True])
    def test_symbolic_sizes(self, family, padded):
        found = marked(family, padded=padded, dynamic=True)
        assert any(not size.is_number for size in shape(found.hidden(found.graph)))
        for layer in (0, None):
            assert_rows(rows_of_hidden(found, EACH, layer=layer))

    @pytest.mark.parametrize("count", [0, 1, TOKENS])
    def test_none_one_and_all(self, family, count):
        every = torch.stack([torch.randperm(TOKENS) for _ in range(BATCH)])
        assert_rows(rows_of_hidden(marked(family), every[:, :count]))


def test_only_rows_are_computed_below_the_frontier():
    """No matrix product and no attention below the check layer sees T tokens."""
    made = rows_of_hidden(marked("Llama"), EACH)
    attention = torch.ops.cascade.sdpa.default
    (last,) = made.graph.find_nodes(op="call_function", target=attention, sort=True)[1:]
    calls = list(made.graph.nodes)
    rows = {2 * 4, 4}
    for node in calls[calls.index(last) :]:
        if node.target is torch.ops.aten.mm.default:
            assert int(shape(node)[0]) in rows
    assert [int(s) for s in shape(last)] == [BATCH, 6, 4, 8]
    assert all(
        int(shape(node)[2]) == 4
        for node in made.graph.find_nodes(op="call_function", target=attention)
    )


def test_positions_are_the_index_itself():
    """From the ids on, nothing is gathered but them: angles come from the index."""
    made = rows_of_hidden(marked("Llama"), EACH, layer=None)
    gathered = [step.demand[0] for step in made.plan.steps if step.gathered]
    assert [node.op for node in gathered] == ["placeholder"]
    assert not made.graph.find_nodes(op="call_function", target=torch.ops.aten.index_select.default)

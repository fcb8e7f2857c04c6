"""What cannot be computed for some tokens only is declined by name; and rows of rows."""

import pytest
import torch
from support.capture import joint_graph
from support.reuse_models import TOKENS, computed, marked
from support.row_checks import EACH, assert_rows, cached_but, copied, index_input, taken
from torch import fx

from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes, shape, size_expr
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.token_apply import Narrowed, apply_rows
from torch_cascade.passes.token_axis import plan_rows
from torch_cascade.passes.token_frontier import Frontier, reuse_kv
from torch_cascade.passes.token_rows import Axis, Rows

aten = torch.ops.aten
N, T, H, D = 2, 7, 3, 4


def attention(then):
    """A marked layer whose output goes through `then`."""

    def fn(q, k, v, k_cached, v_cached, fresh):
        k, v = torch.ops.cascade.reuse_kv(k, v, k_cached, v_cached, fresh)
        return then(torch.ops.cascade.sdpa(q, k, v))

    values = [torch.randn(N, H, T, D) for _ in range(5)]
    return joint_graph(fn, *values, torch.tensor([[6], [6]]), prepare=capture).graph


def planned(graph, node, asked, **options):
    (marker,) = graph.find_nodes(op="call_function", target=reuse_kv)
    batch = asked.batch.length if asked.batch else None
    return plan_rows(
        graph,
        Frontier.of(graph, marker),
        tokens=size_expr(T),
        batch=batch,
        rows=[(node, asked)],
        sizes=Sizes.of(graph),
        **options,
    )


def result_of(graph):
    (output,) = graph.find_nodes(op="output")
    return output.args[0][0]


EACH_ROW = Rows(Axis(2, size_expr(T)), Axis(0, size_expr(N)))

DECLINED = {
    "mean": (lambda o: o - o.mean(2, keepdim=True), Reason.TOKENS_MIXED, "mean"),
    "softmax": (lambda o: o.softmax(2), Reason.TOKENS_MIXED, ""),
    "cumsum": (lambda o: o.cumsum(2), Reason.TOKENS_MIXED, "cumsum"),
    "shift": (lambda o: torch.cat([o[:, :, 1:], o[:, :, :1]], 2), Reason.TOKENS_MIXED, "cat"),
    "flip": (lambda o: o.flip(2), Reason.TOKENS_MIXED, ""),
    "flat": (lambda o: o.transpose(1, 2).reshape(N, H, T, D), Reason.TOKENS_MIXED, ""),
    "lookup": (lambda o: o[:, :, torch.arange(T) // 2], Reason.TOKENS_MIXED, ""),
    "scatter": (
        lambda o: o.scatter(2, torch.zeros(N, H, T, D, dtype=torch.int64), 1.0),
        Reason.TOKENS_MIXED,
        "aten.scatter",
    ),
    "batch": (lambda o: o.flip(0), Reason.TOKENS_MIXED, ""),
}


@pytest.mark.parametrize("name", DECLINED)
def test_mixing_tokens_below_the_frontier_is_declined(name):
    then, reason, op = DECLINED[name]
    graph = attention(then)
    before = str(graph)
    declined = planned(graph, result_of(graph), EACH_ROW)
    assert isinstance(declined, Declined) and declined.reason is reason
    assert op in declined.detail and declined.node in {node.name for node in graph.nodes}
    assert str(graph) == before


def test_the_same_above_the_frontier_is_gathered():
    """A value that is computed anyway may mix tokens as it likes."""

    def fn(q, k, v, k_cached, v_cached, fresh):
        k = k.cumsum(2)
        k, v = torch.ops.cascade.reuse_kv(k, v, k_cached, v_cached, fresh)
        return torch.ops.cascade.sdpa(q.flip(2) + k, k, v)

    values = [torch.randn(N, H, T, D) for _ in range(5)]
    graph = joint_graph(fn, *values, torch.tensor([[6], [6]]), prepare=capture).graph
    plan = planned(graph, result_of(graph), EACH_ROW)
    gathered = {step.demand[0].target for step in plan.steps if step.gathered}
    assert aten.cumsum.default in gathered and len(gathered) == 2


def test_all_tokens_below_the_frontier_are_declined():
    graph = attention(lambda o: o * 2)
    declined = planned(graph, result_of(graph), EACH_ROW, whole=[result_of(graph)])
    assert declined.reason is Reason.TOKENS_MIXED and "all tokens" in declined.detail


def test_an_axis_of_another_size_is_an_error():
    graph = attention(lambda o: o * 2)
    with pytest.raises(ValueError, match=r"expected dim 3 of size 7, got \(2, 3, 7, 4\)"):
        planned(graph, result_of(graph), Rows(Axis(3, size_expr(T))))


@pytest.mark.parametrize(
    "index, message",
    [
        (torch.zeros(3, 2, dtype=torch.int64), r"expected int64 \[2, K\], got .*\[3, 2\]"),
        (torch.zeros(2, dtype=torch.int64), r"expected int64 \[2, K\], got .*\[2\]"),
        (torch.zeros(2, 2, dtype=torch.int32), r"expected int64 \[2, K\], got torch.int32"),
    ],
)
def test_an_index_of_another_form_is_an_error(index, message):
    graph = attention(lambda o: o * 2)
    plan = planned(graph, result_of(graph), EACH_ROW)
    node = index_input(graph, index, size_expr(index.shape[0]))
    node.meta["val"] = node.meta["val"].to(index.dtype)
    with pytest.raises(ValueError, match=message):
        apply_rows(plan, node)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Mixtral"])
def test_rows_of_rows(family, each):
    """Gradual filtering: below a second check layer some of the rows of the first."""
    found = marked(family, layers=3)
    graph, _ = copied(found.graph)
    hidden = found.hidden(graph)
    markers = graph.find_nodes(op="call_function", target=reuse_kv)
    batch, tokens = shape(hidden)[:2]
    asked = Rows(Axis(1, tokens), Axis(0, batch) if each else None)
    options = {
        "tokens": tokens,
        "batch": batch if each else None,
        "sizes": Sizes.of(graph),
    }
    frontier = Frontier.of(graph, markers[0])
    first = plan_rows(graph, frontier, whole=list(markers[1].users), **options)
    second = plan_rows(
        graph, frontier, rows=[(hidden, asked)], earlier={s.demand for s in first.steps}, **options
    )
    assert set(first.barriers) == {markers[1]}
    index = EACH if each else EACH[0]
    rows = index_input(graph, index, batch)
    local = torch.tensor([[3, 1], [0, 2]]) if each else torch.tensor([3, 1])
    kept = index.gather(int(each), local)
    values = dict(found.inputs)
    values |= cached_but(markers[1], found.values[markers[1].name], index)
    values |= cached_but(markers[2], found.values[markers[2].name], kept)
    made = apply_rows(first, rows)
    places = index_input(graph, local, batch)
    k_rows = made.rows[first.barriers[markers[1]][0]]
    with graph.inserting_after(k_rows):
        narrow = graph.call_function(aten.gather.default, (rows, int(each), places))
    narrow.meta["val"] = places.meta["val"]
    out = apply_rows(second, narrow, narrowed=Narrowed(made, places)).of(hidden, asked)
    graph.find_nodes(op="output")[0].args = (out,)
    graph.eliminate_dead_code()
    graph.lint()
    with torch.no_grad():
        result = fx.GraphModule(found.module, graph)(*values.values(), index, local)
    assert any(step.narrowed for step in second.steps)
    wanted = taken(found.values[hidden.name], kept)
    assert_rows(result, wanted)


def shorter(found, tokens, fresh):
    """The same captured prefill, computed for fewer tokens."""
    inputs, sizes = {}, {}
    marker = found.graph.find_nodes(op="call_function", target=reuse_kv)[0]
    for node in found.graph.find_nodes(op="placeholder"):
        given = found.inputs[node.name]
        if not isinstance(given, torch.Tensor):
            continue
        if node is marker.args[4]:
            given = fresh
        for dim in (d for d, size in enumerate(given.shape) if size == TOKENS):
            given = given.narrow(dim, 0, tokens)
        inputs[node.name] = given
        sizes |= dict(zip(shape(node), given.shape, strict=True))
    for node in found.graph.find_nodes(op="placeholder"):
        if node.name not in inputs:
            inputs[node.name] = int(size_expr(node).subs(sizes))
    names = [node.name for node in found.graph.find_nodes(op="placeholder")]
    return computed(found.module, [inputs[name] for name in names])


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_one_graph_for_other_lengths(family):
    """T and K are symbols: the rows are those of a graph input, and the graph is made once."""
    found = marked(family, dynamic=True)
    graph, _ = copied(found.graph)
    hidden = found.hidden(graph)
    markers = graph.find_nodes(op="call_function", target=reuse_kv)
    fresh = markers[0].args[4]
    batch, tokens = shape(hidden)[:2]
    assert not tokens.is_number and not shape(fresh)[1].is_number
    asked = Rows(Axis(1, tokens), Axis(0, batch))
    plan = plan_rows(
        graph,
        Frontier.of(graph, markers[0]),
        tokens=tokens,
        batch=batch,
        rows=[(hidden, asked)],
        sizes=Sizes.of(graph),
    )
    cached, name = markers[1], markers[1].name
    later = [node.name for node in cached.args[2:4]]
    made = apply_rows(plan, fresh).of(hidden, asked)
    graph.find_nodes(op="output")[0].args = (made,)
    module = fx.GraphModule(found.module, graph)
    for length, rows in ((TOKENS, EACH), (8, torch.tensor([[7, 2], [5, 0]]))):
        run = shorter(found, length, rows)
        values = run.inputs | dict(zip(later, run.values[name], strict=True))
        with torch.no_grad():
            result = module(*values.values())
        assert_rows(result, taken(run.values[hidden.name], rows))

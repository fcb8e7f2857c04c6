"""Rows of captured models: planned over whole graphs, and equal to rows of the full result."""

import pytest
import torch
from support.reuse_models import BATCH, REUSING, TOKENS, marked
from support.row_checks import EACH, SHARED, assert_rows, rows_of_hidden
from support.token_cases import TESTED

from torch_cascade.compiler.graph import shape
from torch_cascade.passes.token_frontier import reuse_kv
from torch_cascade.passes.token_registry import rule_of
from torch_cascade.passes.token_rules import DECLINED_OPS, op_name

NEITHER = {torch.ops.aten.sym_size.int}  # sizes, not values


def assert_hidden(found, index, **options):
    made = rows_of_hidden(found, index, **options)
    assert_rows(made.result, made.wanted)


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
        assert_rows(made.result, made.wanted)
        assert len(made.plan.barriers) == (1 if layer == 0 else 2)

    def test_with_padding(self, family):
        assert_hidden(marked(family, padded=True), EACH)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "GPT2"])
class TestIndices:
    @pytest.mark.parametrize("dynamic", [None, True])
    @pytest.mark.parametrize("padded", [False, True])
    def test_shared_by_the_batch(self, family, padded, dynamic):
        found = marked(family, padded=padded, dynamic=dynamic)
        for layer in (0, None):
            assert_hidden(found, SHARED, layer=layer)

    @pytest.mark.parametrize("padded", [False, True])
    def test_symbolic_sizes(self, family, padded):
        found = marked(family, padded=padded, dynamic=True)
        assert any(not size.is_number for size in shape(found.hidden(found.graph)))
        for layer in (0, None):
            assert_hidden(found, EACH, layer=layer)

    @pytest.mark.parametrize("count", [0, 1, TOKENS])
    def test_none_one_and_all(self, family, count):
        every = torch.stack([torch.randperm(TOKENS) for _ in range(BATCH)])
        assert_hidden(marked(family), every[:, :count])


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
    assert not made.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "Gemma2"])
def test_attention_written_by_hand(family):
    """Matrix products and a softmax, in which batch and heads share a dim.

    No padding: the float64 fill of its mask is -inf in their float32 softmax, and all is NaN.
    """
    found = marked(family, attention="eager")
    attention = torch.ops.cascade.sdpa.default
    assert not found.graph.find_nodes(op="call_function", target=attention)
    for layer in (0, None):
        assert_hidden(found, EACH, layer=layer)

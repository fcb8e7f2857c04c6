"""Linear layers of a decoding step joined into one launch: which, which not, and that they are right."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.fake_cuda import moved_to_cuda
from support.lowering import rewritten
from torch import fx, nn

from torch_cascade.kernels.launch_config import DeviceLimits
from torch_cascade.passes import linears as module
from torch_cascade.passes.linears import LinearsPass
from torch_cascade.passes.verify import check_graph

T, H, P, D, WIDTH = 5, 3, 40, 32, 192  # branches, heads, prefix, head size, features
aten, cascade = torch.ops.aten, torch.ops.cascade


class Step(nn.Module):
    """A decoding step of one layer: queries, keys, values, attention, output, gate, up, down."""

    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        inner = 320
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, H * D, bias) for _ in range(4))
        self.o = nn.Linear(H * D, WIDTH, bias)
        self.gate, self.up = nn.Linear(WIDTH, inner, bias), nn.Linear(WIDTH, inner, bias)
        self.down = nn.Linear(inner, WIDTH, bias)
        self.to(dtype)

    def forward(self, x, pk, pv):
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q, joined(pk, k), joined(pv, v))
        x = x + self.o(o.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def joined(prefix, suffix):
    return torch.cat([prefix.repeat_interleave(suffix.shape[0] // prefix.shape[0], 0), suffix], 2)


def inputs(dtype=torch.bfloat16, tokens=1):
    prefix = torch.randn(1, H, P, D).to(dtype)
    return torch.randn(T, tokens, WIDTH).to(dtype), prefix, prefix.cos()


def after_pass(fn, *args, device="cuda", limits=None, keep_sites=True, dynamic=False):
    """(graph, context) after `LinearsPass`, of a graph as it is on a GPU."""
    with torch.no_grad():
        gm, context = rewritten(fn, *args, dynamic=dynamic)
    if not keep_sites:
        context.record.sites.clear()
    gm = moved_to_cuda(gm) if device == "cuda" else gm
    limits = limits or DeviceLimits(132, 232448)
    with mock.patch.object(module, "_limits", lambda _device: limits):
        LinearsPass().apply(gm.graph, context)
    check_graph(gm.graph, after="linears")
    return gm.graph, context


def launches(graph: fx.Graph) -> list[int]:
    """Products in each launch."""
    found = graph.find_nodes(op="call_function", target=cascade.linears.default)
    return [len(node.args[1]) for node in found]


def test_layers_that_read_the_same_rows_are_joined():
    graph, context = after_pass(Step(), *inputs())
    assert launches(graph) == [3, 1, 2, 1]  # q k v; o; gate up; down
    assert not graph.find_nodes(op="call_function", target=aten.mm.default)
    assert vars(context.record.linears) == {"joined": 7, "launches": 4, "kept": 0}


def test_biases_go_with_their_weights():
    graph, _ = after_pass(Step(bias=True), *inputs())
    assert launches(graph) == [3, 1, 2, 1]
    (first, *_) = graph.find_nodes(op="call_function", target=cascade.linears.default)
    x, weights, biases = first.args
    assert [tuple(b.meta["val"].shape) for b in biases] == [(H * D,)] * 3
    assert not graph.find_nodes(op="call_function", target=aten.addmm.default)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "cpu"}, "no GPU"),
        ({"limits": DeviceLimits(108, 166912, 8)}, "not measured there"),
        ({"keep_sites": False}, "no attention was rewritten"),
        ({"dynamic": True}, "rows are a symbol"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_nothing_is_joined(change, why):
    graph, context = after_pass(Step(), *inputs(), **change)
    assert (launches(graph), context.record.linears) == ([], None), why


def test_other_dtypes_and_many_rows_stay():
    assert launches(after_pass(Step(dtype=torch.float32), *inputs(torch.float32))[0]) == []
    assert launches(after_pass(Step(), *inputs(tokens=12))[0]) == [3, 1, 2, 1]  # 60 rows
    assert launches(after_pass(Step(), *inputs(tokens=13))[0]) == []  # 65


def test_a_search_of_inductors_own_is_left_alone():
    with torch._inductor.config.patch(max_autotune_gemm=True):
        assert launches(after_pass(Step(), *inputs())[0]) == []


def test_sizes_that_no_tile_divides_stay():
    """96 features are no multiple of 64: the output layer is kept, the others are joined."""
    step = Step()
    step.o = nn.Linear(H * D, WIDTH, False).bfloat16()
    graph, context = after_pass(step, *inputs())
    kept = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [tuple(n.meta["val"].shape) for n in kept] == [(T, WIDTH)]
    assert context.record.linears.kept == 1


class Many(Step):
    """Four products of the same rows, one of other rows of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, 64, False).bfloat16()
        self.other = nn.Linear(WIDTH, 64, False).bfloat16()

    def forward(self, x, pk, pv):
        y = super().forward(x, pk, pv)
        return y, self.more(x), self.other(x.flip(0))


def test_groups_are_of_three_and_of_the_same_rows():
    graph, _ = after_pass(Many(), *inputs())
    found = graph.find_nodes(op="call_function", target=cascade.linears.default)
    assert [len(node.args[1]) for node in found][0] == 3
    for node in found:
        for weight in node.args[1]:
            assert weight.meta["val"].shape[1] == node.args[0].meta["val"].shape[1]
    rows = {node.args[0] for node in found if len(node.args[1]) == 1}
    assert any("flip" in str(source.target) for x in rows for source in x.all_input_nodes)


def test_a_wide_layer_alone_stays():
    """cuBLAS computes it in one launch, so nothing would be saved."""
    step = Step()
    step.down = nn.Linear(320, 64 * 132, False).bfloat16()
    step.forward = lambda x, pk, pv: (
        Step.forward(step, x, pk, pv) if False else wide(step, x, pk, pv)
    )
    graph, _ = after_pass(step, *inputs())
    assert launches(graph)[-1] == 2
    assert len(graph.find_nodes(op="call_function", target=aten.mm.default)) == 1


def wide(step, x, pk, pv):
    q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (step.q, step.k, step.v))
    o = F.scaled_dot_product_attention(q, joined(pk, k), joined(pv, v))
    return o, step.down(F.silu(step.gate(x)) * step.up(x))

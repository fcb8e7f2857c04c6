"""Linear layers of a decoding step joined into one launch: which, which not, and their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.capture import joint_graph
from support.fake_cuda import moved_to_cuda
from support.lowering import lowered_for_cuda, rewritten
from torch import Tensor, fx, nn

from torch_cascade import last_report
from torch_cascade.compiler.graph import Sizes, show
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.compiler.record import Compilation, LinearsRecord
from torch_cascade.compiler.report import Reason
from torch_cascade.kernels.launch_config import DeviceLimits
from torch_cascade.kernels.ops import linears
from torch_cascade.passes import linears as module
from torch_cascade.passes.linear_site import LinearSite, linear_of
from torch_cascade.passes.linears import LinearsPass
from torch_cascade.passes.verify import check_graph

# Branches, heads, prefix tokens, head size, features, inner features: pairwise distinct.
T, H, P, D, WIDTH, INNER = 5, 2, 40, 64, 192, 320
H200 = DeviceLimits(processors=132, shared_memory=232448, generation=9)
aten, cascade = torch.ops.aten, torch.ops.cascade
WRAPPER = torch.ops.higher_order.triton_kernel_wrapper_functional


def linear(features: int, columns: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(features, columns, bias).bfloat16()


class Step(nn.Module):
    """A decoding step of one layer: queries, keys and values, output, gate and up, down."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (linear(WIDTH, H * D, bias) for _ in range(3))
        self.o = linear(H * D, WIDTH, bias)
        self.gate, self.up = linear(WIDTH, INNER, bias), linear(WIDTH, INNER, bias)
        self.down = linear(INNER, WIDTH, bias)

    def forward(self, x: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        x = x + self.o(self.attention(x, pk, pv))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))

    def attention(self, x: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q, joined(pk, k), joined(pv, v))
        return o.transpose(1, 2).flatten(2)


def joined(prefix: Tensor, suffix: Tensor) -> Tensor:
    return torch.cat([prefix.repeat_interleave(suffix.shape[0], 0), suffix], 2)


def inputs(tokens: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    prefix = torch.randn(1, H, P, D).to(dtype)
    return torch.randn(T, tokens, WIDTH).to(dtype), prefix, prefix.cos()


def found(fn: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> Any:
    """(graph module, context) as it is on a GPU, attention rewritten."""
    with torch.no_grad():
        gm, context = rewritten(fn, *args, dynamic=dynamic)
    return moved_to_cuda(gm), context


def applied(gm: fx.GraphModule, context: PassContext, limits: DeviceLimits = H200) -> list[int]:
    """Run the pass; the number of products in each launch."""
    with mock.patch.object(module, "_limits", lambda _device: limits):
        LinearsPass().apply(gm.graph, context)
    check_graph(gm.graph, after="linears")
    return [len(node.args[1]) for node in calls(gm.graph, cascade.linears.default)]


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def test_layers_that_read_the_same_rows_are_one_launch():
    gm, context = found(Step(), *inputs())
    assert applied(gm, context) == [3, 1, 2, 1]  # q, k, v; o; gate, up; down
    assert not calls(gm.graph, aten.mm.default)
    assert context.record.linears == LinearsRecord(joined=7, launches=4, kept=0)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_what_is_computed_stays(bias):
    """Each product goes to the users of its own layer, with its own bias."""
    step, given = Step(bias), inputs()
    with mock.patch.object(module, "_limits", lambda _device: H200), as_measured():
        actual = compiled(step, given, "cascade,linears")
    assert last_compilation().linears == LinearsRecord(joined=7, launches=4, kept=0)
    assert "linear layers: 7 in 4 launches, 0 left to Inductor" in str(last_report())
    assert torch.equal(actual, compiled(step, given, "cascade"))
    assert last_compilation().linears is None


def as_measured() -> Any:
    """All sites are of a kind that the kernel takes, on a CPU, too."""
    return mock.patch.object(module, "_is_measured", lambda _site: True)


def compiled(step: Step, given: tuple[Tensor, ...], passes: str) -> Tensor:
    torch._dynamo.reset()
    backend = eager_cascade(decide="always", strict=True, passes=passes)
    with torch.no_grad():
        result: Tensor = torch.compile(step, backend=backend)(*given)
    return result


@pytest.mark.parametrize(
    "change",
    [
        "a CPU",
        "another generation",
        "attention as it was",
        "batch invariant",
        "rows that are a symbol",
        "float32",
    ],
)
def test_where_nothing_is_joined(change):
    step, dtype = Step(), torch.bfloat16
    if change == "float32":
        step, dtype = step.float(), torch.float32
    gm, context = found(step, *inputs(dtype=dtype), dynamic=change == "rows that are a symbol")
    if change == "a CPU":
        with torch.no_grad():
            gm, context = rewritten(step, *inputs())
    if change == "attention as it was":
        context.record.sites.clear()
    if change == "batch invariant":
        context = replace(context, options=replace(context.options, batch_invariant=True))
    before = show(gm.graph)
    limits = H200._replace(generation=8) if change == "another generation" else H200
    assert applied(gm, context, limits) == []
    assert context.record.linears is None and show(gm.graph) == before


def test_many_rows_stay():
    assert applied(*found(Step(), *inputs(tokens=12))) == [3, 1, 2, 1]  # 60 rows
    assert applied(*found(Step(), *inputs(tokens=13))) == []  # 65


class Flat(Step):
    """The rows have two dims: then torch hands every bias to the product, however it lies."""

    def forward(self, x: Tensor, pk: Tensor, pv: Tensor) -> Any:
        rows = x[:, 0]
        return self.attention(x, pk, pv), self.gate(rows), self.up(rows)


def numbers(count: int) -> Tensor:
    return torch.randn(count).bfloat16()


BIASES: dict[str, tuple[Callable[[], Tensor], list[int]]] = {
    # in which launches gate, up, and q, k and v are
    "dense": (lambda: numbers(INNER), [3, 2]),
    "every other number": (lambda: numbers(2 * INNER)[::2], [3, 1]),
    "one number for all": (lambda: numbers(1).expand(INNER), [3, 1]),
    "one number": (lambda: numbers(1), [3, 1]),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_that_do_not_lie_side_by_side_stay(name):
    """The kernel reads them as if they did."""
    make, expected = BIASES[name]
    step = Flat(bias=True)
    step.gate.bias = nn.Parameter(make())
    assert applied(*found(step, *inputs())) == expected


class Cut(Step):
    """Rows cut out of a wider tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = linear(64, INNER), linear(64, INNER)

    def forward(self, x: Tensor, pk: Tensor, pv: Tensor, wide: Tensor) -> Any:
        rows = wide[:, :64]
        return self.attention(x, pk, pv), self.gate(rows), self.up(rows)


@pytest.mark.parametrize("symbolic", [False, True])
def test_rows_whose_stride_is_a_symbol_stay(symbolic):
    wide = torch.randn(7, 100).bfloat16()
    if symbolic:
        torch._dynamo.mark_dynamic(wide, 1)
    with torch.no_grad():
        gm, context = rewritten(Cut(), *inputs(), wide, dynamic=None)
    assert applied(moved_to_cuda(gm), context) == ([3] if symbolic else [3, 2])


def test_layers_of_no_columns_or_features_stay():
    class Empty(Step):
        def forward(self, x: Tensor, pk: Tensor, pv: Tensor, *w: Tensor) -> Any:
            x, o = x[:, 0], self.attention(x, pk, pv)
            return o, F.linear(x, w[0]), F.linear(x[:, :0], w[1]), F.linear(x[:0], w[2])

    weights = [torch.randn(n, k).bfloat16() for n, k in ((0, WIDTH), (64, 0), (64, WIDTH))]
    assert applied(*found(Empty(), *inputs(), *weights)) == [3]


class Reshaped(Step):
    """Rows of two lengths, cut out of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = linear(64, INNER), linear(WIDTH, INNER)

    def forward(self, x: Tensor, pk: Tensor, pv: Tensor) -> Any:
        rows = x.sin()
        return self.attention(x, pk, pv), self.gate(rows.view(-1, 64)), self.up(rows)


def test_views_of_other_sizes_are_other_rows():
    gm, context = found(Reshaped(), *inputs())
    assert applied(gm, context) == [3, 1, 1]


def test_layers_of_one_weight():
    step = Step()
    step.up.weight = step.gate.weight
    gm, context = found(step, *inputs())
    assert applied(gm, context) == [3, 1, 2, 1]
    (pair,) = (n for n in calls(gm.graph, cascade.linears.default) if len(n.args[1]) == 2)
    assert len(set(pair.args[1])) == 1


class Changing(Step):
    """Rows and a weight change between the products that read them."""

    def forward(self, x: Tensor, pk: Tensor, pv: Tensor) -> Any:
        x = x.clone()
        q, first = self.q(x), self.gate(x)
        x.add_(1)
        self.up.weight.mul_(2)
        k, v = self.k(x), self.v(x)
        return joined(pk, pv).sum() + self.attention(x, pk, pv), q, first, k, v, self.up(x)


def test_what_changes_in_between():
    """Each product reads what was there when it stood there."""
    with torch.no_grad():
        gm, context = rewritten(Changing(), *inputs())
    gm, context = moved_to_cuda(gm), context
    assert applied(gm, context) == [2, 3, 2]  # q, gate; the five of k, v and `attention`


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("step", ["takes", "_join"])
def test_a_bug_of_the_pass_costs_its_launches_only(step, strict, caplog):
    gm, context = found(Step(), *inputs())
    context = replace(context, options=replace(context.options, strict=strict))
    before = show(gm.graph)
    with mock.patch.object(module, step, side_effect=LookupError("a bug")):
        if strict:
            with pytest.raises(LookupError):
                applied(gm, context)
        else:
            assert applied(gm, context) == []
    assert show(gm.graph) == before and context.record.linears is None
    assert strict or ("linears failed" in caplog.text and "left to Inductor" in caplog.text)


def test_a_search_of_inductors_own_is_left_alone():
    for name in ("max_autotune", "max_autotune_gemm"):
        with torch._inductor.config.patch({name: True}):
            assert applied(*found(Step(), *inputs())) == []


def test_sizes_that_no_tile_divides_stay():
    step = Step()
    step.gate, step.up = linear(WIDTH, 328), linear(WIDTH, 328)  # columns: 16 does not divide them
    step.down = linear(328, WIDTH)  # nor 64 these features
    gm, context = found(step, *inputs())
    assert applied(gm, context) == [3, 1]
    assert context.record.linears == LinearsRecord(joined=4, launches=2, kept=3)


class Four(Step):
    """A fourth layer of the same rows, and one of other rows of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.other = linear(WIDTH, 64), linear(WIDTH, 448)

    def forward(self, x: Tensor, pk: Tensor, pv: Tensor) -> Any:
        return self.attention(x, pk, pv), self.more(x), self.other(x.flip(0))


def test_groups_are_of_three_and_of_the_same_rows():
    gm, context = found(Four(), *inputs())
    assert applied(gm, context) == [3, 1, 1]
    launches = calls(gm.graph, cascade.linears.default)
    widths = [[w.meta["val"].shape[0] for w in launch.args[1]] for launch in launches]
    assert sorted(widths) == [[64], [128, 128, 128], [448]]


class Wide(Step):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.head = linear(INNER, columns)

    def forward(self, x: Tensor, pk: Tensor, pv: Tensor) -> Any:
        return self.attention(x, pk, pv), self.head(self.gate(x))


@pytest.mark.parametrize(("columns", "expected"), [(64 * 132 - 16, [3, 1, 1]), (64 * 132, [3, 1])])
def test_a_layer_alone_is_taken_where_cublas_splits_it(columns, expected):
    """What reads x (q, k, v and gate) are four; the head reads gate's rows alone."""
    assert applied(*found(Wide(columns), *inputs())) == expected


class WidePair(Step):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(WIDTH, 64 * 132), linear(WIDTH, 64 * 132)

    def forward(self, x: Tensor, pk: Tensor, pv: Tensor) -> Any:
        rows = x.sin()
        return self.attention(x, pk, pv), self.first(rows), self.second(rows)


def test_two_layers_are_joined_however_wide_they_are():
    assert applied(*found(WidePair(), *inputs())) == [3, 2]


def test_layers_with_a_bias_and_without_are_launches_of_their_own():
    step = Step(bias=True)
    step.k.bias = step.gate.bias = None
    gm, context = found(step, *inputs())
    assert applied(gm, context) == [2, 1, 1, 1, 1, 1]  # q, v; k; o; gate; up; down
    given = [launch.args[2] for launch in calls(gm.graph, cascade.linears.default)]
    assert all(biases is None or None not in biases for biases in given)


LOOK_ALIKES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a product with a weight as it is": lambda x, w, b: x @ w,
    "axes in their own order": lambda x, w, b: x @ w.permute(0, 1),
    "an axis swapped with itself": lambda x, w, b: x @ w.transpose(1, 1),
    "a computed weight": lambda x, w, b: F.linear(x, w.sin()),
    "a scaled addend": lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5),
    "an addend of two dims": lambda x, w, b: torch.addmm(b.expand(7, 64), x, w.t()),
    "a sum": lambda x, w, b: x + b,
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(name):
    given = torch.randn(7, 64), torch.randn(64, 64), torch.randn(64)
    graph = joint_graph(LOOK_ALIKES[name], *given).graph
    verdicts = [linear_of(node) for node in graph.nodes]
    assert not any(verdicts)
    assert {v.reason for v in verdicts} == {Reason.NO_LINEAR}


@pytest.mark.parametrize("name", ["an addend of two dims", "an addend of all elements"])
def test_sizes_that_are_symbols_are_not_compared(name):
    """A guard would compile a program anew that had nothing to do with the pass."""
    addends = {"an addend of two dims": (1, 48), "an addend of all elements": (7, 48)}
    given = torch.randn(7, 64), torch.randn(48, 64), torch.randn(addends[name])
    graph = joint_graph(lambda x, w, b: torch.addmm(b, x, w.t()), *given, dynamic=True).graph
    shape_env = Sizes.of(graph).shape_env
    assert shape_env is not None
    before = len(shape_env.guards)
    assert not any(linear_of(node) for node in graph.nodes)
    assert len(shape_env.guards) == before


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spell", [lambda w: w.t(), lambda w: w.transpose(0, 1), lambda w: w.mT])
def test_spellings_of_a_linear_layer(spell, bias):
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x, spell(w)) if bias else x @ spell(w)

    graph = joint_graph(layer, torch.randn(7, 64), torch.randn(96, 64), torch.randn(96)).graph
    (site,) = [site for node in graph.nodes if isinstance(site := linear_of(node), LinearSite)]
    assert site.weight.meta["val"].shape == (96, 64) and site.weight.op == "placeholder"
    assert (site.bias is not None) == bias


def test_in_the_generated_code_it_is_our_kernel():
    gm, context = found(Step(bias=True), *inputs())
    applied(gm, context)
    graph = lowered_for_cuda(gm, context)
    kernels = [dict(n.kwargs["kwargs"]) for n in calls(graph, WRAPPER)]
    ours = [given for given in kernels if "w_0" in given]
    assert [sum(f"w_{i}" in given for i in range(3)) for given in ours] == [3, 1, 2, 1]
    assert all((given["rows"], given["BLOCK_M"]) == (T, 16) for given in ours)
    assert not calls(graph, aten.mm.default) and not calls(graph, aten.addmm.default)


CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {
    # rows and features, columns of each weight, dtype
    "four weights": ((5, 64), (32, 16, 48, 64), torch.bfloat16),
    "float32": ((5, 64), (32,), torch.float32),
    "many rows": ((65, 64), (32,), torch.bfloat16),
    "features that no tile divides": ((5, 33), (32,), torch.bfloat16),
    "columns that no tile divides": ((5, 64), (7,), torch.bfloat16),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_op_takes_what_the_kernel_does_not(name, dynamic):
    """A program may call it, with whatever its contract allows."""
    (rows, features), columns, dtype = CALLS[name]
    given = [torch.randn(n, features).to(dtype) for n in (rows, *columns)]
    gm = moved_to_cuda(joint_graph(lambda x, *w: linears(x, w), *given, dynamic=dynamic))
    context = PassContext(Sizes.of(gm.graph), Options(strict=True), Compilation())
    graph = lowered_for_cuda(gm, context)
    assert not calls(graph, WRAPPER) and len(calls(graph, aten.mm.default)) == len(columns)


def test_a_constant_of_the_graph_is_no_weight():
    """It may stand behind the first product of a group, where all of them are computed."""
    graph = joint_graph(lambda x, w: x @ w.t(), torch.randn(7, 64), torch.randn(96, 64)).graph
    (product,) = calls(graph, aten.mm.default)
    assert linear_of(product)
    given = product.args[1].args[0]
    graph.owning_module.weight = torch.randn(96, 64)
    with graph.inserting_before(product.args[1]):
        constant = graph.get_attr("weight")
    constant.meta = given.meta
    given.replace_all_uses_with(constant)
    assert linear_of(product).reason is Reason.NO_LINEAR

"""Attends, merge and output layout as one call: where, where not, and that it changes no value."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.capture import joint_graph
from support.hf_models import VOCABULARY, tiny_model
from support.lowering import FakePart, fused_on_the_cpu, lowered_for_cuda, rewritten
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torch_cascade.compiler.graph import value
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.kernels.ops import attend, merge
from torch_cascade.passes import trace
from torch_cascade.passes.fuse import SHARED, Fusion, Separate, fusions
from torch_cascade.passes.lower import target_of
from torch_cascade.runtime.prefix_cache import SharedPrefixCache

B, T, H, G, P, S, M, D = 2, 3, 5, 2, 11, 7, 4, 16
N = B * T
WRAPPER = torch.ops.higher_order.triton_kernel_wrapper_functional


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q (in memory [n, m, h, d]), prefix K and V, suffix K and V, a needle in each part."""
    q = torch.randn(N, M, H * G, D).transpose(1, 2)
    prefix_k, prefix_v = torch.randn(B, H, P, D), torch.randn(B, H, P, D)
    suffix_k, suffix_v = torch.randn(N, H, S, D), torch.randn(N, H, S, D)
    prefix_k[:, :, -1], prefix_v[:, :, -1] = q[::T, ::G, 0], 10.0
    suffix_k[:, :, S // 2], suffix_v[:, :, S // 2] = q[:, ::G, 1], -10.0
    return [x.to(dtype) for x in (q, prefix_k, prefix_v, suffix_k, suffix_v)]


def joined(prefix: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    times = suffix.shape[0] // prefix.shape[0]
    return torch.cat([prefix.repeat_interleave(times, 0), suffix], 2)


def attention(q, pk, pv, sk, sv, mask=None):
    k, v = joined(pk, sk), joined(pv, sv)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def layers(q, *kv):
    for _ in range(3):
        q = attention(q.sin(), *kv)
    return q


def masked(q, pk, pv, sk, sv):
    """A row may see nothing: NaN, and one mask of two terms."""
    keys = torch.arange(P + S, device=q.device)
    visible = (keys < pk[:, 0, :1, 0].sum().round()) & (keys[:, None] > -1)[: q.shape[2]]
    return attention(q, pk, pv, sk, sv, visible)


def parts(q, pk, pv, sk, sv, **changes):
    """The two partial results of an attention, with changes to the second call."""
    first = attend(q, pk, pv, branches=T, scale=0.3)
    second = attend(changes.pop("q", q), sk, sv, **({"scale": 0.3} | changes))
    return first, second


def merged(first, second, **options):
    return merge([first[0], second[0]], [first[1], second[1]], **options)


def found(fn) -> tuple[list[Fusion], list[Separate]]:
    return fusions(joint_graph(fn, *inputs()).graph, "cpu")


# --- where ----------------------------------------------------------------------------------------


def test_a_site_is_one_fusion_with_its_output():
    gm, _ = rewritten(attention, *inputs(torch.bfloat16))
    (fusion,), separate = fusions(gm.graph, "cpu")
    assert not separate and len(fusion.attends) == 2
    assert fusion.epilogue.dtype == torch.bfloat16
    assert fusion.epilogue.order == (0, 2, 1, 3)
    assert fusions(gm.graph, "cuda") == ([], [])


def test_an_attend_alone_takes_its_output_in():
    (fusion,), separate = found(lambda q, pk, pv, *_: attend(q, pk, pv, branches=T)[0].half())
    assert not separate and fusion.root == fusion.attends[0]
    assert fusion.epilogue.dtype == torch.float16


def test_sinks_and_a_log_sum_exp_that_is_returned():
    def fn(q, *kv):
        sinks = torch.linspace(-1, 1, H * G)[:, None]
        return merged(*parts(q, *kv), sinks=sinks)

    (fusion,), separate = found(fn)
    assert not separate and fusion.sinks is not None


def test_one_part_with_sinks():
    def fn(q, pk, pv, *_):
        o, lse = attend(q, pk, pv, branches=T)
        return merge([o], [lse], sinks=torch.zeros(()))

    (fusion,), separate = found(fn)
    assert not separate and len(fusion.attends) == 1 and fusion.root != fusion.attends[0]


OUTPUTS = {
    "nothing": (lambda o: o, torch.float32, (0, 1, 2, 3)),
    "a view": (lambda o: o.permute(2, 0, 1, 3), torch.float32, (0, 1, 2, 3)),
    "heads last": (lambda o: o.transpose(1, 2).contiguous(), torch.float32, (0, 2, 1, 3)),
    "converted": (lambda o: o.permute(2, 1, 0, 3).contiguous().half(), torch.float16, (2, 1, 0, 3)),
    "converted twice": (lambda o: o.bfloat16().float(), torch.bfloat16, (0, 1, 2, 3)),
    "to float64": (lambda o: o.double(), torch.float32, (0, 1, 2, 3)),
    "features first": (lambda o: o.transpose(1, 3).contiguous(), torch.float32, (0, 1, 2, 3)),
    "read twice": (lambda o: (o.half(), o + 1), torch.float32, (0, 1, 2, 3)),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs(case):
    change, dtype, order = OUTPUTS[case]
    fn = lambda *args: change(merged(*parts(*args))[0])  # noqa: E731
    (fusion,), _ = found(fn)
    assert (fusion.epilogue.dtype, fusion.epilogue.order) == (dtype, order)
    values = inputs()
    expected = run(fn, *values)
    with fused_on_the_cpu() as stand_in:
        actual = run(fn, *values)
    assert {(call["parts"], call["order"]) for call in stand_in.calls} == {(2, order)}
    flat = [torch.utils._pytree.tree_leaves(x) for x in (actual, expected)]
    for a, e in zip(*flat, strict=True):
        assert torch.equal(a, e) and a.dtype == e.dtype and a.stride() == e.stride()


# --- where not ------------------------------------------------------------------------------------


def lse_changed(*args):
    (o, lse), second = parts(*args)
    return merged((o, torch.where(lse < 0, lse, lse + 1)), second)


def crossed(*args):
    first, second = parts(*args)
    return merge([first[0], second[0]], [second[1], first[1]])


def output_read(*args):
    first, second = parts(*args)
    return merged(first, second), first[0]


def twice(q, pk, pv, *_):
    first = attend(q, pk, pv, branches=T)
    return merged(first, first)


SEPARATE = {
    "another scale": (lambda *a: merged(*parts(*a, scale=0.4)), "differ in scale"),
    "a soft-cap": (lambda *a: merged(*parts(*a, softcap=2.0)), "differ in scale"),
    "another query": (lambda q, *kv: merged(*parts(q, *kv, q=q.cos())), "queries of their own"),
    "a changed log-sum-exp": (lse_changed, "not the results of one attend"),
    "crossed results": (crossed, "not the results of one attend"),
    "an output read": (output_read, "reads getitem"),
    "an attend twice": (twice, "merged twice"),
}


@pytest.mark.parametrize("case", SEPARATE)
def test_separate(case, caplog):
    fn, why = SEPARATE[case]
    fused, (separate,) = found(fn)
    assert why in separate.why
    assert all(len(fusion.attends) == 1 for fusion in fused)  # an attend each
    values = inputs()
    expected = run(fn, *values)
    with fused_on_the_cpu() as stand_in, caplog.at_level("INFO", "torch_cascade.passes.lower"):
        actual = run(fn, *values)
    assert {call["parts"] for call in stand_in.calls} == {1}
    assert why in caplog.text and "computed one by one" in caplog.text
    flat = [torch.utils._pytree.tree_leaves(x) for x in (actual, expected)]
    assert all(torch.equal(a, e) for a, e in zip(*flat, strict=True))


def test_float64_is_separate():
    gm = joint_graph(lambda *args: merged(*parts(*args)), *inputs(torch.float64))
    fused, (separate,) = fusions(gm.graph, "cpu")
    assert not fused and separate.why == "float64"


# --- the values -----------------------------------------------------------------------------------


def run(fn, *args, dynamic=None, **options):
    torch._dynamo.reset()
    backend = eager_cascade(decide="always", verify=True, **options)
    with torch.no_grad():
        return torch.compile(fn, backend=backend, dynamic=dynamic)(*args)


@pytest.mark.parametrize(
    ("fn", "dynamic", "dtype"),
    [  # every pair of values; a symbolic graph takes long
        (attention, False, torch.float32),
        (attention, True, torch.bfloat16),
        (layers, False, torch.bfloat16),
        (layers, True, torch.float32),
        (masked, False, torch.float32),
        (masked, True, torch.bfloat16),
    ],
)
def test_the_same_bits_and_strides_as_op_by_op(fn, dynamic, dtype):
    values = inputs(dtype)
    expected = run(fn, *values, dynamic=dynamic)
    with fused_on_the_cpu() as stand_in:
        actual = run(fn, *values, dynamic=dynamic)
    assert stand_in.calls and all(call["parts"] == 2 for call in stand_in.calls)
    assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert actual.stride() == expected.stride()


def test_all_layers_share_a_trace():
    values = inputs()
    with fused_on_the_cpu() as stand_in:
        run(layers, *values, dynamic=False)
    # AOTAutograd calls a function twice for one trace.
    assert last_compilation().rewritten == 3 and len(stand_in.calls) == 2


def test_batch_invariance_is_asked_of_the_kernel():
    assert target_of("cuda", batch_invariant=True).fused.keywords == {"batch_invariant": True}
    assert target_of("cpu", batch_invariant=True).fused is None


def test_batch_invariance_on_a_cpu_is_a_warning(caplog):
    run(attention, *inputs())
    assert "batch_invariant" not in caplog.text
    run(attention, *inputs(), batch_invariant=True)
    assert "on cpu it changes nothing" in caplog.text


# --- for a GPU, without one -----------------------------------------------------------------------


def wrappers(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=WRAPPER))


def test_every_argument_of_attend_has_its_place():
    """In a part, or shared by the parts: none is dropped on the way to the kernel."""
    launch = pytest.importorskip("torch_cascade.kernels.triton_launch", exc_type=ImportError)
    arguments = {a.name for a in torch.ops.cascade.attend.default._schema.arguments}
    assert set(launch.KeyPart._fields) == arguments - {"q", *SHARED}
    assert set(SHARED) <= set(inspect.signature(launch.attend_merge).parameters)
    assert FakePart._fields == launch.KeyPart._fields


def test_the_readable_form_comes_first():
    gm, _ = rewritten(layers, *inputs())
    names = Counter(node.target for node in gm.graph.nodes)
    assert names[torch.ops.cascade.attend.default] == 6
    assert names[torch.ops.cascade.merge.default] == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_of_a_gpu(dynamic):
    gm, context = rewritten(layers, *inputs(torch.bfloat16), dynamic=dynamic)
    graph = lowered_for_cuda(gm, context)
    found = wrappers(graph)
    launches = len(found) // 3
    assert len(found) == 3 * launches and launches in (1, 2)
    # One trace for all: they call the same kernel objects. What the first trace assumed of symbolic
    # sizes is known to the others, which share another.
    traces = 2 if dynamic else 1
    assert len({node.kwargs["kernel_idx"] for node in found}) == launches * traces
    buffers = [node.kwargs["kwargs"][name] for node in found for name in written(node)]
    assert len(set(buffers)) == len(buffers)
    assert not [n for n in graph.nodes if "cascade" in str(n.target)]
    for node in found:
        # Inductor lays the arguments out as these say, which must be how they are.
        seen = node.meta["eager_input_vals"][1]["kwargs"]
        for name, arg in node.kwargs["kwargs"].items():
            if isinstance(arg, fx.Node) and isinstance(value(arg), torch.Tensor):
                assert laid(seen[name], context) == laid(value(arg), context), name


def test_symbols_are_not_asked_of_the_dict_that_a_kernel_gives(monkeypatch):
    """torch 2.11 looks for symbols in tensors and sequences only, and raises for a dict."""

    def of_no_dict(held):
        assert not isinstance(held, dict), held
        return free_unbacked_symbols(held)

    monkeypatch.setattr(trace, "free_unbacked_symbols", of_no_dict)
    assert wrappers(lowered_for_cuda(*rewritten(attention, *inputs(torch.bfloat16))))


def laid(held: torch.Tensor, context: PassContext) -> list[int | None]:
    """Sizes and strides in the call that was compiled; a symbol of another world has none."""
    return [context.sizes.hint(size) for size in (*held.shape, *held.stride())]


def written(node: fx.Node) -> list[str]:
    return node.kwargs["tensors_to_clone"]


@pytest.mark.parametrize("fn", [attention, masked])
@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_of_a_gpus_graph_is_on_the_cpu(fn, dynamic):
    """A tensor on the CPU would keep the graph from being captured as a CUDA graph."""
    gm, context = rewritten(fn, *inputs(torch.float16), dynamic=dynamic)
    graph = lowered_for_cuda(gm, context)
    values = [value(n) for n in graph.nodes if "val" in n.meta]
    devices = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    assert devices == {"cuda"} and wrappers(graph)


@pytest.mark.parametrize("max_suffix", [None, 9])
def test_a_model_with_a_shared_cache(max_suffix):
    model = tiny_model("Llama", torch.bfloat16)
    ids = torch.randint(3, VOCABULARY, (1, P))
    cache = SharedPrefixCache.prefill(model, ids, branches=T, max_suffix=max_suffix)
    step = torch.randint(3, VOCABULARY, (T, 1))
    with torch.no_grad():
        model(step, past_key_values=cache)
    gm, context = rewritten(model, step, past_key_values=cache)
    assert context.record.rewritten == 2
    graph = lowered_for_cuda(gm, context)
    kernels = [node.kwargs["kernel_idx"] for node in wrappers(graph)]
    assert len(kernels) in (2, 4) and len(set(kernels)) == len(kernels) // 2

"""`compiler/capture.py`: which attention calls become `cascade::sdpa`, and that nothing changes."""

import itertools
import math
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from support.raising import Raised, check_raised, identical
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from torch_cascade.compiler.capture import Captured, capture
from torch_cascade.compiler.report import Declined, Reason

sdpa = F.scaled_dot_product_attention
aten = torch.ops.aten

B, HQ, HKV, M, L, D, DV = 2, 6, 3, 5, 7, 16, 24


def qkv(heads=HKV, dtype=torch.float32, dv=D):
    """q with HQ heads and k, v with `heads`."""
    q = torch.randn(B, HQ, M, D)
    k = torch.randn(B, heads, L, D)
    v = torch.randn(B, heads, L, dv)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x):
    return torch.cat([x, x + 1], -1)[..., : x.shape[-1]]


def offset(x):
    return torch.cat([x[:, :, :1] + 1, x], 2)[:, :, 1:]


def stride0(x):
    return x[:1].expand_as(x)


LAYOUTS = (torch.clone, transposed, sliced, offset, stride0)
MASKS = {
    "none": lambda dtype: {},
    "causal": lambda dtype: {"is_causal": True},
    "bool": lambda dtype: {"attn_mask": torch.rand(M, L) > 0.4},
    "bool, a row masked": lambda dtype: {"attn_mask": torch.arange(M)[:, None] > torch.arange(L)},
    "additive": lambda dtype: {"attn_mask": torch.randn(B, 1, M, L).to(dtype)},
}


def names(raised):
    """The targets of the functional graph's calls."""
    return [str(n.target) for n in raised.functional.graph.nodes if n.op == "call_function"]


def captured_once(raised):
    """One attention, captured: the only node that changed, and only in target and arguments."""
    assert raised.reasons == [None]
    changed = [
        i for i, (b, a) in enumerate(zip(raised.before, raised.after, strict=True)) if b != a
    ]
    (index,) = changed
    node = list(raised.gm.graph.nodes)[index]
    assert node.target is torch.ops.cascade.sdpa.default
    assert node.name == raised.found[0].node == raised.before[index].split()[1]
    assert raised.meta_before == raised.meta_after
    assert names(raised).count("cascade.sdpa.default") == 1


# --- what is captured computes the same, bit for bit ------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_masks(layout, mask):
    arguments = MASKS[mask](torch.float32)
    attn_mask = arguments.pop("attn_mask", None)

    def fn(q, k, v, attn_mask):
        o = sdpa(q, k, v, attn_mask, scale=0.3, **arguments)
        return o, o * 2

    q, k, v = (layout(x) for x in qkv(HQ))
    captured_once(check_raised(fn, q, k, v, attn_mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mask", MASKS)
def test_dtypes_and_grouped_heads(dtype, mask):
    arguments = MASKS[mask](dtype)
    attn_mask = arguments.pop("attn_mask", None)

    def fn(q, k, v, attn_mask):
        return sdpa(q, k, v, attn_mask, enable_gqa=True, **arguments)

    captured_once(check_raised(fn, *qkv(HKV, dtype), attn_mask))


@pytest.mark.parametrize("lead", [(), (HQ,), (B, HQ), (4, B, HQ)], ids=lambda lead: len(lead) + 2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_ranks(lead, dynamic):
    q, k, v = torch.randn(*lead, M, D), torch.randn(*lead, L, D), torch.randn(*lead, L, DV)
    captured_once(check_raised(lambda q, k, v: sdpa(q, k, v), q, k, v, dynamic=dynamic))


def test_keys_that_broadcast_over_the_batch():
    q, k, v = qkv(HQ)
    captured_once(check_raised(lambda q, k, v: sdpa(q, k, v), q, k[:1], v[:1]))


SPELLINGS = {
    "positional": lambda q, k, v, m: sdpa(q, k, v, m, 0.0, False),
    "keywords": lambda q, k, v, m: sdpa(value=v, dropout_p=0.0, attn_mask=m, key=k, query=q),
    "mixed": lambda q, k, v, m: sdpa(q, value=v, key=k, scale=None, attn_mask=m),
    "builtin": lambda q, k, v, m: torch._C._nn.scaled_dot_product_attention(q, k, v, m),
    "overload": lambda q, k, v, m: aten.scaled_dot_product_attention.default(q, k, v, m),
    "packet": lambda q, k, v, m: aten.scaled_dot_product_attention(q, k, v, attn_mask=m),
    "int dropout": lambda q, k, v, m: sdpa(q, k, v, m, dropout_p=0),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling):
    captured_once(check_raised(SPELLINGS[spelling], *qkv(HQ), torch.rand(M, L) > 0.4))


SCALES = {
    "none": lambda q: None,
    "float": lambda q: 0.37,
    "int": lambda q: 1,
    "zero": lambda q: 0.0,
    "negative": lambda q: -0.5,
    "power": lambda q: q.shape[-1] ** -0.5,
    "sqrt": lambda q: 1 / math.sqrt(q.size(-1)),
    "symbolic int": lambda q: q.shape[-2],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_scales(scale, dynamic):
    spelt = SCALES[scale]
    raised = check_raised(lambda q, k, v: sdpa(q, k, v, scale=spelt(q)), *qkv(HQ), dynamic=dynamic)
    captured_once(raised)


def test_a_scale_given_as_an_argument():
    """Dynamo starts over once it has found out that the float must be a constant."""

    def fn(q, k, v, s):
        return sdpa(q, k, v, scale=s)

    raised = check_raised(fn, *qkv(HQ), 0.21, dynamic=True, graphs=2)
    assert raised.reasons == [None, None]
    assert names(raised) == ["cascade.sdpa.default"]


def test_symbolic_scales_recompile_as_often_as_without_capture():
    """torch guards the value of a symbolic scale where it meets the real call; so do we."""
    counts = []
    for on in (False, True):
        backend = Raised(on=on)
        fn = backend.compile(lambda q, k: sdpa(q, k, k, scale=q.shape[-1] ** -0.5), dynamic=True)
        for d in (16, 8, 32, 8):
            q, k = torch.randn(B, HQ, M, d), torch.randn(B, HQ, L, d)
            with torch.no_grad():
                identical(fn(q, k), sdpa(q, k, k, scale=d**-0.5))
        counts.append(backend.graphs)
    assert counts[0] == counts[1]


def test_dynamic_sizes_share_one_graph():
    backend = Raised()
    fn = backend.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True), dynamic=True)
    for m, length in ((5, 7), (9, 4), (3, 11)):
        q, kv = torch.randn(B, HQ, m, D), torch.randn(B, HQ, length, D)
        with torch.no_grad():
            identical(fn(q, kv, kv), sdpa(q, kv, kv, is_causal=True))
    assert backend.graphs == 1
    (found,) = backend.found
    assert re.fullmatch(r"float32\[s\d+, s\d+, s\d+, s\d+\]", found.query)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 7), (7, 3)], ids=str)
def test_causal_is_aligned_to_the_top_left(sizes):
    m, length = sizes
    q, kv = torch.randn(B, HQ, m, D), torch.randn(B, HQ, length, D)
    captured_once(check_raised(lambda q, kv: sdpa(q, kv, kv, is_causal=True), q, kv))


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_bias_objects_arrive_as_a_flag_or_a_mask(bias):
    """Dynamo writes the object out; its helper calls stay in the graph and die in AOTAutograd."""
    captured_once(check_raised(lambda q, k, v: sdpa(q, k, v, bias(M, L)), *qkv(HQ)))


def test_the_same_tensor_as_key_and_value():
    def fn(q, k, v):
        return sdpa(q, k, v)

    q, k, _ = qkv(HQ)
    captured_once(check_raised(fn, q, k, k))


def test_two_calls_of_one_function():
    def attend(q, k, v):
        return sdpa(q, k, v)

    raised = check_raised(lambda q, k, v: attend(attend(q, k, v), k, v), *qkv(HQ))
    assert raised.reasons == [None, None]
    assert len({found.node for found in raised.found}) == 2


# --- dtype, strides, mutation ---------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_that_needs_the_real_strides(dynamic):
    def fn(q, k, v):
        return sdpa(q, k, v).transpose(1, 2).view(q.shape[0], q.shape[2], -1) + 1

    q, k, v = (transposed(x) for x in qkv(HQ))
    captured_once(check_raised(fn, q, k, v, dynamic=dynamic))


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_itself_agrees_with_the_strides(dynamic):
    """Inductor's generated code asserts the strides that the fake kernel promised."""

    def fn(q, k, v):
        return sdpa(q, k, v).transpose(1, 2).view(q.shape[0], q.shape[2], -1)

    def backend(gm, inputs):
        found.extend(capture(gm, inputs))
        return compile_fx(gm, inputs)

    found = []
    args = [transposed(x) for x in qkv(HQ)]
    with torch.no_grad():
        got = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
        torch._dynamo.reset()
        identical(got, torch.compile(fn, backend="inductor", dynamic=dynamic)(*args))
        identical(got, fn(*args))
    assert isinstance(found[0], Captured)


def test_writes_between_definition_and_use():
    def fn(q, k, v, more):
        keys = torch.cat([k, more], 2)
        keys.mul_(2)
        keys[:, :, 0] = 0
        o = sdpa(q, keys, torch.cat([v, more], 2))
        keys += 1
        return o, keys

    captured_once(check_raised(fn, *qkv(HQ), torch.randn(B, HQ, 3, D)))


def test_writes_to_inputs_and_results():
    def fn(q, k, v):
        k.add_(1)
        o = sdpa(q, k, v)
        v.zero_()
        o.mul_(3)
        return o

    args = qkv(HQ)
    captured_once(check_raised(fn, *args))
    got, expected = ([x.clone() for x in args] for _ in range(2))
    with torch.no_grad():
        identical(Raised().compile(fn)(*got), fn(*expected))
    identical(got, expected)


def under_autocast(fn, dtype, device="cpu", enabled=True):
    def run(*args):
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return fn(*args)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_autocast_inside(dtype, cast, mask):
    attn_mask = MASKS[mask](dtype).get("attn_mask")
    fn = under_autocast(lambda q, k, v, m: sdpa(q, k, v, m), cast)
    raised = check_raised(fn, *qkv(HQ, dtype), attn_mask)
    assert raised.reasons == [None]


@pytest.mark.parametrize("dynamic", [False, True])
def test_autocast_around(dynamic):
    q, k, v = (transposed(x) for x in qkv(HQ))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        raised = check_raised(lambda q, k, v: sdpa(q, k, v), q, k, v, dynamic=dynamic)
    captured_once(raised)
    node = next(n for n in raised.gm.graph.nodes if n.target is torch.ops.cascade.sdpa.default)
    assert node.meta["example_value"].dtype == torch.bfloat16


def test_autocast_mends_operands_of_different_dtypes():
    q, k, v = qkv(HQ)
    fn = under_autocast(lambda q, k, v: sdpa(q, k, v), torch.bfloat16)
    assert check_raised(fn, q, k.bfloat16(), v).reasons == [None]


def test_autocast_of_another_device_or_switched_off_does_nothing():
    args = qkv(HQ)
    off = under_autocast(lambda q, k, v: sdpa(q, k, v), torch.bfloat16, enabled=False)
    raised = check_raised(under_autocast(off, torch.bfloat16), *args)
    assert raised.reasons == [None]
    assert check_raised(off, *args).reasons == [None]


def test_under_inference_mode():
    args = qkv(HQ)
    with torch.inference_mode():
        backend = Raised()
        identical(backend.compile(lambda q, k, v: sdpa(q, k, v))(*args), sdpa(*args))
    assert backend.reasons == [None]


# --- the graph stays Dynamo's ---------------------------------------------------------------------


class Block(torch.nn.Module):
    """Projections, a buffer, attention, a projection."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(D, 3 * HQ * D)
        self.out = torch.nn.Linear(HQ * D, D)
        self.register_buffer("bias", torch.randn(M, M))

    def forward(self, x):
        q, k, v = self.project(x).view(x.shape[0], M, 3, HQ, D).permute(2, 0, 3, 1, 4)
        o = sdpa(q, k, v, attn_mask=self.bias)
        return self.out(o.transpose(1, 2).flatten(2))


def test_parameters_are_captured_without_gradients_and_stay_static():
    block, x = Block(), torch.randn(B, M, D)
    captured_once(raised := check_raised(block, x))
    plain = Raised(on=False)
    with torch.no_grad():
        plain.compile(block)(x)
    assert len(plain.static_inputs) == 5  # two weights, two biases, the buffer
    assert list(raised.static_inputs) == list(plain.static_inputs)
    assert raised.gm._param_name_to_source
    placeholders = raised.gm.graph.find_nodes(op="placeholder")
    assert all(hasattr(node, "_dynamo_source") for node in placeholders)
    assert raised.gm.meta.keys() == plain.gm.meta.keys()


def test_the_graph_is_still_consistent():
    raised = check_raised(lambda q, k, v: sdpa(q, k, v) + 1, *qkv(HQ))
    raised.gm.graph.lint()
    target = torch.ops.cascade.sdpa.default
    (node,) = raised.gm.graph.find_nodes(op="call_function", target=target)
    assert not raised.gm.graph.find_nodes(op="call_function", target=sdpa)
    assert all(node in operand.users for operand in node.all_input_nodes)


def test_code_generated_before_is_generated_again():
    gm = graph_of(call_with())
    assert "cascade" not in gm.code
    capture(gm, [])
    assert "cascade.sdpa" in gm.code


def test_a_graph_without_attention_is_left_alone():
    def fn(x, y):
        return torch.softmax(x @ y, -1).mul_(2)

    raised = check_raised(fn, torch.randn(5, 7), torch.randn(7, 3))
    assert raised.found == []
    assert raised.before == raised.after
    assert raised.meta_before == raised.meta_after


def test_the_record_of_a_captured_call():
    def fn(q, k, v):
        return sdpa(q, k, v, is_causal=True)  # the user's line

    (found,) = check_raised(fn, *qkv(HQ)).found
    where, code = found.where.split(": ", 1)
    path, line = where.rsplit(":", 1)
    first = fn.__code__.co_firstlineno
    assert (path, int(line)) == (__file__, first + 1)
    assert code.startswith("return sdpa(q, k, v, is_causal=True)")
    assert found == Captured(
        found.node, found.where, "float32[2, 6, 5, 16]", "float32[2, 6, 7, 16]", found.key
    )


class Stopped(Exception):
    """Raised in place of running the compiled graph."""


def found_in(fn, *args, dynamic=None):
    """What `capture` finds in `fn`; nothing is compiled or run."""
    found = []

    def backend(gm, inputs):
        found.extend(capture(gm, inputs))
        return run

    def run(*args):
        raise Stopped

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Stopped):
        torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return found


# --- what is not captured -------------------------------------------------------------------------


def declined(raised, *reasons):
    """Every attention declined for these reasons, in order, and nothing changed."""
    assert raised.reasons == list(reasons)
    assert raised.before == raised.after
    assert raised.meta_before == raised.meta_after
    for found in raised.found:
        assert __file__ in found.where and found.detail
    return raised.found


def trained(fn, *args):
    """Captured, uncaptured and eager results and gradients of `fn`; all must be identical."""
    results = []
    for backend in (None, Raised(on=False), Raised()):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
        o = (fn if backend is None else backend.compile(fn))(*leaves)
        if o.requires_grad:
            o.sum().backward()
        results.append([o.detach(), *(x.grad for x in leaves if x.grad is not None)])
    identical(results[1], results[0])
    identical(results[2], results[0])
    return backend


def test_training_is_declined_once_for_each_call():
    q, k, v = qkv(HQ)
    raised = trained(lambda q, k, v: sdpa(sdpa(q, k, v), k, v), q.requires_grad_(), k, v)
    found = declined(raised, Reason.REQUIRES_GRAD, Reason.REQUIRES_GRAD)
    assert len({d.node for d in found}) == 2
    assert "no_grad" in found[0].hint


def test_a_trained_module_is_declined():
    block, x = Block(), torch.randn(B, M, D)
    backend = Raised()
    backend.compile(block)(x).sum().backward()
    declined(backend, Reason.REQUIRES_GRAD)


def test_a_no_grad_region_of_a_training_graph_is_declined():
    def fn(q, k, v):
        with torch.no_grad():
            fixed = sdpa(q, k, v)
        return fixed * q

    q, k, v = qkv(HQ)
    declined(trained(fn, q.requires_grad_(), k, v), Reason.REQUIRES_GRAD)


def test_an_enable_grad_region_is_declined():
    def fn(q, k, v):
        with torch.enable_grad():
            return sdpa(q, k, v)

    q, k, v = qkv(HQ)
    q.requires_grad_()
    backend = Raised()
    with torch.no_grad():
        o = backend.compile(fn)(q, k, v)
    o.sum().backward()
    declined(backend, Reason.REQUIRES_GRAD)
    assert q.grad is not None


def test_a_call_that_records_a_gradient_nobody_uses_is_declined():
    """AOTAutograd builds an inference graph here, but would run the op with autograd recording."""
    q, k, v = qkv(HQ)
    raised = trained(lambda q, k, v: sdpa(q, k, v).detach(), q.requires_grad_(), k, v)
    declined(raised, Reason.REQUIRES_GRAD)


def test_grad_mode_without_anything_to_differentiate_is_captured():
    assert trained(lambda q, k, v: sdpa(q, k, v), *qkv(HQ)).reasons == [None]


def test_returning_a_view_of_a_parameter_is_no_training():
    def fn(weight, k, v):
        return sdpa(weight.detach(), k, v), weight.transpose(0, 1)

    q, k, v = qkv(HQ)
    backend = Raised()
    got = backend.compile(fn)(q.requires_grad_(), k, v)
    identical(got, fn(q, k, v))
    assert backend.reasons == [None]
    assert "cascade.sdpa.default" in names(backend)


def test_training_because_of_a_write_keeps_a_call_that_needs_no_gradient():
    """AOTAutograd traces a backward for the write alone; the swapped call has no part in it."""

    def fn(q, k, v, state):
        state.mul_(2)
        return sdpa(q, k, v)

    q, k, v = qkv(HQ)
    leaf = torch.randn(3, requires_grad=True)
    state = leaf * 1
    backend = Raised()
    identical(backend.compile(fn)(q, k, v, state), sdpa(q, k, v))
    captured = "cascade.sdpa.default" in names(backend)
    state.sum().backward()
    assert captured and backend.reasons == [None]
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))


def test_dropout():
    found = []
    for p in (0.1, 1.0):
        backend = Raised()
        with torch.no_grad():
            backend.compile(lambda q, k, v, p=p: sdpa(q, k, v, dropout_p=p))(*qkv(HQ))
        found += declined(backend, Reason.DROPOUT)
    assert [d.detail for d in found] == ["dropout_p=0.1", "dropout_p=1.0"]


def test_dropout_of_a_symbolic_rate():
    (found,) = found_in(lambda q, k, v, p: sdpa(q, k, v, dropout_p=p), *qkv(HQ), 0.2, dynamic=True)
    assert (found.reason, found.detail) == (Reason.DROPOUT, "dropout_p=item")


def test_dropout_follows_the_module_mode():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, dropout_p=0.5 if self.training else 0.0)

    backend = Raised()
    with torch.no_grad():
        backend.compile(Model().train())(*qkv(HQ))
    declined(backend, Reason.DROPOUT)
    captured_once(check_raised(Model().eval(), *qkv(HQ)))


def checkpointed(q, k, v):
    return torch.utils.checkpoint.checkpoint(sdpa, q, k, v, use_reentrant=False)


def conditional(q, k, v):
    def causal(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    return torch.cond(q.sum() > 0, lambda q, k, v: sdpa(q, k, v), causal, (q, k, v))


@torch.compiler.nested_compile_region
def region(q, k, v):
    return sdpa(q, k, v)


def regions(q, k, v):
    return region(region(q, k, v), k, v)


def mapped(q, k, v):
    from torch._higher_order_ops.map import map as map_op

    return map_op(lambda row, k, v: sdpa(row, k, v), q[None].expand(3, *q.shape), k, v)


def looped(q, k, v):
    def body(i, o):
        return i + 1, sdpa(o, k, v)

    return torch.while_loop(lambda i, o: i < 3, body, (torch.tensor(0), q))[1]


def nested(q, k, v):
    return torch.cond(q.sum() > 0, checkpointed, lambda q, k, v: q.clone(), (q, k, v))


BODIES = {
    checkpointed: 1,
    conditional: 2,
    regions: 1,  # one body, called twice
    mapped: 1,
    looped: 1,
    nested: 1,
}


@pytest.mark.parametrize("fn", BODIES, ids=lambda fn: fn.__name__)
def test_bodies_of_higher_order_ops(fn):
    raised = check_raised(fn, *qkv(HQ))
    assert raised.reasons == [Reason.HIGHER_ORDER_BODY] * BODIES[fn]
    assert raised.before == raised.after
    assert all("scaled_dot_product_attention in " in d.detail for d in raised.found)


def test_a_body_beside_a_plain_call():
    raised = check_raised(lambda q, k, v: sdpa(checkpointed(q, k, v), k, v), *qkv(HQ))
    assert raised.reasons == [Reason.HIGHER_ORDER_BODY, None]


def test_an_autograd_function_is_inlined_or_a_body():
    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q)
            return sdpa(q, k, v)

        @staticmethod
        def backward(ctx, grad):
            return grad, None, None

    captured_once(check_raised(Attend.apply, *qkv(HQ)))
    q, k, v = qkv(HQ)
    raised = trained(lambda q, k, v: Attend.apply(q, k, v), q.requires_grad_(), k, v)
    declined(raised, Reason.HIGHER_ORDER_BODY)


@pytest.mark.parametrize("dynamic", [False, True])
def test_flex_attention(dynamic):
    from torch.nn.attention.flex_attention import flex_attention

    def fn(q, k, v):
        return flex_attention(q, k, v, lambda score, b, h, m, n: score + m - n)

    (found,) = found_in(fn, *qkv(HQ), dynamic=dynamic)
    assert found.reason == Reason.FLEX_ATTENTION


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_multi_head_attention_modules(training, weights):
    module = torch.nn.MultiheadAttention(D, 2, batch_first=True).train(training)
    raised = check_raised(lambda x: module(x, x, x, need_weights=weights)[0], torch.randn(B, M, D))
    (found,) = raised.found
    assert found.reason == Reason.MULTI_HEAD_ATTENTION
    assert found.detail == "multi_head_attention_forward"
    assert raised.before == raised.after


def test_the_fast_path_of_the_transformer_encoder():
    module = torch.nn.TransformerEncoderLayer(D, 2, 3 * D, batch_first=True).eval()
    raised = check_raised(module, torch.randn(B, M, D))
    (found,) = raised.found
    assert found.reason == Reason.MULTI_HEAD_ATTENTION
    assert found.detail == "_transformer_encoder_layer_fwd"


# --- kernels chosen inside the graph --------------------------------------------------------------


def math_only(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


def math_then_any(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        o = sdpa(q, k, v)
    return sdpa(o, k, v)


def by_priority(q, k, v):
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        o = sdpa(q, k, v)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = sdpa(o, k, v)
        o = sdpa(o, k, v)
    return sdpa(o, k, v)


EVERY_KERNEL = [
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.OVERRIDEABLE,
]


def any_kernel(q, k, v):
    with sdpa_kernel(EVERY_KERNEL):
        return sdpa(q, k, v)


def reordered(q, k, v):
    with sdpa_kernel(EVERY_KERNEL, set_priority=True):
        return sdpa(q, k, v)


def switched(q, k, v):
    torch.backends.cuda.enable_flash_sdp(False)
    o = sdpa(q, k, v)
    torch.backends.cuda.enable_flash_sdp(True)
    return sdpa(o, k, v)


def half_reduction(q, k, v):
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    o = sdpa(q, k, v)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    return sdpa(o, k, v)


PINNED = Reason.SDPA_KERNEL_CONTEXT
CONTEXTS = {
    math_only: [PINNED],
    sdpa_kernel(SDPBackend.MATH)(lambda q, k, v: sdpa(q, k, v)): [PINNED],
    math_then_any: [PINNED, None],
    by_priority: [PINNED, PINNED, PINNED, None],
    any_kernel: [None],
    reordered: [PINNED],
    switched: [PINNED, None],
    half_reduction: [PINNED, None],
}


@pytest.mark.parametrize("fn", CONTEXTS, ids=lambda fn: fn.__name__)
def test_kernels_chosen_in_the_graph(fn):
    assert check_raised(fn, *qkv(HQ)).reasons == CONTEXTS[fn]


def test_kernels_chosen_in_the_graph_for_good():
    """Under the flags at the end of the graph everything is lowered, whatever held before."""

    def call(graph, q, k, v):
        node = graph.call_function(sdpa, (q, k, v))
        node.meta["example_value"] = q.meta["example_value"]
        graph.call_function(torch.backends.cuda.enable_flash_sdp, (False,))
        return graph.call_function(sdpa, (node, k, v))

    found = capture(graph_of(call), [])
    assert [d.reason for d in found] == [PINNED, PINNED]


def test_kernels_chosen_around_the_compiled_function():
    with sdpa_kernel(SDPBackend.MATH):
        captured_once(check_raised(lambda q, k, v: sdpa(q, k, v), *qkv(HQ)))
        assert check_raised(math_only, *qkv(HQ)).reasons == [None]


def test_a_graph_break_inside_a_kernel_context():
    def fn(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            o = sdpa(q, k, v)
            torch._dynamo.graph_break()
            o = sdpa(o, k, v)
        return sdpa(o, k, v)

    assert check_raised(fn, *qkv(HQ), graphs=2).reasons == [PINNED, PINNED, None]


# --- tensors no kernel takes ----------------------------------------------------------------------


def test_batched_tensors_of_vmap():
    fn = torch.vmap(lambda q, k, v: sdpa(q, k, v))
    found = declined(check_raised(lambda *args: fn(*args), *qkv(HQ)), Reason.UNSUPPORTED_CALL)
    assert "not a plain dense tensor" in found[0].detail


@pytest.mark.parametrize("functional", [False, True])
def test_forward_mode_derivatives(functional):
    from torch.autograd import forward_ad

    def dual(q, k, v):
        with forward_ad.dual_level():
            o = sdpa(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
            return forward_ad.unpack_dual(o).tangent.clone()

    def jvp(q, k, v):
        return torch.func.jvp(lambda q: sdpa(q, k, v), (q,), (torch.ones_like(q),))[1]

    with sdpa_kernel(SDPBackend.MATH):
        (found,) = found_in(jvp if functional else dual, *qkv(HQ))
    assert found.reason == Reason.UNSUPPORTED_CALL


def test_tensor_subclasses():
    from torch.testing._internal.two_tensor import TwoTensor

    q, k, v = (TwoTensor(x, x + 1) for x in qkv(HQ))
    backend = Raised()
    with torch.no_grad():
        got = backend.compile(lambda q, k, v: sdpa(q, k, v))(q, k, v)
        expected = sdpa(q, k, v)
    identical((got.a, got.b), (expected.a, expected.b))
    declined(backend, Reason.UNSUPPORTED_CALL)


def test_kernels_called_by_their_own_name():
    def fn(q, k, v):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    found = declined(check_raised(fn, *qkv(HQ)), Reason.UNSUPPORTED_CALL)
    assert "_scaled_dot_product_flash_attention_for_cpu" in found[0].detail


def test_complex_numbers_raise_as_in_eager_mode():
    args = qkv(HQ, torch.complex64)
    backend = Raised()
    with torch.no_grad():
        for fn in (sdpa, backend.compile(lambda q, k, v: sdpa(q, k, v))):
            with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
                fn(*args)
    declined(backend, Reason.UNSUPPORTED_CALL)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k, v.double(), None),
        lambda q, k, v: (q, k, v, torch.zeros(M, L, dtype=torch.float64)),
        lambda q, k, v: (q, k[..., 1:], v, None),
        lambda q, k, v: (q, k, v, torch.zeros(M, L + 1)),
    ],
    ids=["dtype of v", "dtype of the mask", "feature sizes", "size of the mask"],
)
def test_calls_that_eager_mode_refuses(change):
    args = change(*qkv(HQ))
    with pytest.raises(RuntimeError):
        sdpa(*args)
    backend = Raised()
    with torch.no_grad(), pytest.raises(RuntimeError):
        backend.compile(lambda q, k, v, m: sdpa(q, k, v, m))(*args)
    assert None not in backend.reasons


def test_a_device_without_a_lowering():
    (found,) = found_in(lambda q, k, v: sdpa(q, k, v), *(x.to("meta") for x in qkv(HQ)))
    assert (found.reason, found.detail.endswith("on meta")) == (Reason.NO_KERNEL, True)


# --- graphs Dynamo does not write (today) ---------------------------------------------------------


def graph_of(call, *, dtype=torch.float32, device="cpu"):
    """A graph of one call; `call(graph, q, k, v)` makes it."""
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(B, HQ, M, D, dtype=dtype, device=device)
    operands = [graph.placeholder(name) for name in "qkv"]
    for operand in operands:
        operand.meta["example_value"] = value
    node = call(graph, *operands)
    node.meta["example_value"] = value
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph)


def call_with(*extra, **kwargs):
    return lambda graph, q, k, v: graph.call_function(sdpa, (q, k, v, *extra), kwargs)


def with_node(name, value):
    """The call with an argument that is a node holding `value`."""

    def call(graph, q, k, v):
        node = graph.call_function(operator.neg, (q,))
        node.meta["example_value"] = value
        return graph.call_function(sdpa, (q, k, v), {name: node})

    return call


REFUSED = {
    "tensor scale": (with_node("scale", torch.tensor(0.3)), Reason.TENSOR_SCALE),
    "text scale": (call_with(scale="0.3"), Reason.UNSUPPORTED_CALL),
    "unknown scale": (with_node("scale", None), Reason.UNSUPPORTED_CALL),
    "unknown dropout": (with_node("dropout_p", None), Reason.DROPOUT),
    "computed is_causal": (with_node("is_causal", True), Reason.UNSUPPORTED_CALL),
    "is_causal=None": (call_with(is_causal=None), Reason.UNSUPPORTED_CALL),
    "computed enable_gqa": (with_node("enable_gqa", True), Reason.UNSUPPORTED_CALL),
    "mask that is no tensor": (with_node("attn_mask", 1), Reason.UNSUPPORTED_CALL),
    "constant mask": (call_with(attn_mask=1.0), Reason.UNSUPPORTED_CALL),
    "positional scale": (call_with(None, 0.0, False, 0.3), Reason.UNSUPPORTED_CALL),
    "unknown keyword": (call_with(window=3), Reason.UNSUPPORTED_CALL),
    "argument given twice": (call_with(query=None), Reason.UNSUPPORTED_CALL),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_cannot_be_bound(case):
    call, reason = REFUSED[case]
    gm = graph_of(call)
    before = str(gm.graph)
    (found,) = capture(gm, [])
    assert isinstance(found, Declined) and found.reason == reason
    assert str(gm.graph) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_float64_needs_the_cpu(dtype):
    gm = graph_of(call_with(), dtype=dtype, device="cuda")
    (found,) = capture(gm, [], devices={"cuda"})
    assert (getattr(found, "reason", None) == Reason.FLOAT64) == (dtype == torch.float64)
    (found,) = capture(graph_of(call_with(), dtype=dtype, device="cuda"), [], devices={"cpu"})
    assert found.reason == Reason.NO_KERNEL


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.complex64])
def test_dtypes_without_a_kernel(dtype):
    (found,) = capture(graph_of(call_with(), dtype=dtype), [])
    assert found.reason == Reason.UNSUPPORTED_CALL and str(dtype) in found.detail


def test_a_node_without_a_value():
    gm = graph_of(call_with())
    next(iter(gm.graph.nodes)).meta.clear()
    (found,) = capture(gm, [])
    assert found.reason == Reason.UNSUPPORTED_CALL


def test_every_combination_of_optional_arguments_binds():
    options = {"attn_mask": [None], "dropout_p": [0.0], "is_causal": [True], "scale": [None, 0.3]}
    for chosen in itertools.product(*([(), *((k, v) for v in vs)] for k, vs in options.items())):
        gm = graph_of(call_with(**dict(pair for pair in chosen if pair)))
        (found,) = capture(gm, [])
        assert isinstance(found, Captured)
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.cascade.sdpa.default)
        given = dict(pair for pair in chosen if pair)
        assert node.args[3:] == (None, given.get("is_causal", False))
        assert node.kwargs == {"scale": given.get("scale"), "enable_gqa": False}

"""The ops as the dispatcher sees them: fakes, checks, autocast, autograd, aliasing, guards."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.attend_cases import BASE, Case, assert_attends
from support.symbolic import SymbolicRows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_cascade.kernels import ops

cascade = torch.ops.cascade
OPS = [getattr(cascade, name).default for name in ops.SCHEMAS]
any_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op._schema.name.split("::")[1])


def dense(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def transposed(n, h, m, d, dtype=torch.float32):
    return dense(n, m, h, d, dtype=dtype).transpose(1, 2)


def sliced(n, h, m, d, dtype=torch.float32):
    return dense(n, h, m + 3, d + 4, dtype=dtype)[:, :, 2:-1, 3:-1]


def expanded(n, h, m, d, dtype=torch.float32):
    return dense(1, h, m, d, dtype=dtype).expand(n, h, m, d)


def offset(n, h, m, d, dtype=torch.float32):
    return dense(n * h * m * d + 5, dtype=dtype)[5:].view(n, h, m, d)


def features_first(n, h, m, d, dtype=torch.float32):
    return dense(n, h, d, m, dtype=dtype).transpose(2, 3)


LAYOUTS = [dense, transposed, sliced, expanded, offset, features_first]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)


# --- opcheck: schema, fake against real, autograd registration, AOT with dynamic shapes -----------


def checked(op, args, kwargs=None):
    torch.library.opcheck(op, args, kwargs or {})


@layouts
def test_opcheck_sdpa(layout):
    q, k, v = layout(2, 6, 5, 16), layout(2, 3, 7, 16), layout(2, 3, 7, 16)
    checked(cascade.sdpa.default, (q, k, v), {"enable_gqa": True, "scale": 0.3})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_opcheck_sdpa_masks_and_dtypes(dtype):
    q, k, v = transposed(2, 3, 5, 16, dtype=dtype), dense(2, 3, 7, 16, dtype=dtype), None
    v = dense(2, 3, 7, 24, dtype=dtype)
    checked(cascade.sdpa.default, (q, k, v, torch.rand(2, 1, 5, 7) > 0.4))
    checked(cascade.sdpa.default, (q, k, v, dense(5, 7, dtype=dtype)))
    checked(cascade.sdpa.default, (q, k, v, None, True))


@layouts
@pytest.mark.parametrize("branches", [1, 3])
def test_opcheck_attend(layout, branches):
    n = 2 * branches
    q, k, v = layout(n, 6, 5, 16), layout(2, 3, 7, 16), layout(2, 3, 7, 16)
    mask = layout(n, 6, 5, 7)
    checked(cascade.attend.default, (q, k, v, mask), {"branches": branches})


@pytest.mark.parametrize(
    "case",
    [
        BASE.but(dtype=torch.bfloat16, mask="N1ML"),
        BASE.but(dtype=torch.float64, positions="NM", kv_start=2, window=3),
        BASE.but(dv=24, softcap=4.0, scale=0.3),
        BASE.but(keys=0, mask="11ML"),
    ],
    ids=str,
)
def test_opcheck_attend_features(case):
    args, options = case.arguments()
    checked(cascade.attend.default, args, options)


@layouts
@pytest.mark.parametrize("parts", [1, 3])
def test_opcheck_merge(layout, parts):
    o = [layout(2, 6, 5, 16) for _ in range(parts)]
    lse = [layout(2, 6, 5, 3)[..., 1] for _ in range(parts)]
    checked(cascade.merge.default, (o, lse))


@layouts
def test_opcheck_linears(layout):
    x, (first, second) = layout(1, 2, 5, 16)[0, 0], layout(1, 2, 7, 16)[0]
    weights, biases = [first, second], [dense(7), dense(7)]
    checked(cascade.linears.default, (x, weights))
    checked(cascade.linears.default, (x, weights, biases))


@layouts
def test_opcheck_reuse_kv(layout):
    k, v, fresh = layout(2, 3, 7, 16), layout(2, 3, 7, 24), torch.tensor([[1, 2], [0, 6]])
    args = (k, v, dense(2, 3, 7, 16), dense(2, 3, 7, 24), fresh)
    checked(cascade.reuse_kv.default, args)
    checked(cascade.reuse_kv.default, (*args, torch.zeros(2, 7, dtype=torch.int64)))


# --- sdpa is torch's function ---------------------------------------------------------------------

VALUES = {"same-size": 16, "other-size": 24}


@layouts
@pytest.mark.parametrize("dv", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("queries", [1, 5])
def test_sdpa_result_dtype_and_strides(layout, dv, queries):
    for dtype, mask_kind in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64), ("", "causal", "bool", "add")
    ):
        q = layout(2, 6, queries, 16, dtype=dtype)
        k, v = layout(2, 3, 7, 16, dtype=dtype), layout(2, 3, 7, dv, dtype=dtype)
        masks = {"bool": torch.rand(2, 1, queries, 7) > 0.3, "add": dense(queries, 7, dtype=dtype)}
        args = (q, k, v, masks.get(mask_kind))
        causal = mask_kind == "causal"
        expected = F.scaled_dot_product_attention(
            *args, is_causal=causal, scale=0.2, enable_gqa=True
        )
        got = ops.sdpa(*args, causal, scale=0.2, enable_gqa=True)
        assert torch.equal(got, expected)
        assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
        mode = FakeTensorMode()
        fakes = [a if a is None else mode.from_tensor(a) for a in args]
        with mode:
            fake = ops.sdpa(*fakes, causal, scale=0.2, enable_gqa=True)
        strides = zip(fake.stride(), expected.stride(), expected.shape, strict=True)
        assert (fake.dtype, fake.shape) == (expected.dtype, expected.shape)
        assert all(a == b or size == 1 for a, b, size in strides)


def test_sdpa_raises_what_torch_raises():
    q = dense(2, 3, 5, 16)
    for args in (
        (q, dense(2, 3, 5, 8), q),
        (q, dense(2, 2, 5, 16), q),
        (q, q.half(), q),
        (q, q, q, dense(5, 5, dtype=torch.float64)),
        (q, q, q, dense(5, 6)),
    ):
        with pytest.raises(RuntimeError) as expected:
            F.scaled_dot_product_attention(*args)
        with pytest.raises(RuntimeError) as got:
            ops.sdpa(*args)
        assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_sdpa_takes_symbolic_sizes_and_scale():
    q, k = dense(2, 3, 5, 16), dense(2, 3, 7, 16)
    compiled = torch.compile(
        lambda q, k, scale: ops.sdpa(q, k, k, scale=scale),
        backend="aot_eager",
        dynamic=True,
        fullgraph=True,
    )
    for scale in (0.3, 0.4):
        expected = F.scaled_dot_product_attention(q, k, k, scale=scale)
        assert torch.equal(compiled(q, k, scale), expected)


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask_kind", ["", "bool", "float32", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_sdpa_under_autocast_is_torchs(dtype, mask_kind, low):
    q, k = transposed(2, 6, 5, 16, dtype=dtype), dense(2, 6, 7, 16, dtype=dtype)
    mask = None if not mask_kind else torch.randn(5, 7).to(getattr(torch, mask_kind))
    with torch.autocast("cpu", dtype=low):
        try:
            expected = F.scaled_dot_product_attention(q, k, k, mask)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match="attn_mask"):
                ops.sdpa(q, k, k, mask)
            assert "attn_mask" in str(error)
            return
        got = ops.sdpa(q, k, k, mask)
    assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(got, expected)


def test_autocast_is_recorded_in_traces():
    """AOTAutograd sees the casts, then one op on the cast operands; double stays double."""

    def model(q, k, mask):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.sdpa(q, k, k, mask)

    graphs = []

    def recorder(gm, _):
        graphs.append(gm)
        return gm

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=recorder)
    q, k, mask = dense(2, 3, 5, 16), dense(2, 3, 7, 16), dense(5, 7)
    got = torch.compile(model, backend=backend, fullgraph=True)(q, k, mask)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, model(q, k, mask))
    (call,) = graphs[0].graph.find_nodes(op="call_function", target=cascade.sdpa.default)
    assert [a.meta["val"].dtype for a in call.args[:4]] == [torch.bfloat16] * 4
    assert call.meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("case", [BASE, BASE.but(dv=24), BASE.but(softcap=3.0)], ids=str)
def test_partials_ignore_autocast(case):
    args, options = case.arguments()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = ops.attend(*args, **options)
        merged = ops.merge([o, o], [lse, lse])
        fused = ops.reuse_kv(args[1], args[2], args[1], args[2], torch.zeros(2, 1).long())
        fused += tuple(ops.linears(args[0][0, 0], [args[1][0, 0]]))
    assert_attends((o, lse), args, options)
    assert {x.dtype for x in (*merged, *fused)} == {torch.float32}


# --- autograd -------------------------------------------------------------------------------------


def call(op, x):
    """Any op on inputs made from x [2, 3, 5, 16]."""
    name = op._schema.name
    fresh = torch.zeros(2, 1, dtype=torch.int64, device=x.device)
    return {
        "cascade::sdpa": lambda: op(x, x, x),
        "cascade::attend": lambda: op(x, x, x),
        "cascade::merge": lambda: op([x], [x[..., 0]]),
        "cascade::reuse_kv": lambda: op(x, x, x, x, fresh),
        "cascade::linears": lambda: op(x[0, 0], [x[1, 1]]),
    }[name]()


@any_op
def test_no_silent_detaching(op):
    x = dense(2, 3, 5, 16).requires_grad_()
    with pytest.raises(RuntimeError, match=r"cascade::\w+ has no derivative and an input requires"):
        call(op, x)
    with torch.no_grad():
        call(op, x)
    with torch.inference_mode():
        call(op, x)


# --- results --------------------------------------------------------------------------------------


@any_op
def test_results_are_nobody_elses_memory(op):
    x = dense(2, 3, 5, 16)
    before = x.clone()
    results = call(op, x)
    for result in results if isinstance(results, (tuple, list)) else [results]:
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        result.fill_(7.0)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "case", [BASE, BASE.but(branches=1), BASE.but(queries=1, rows=1), BASE.but(dv=24)], ids=str
)
def test_attend_results_are_dense(case):
    args, options = case.arguments()
    assert_attends(ops.attend(*args, **options), args, options)


def test_reuse_kv_gives_the_fresh_ones():
    k, v = transposed(2, 3, 7, 16), expanded(2, 3, 7, 24)
    cached = dense(2, 3, 7, 16), dense(2, 3, 7, 24)
    got = ops.reuse_kv(k, v, *cached, torch.tensor([[1], [2]]))
    assert torch.equal(got[0], k)
    assert torch.equal(got[1], v)
    assert all(x.is_contiguous() for x in got)


# --- checks ---------------------------------------------------------------------------------------

SMALL = Case(rows=2, branches=3, kv_heads=2, group=2, queries=5, keys=7, dk=8, dv=12)
N = 6


def wrong(**changes):
    """Arguments of `attend` that are right except for the changes."""
    (q, k, v, mask), options = SMALL.arguments()
    return {"q": q, "k": k, "v": v, "mask": mask, **options, **changes}


POSITIONS = torch.zeros(N, 5, dtype=torch.int64)
WRONG_ATTEND = {
    "q: expected 4 dims, got 3": lambda: wrong(q=dense(N, 5, 8)),
    "k: expected 4 dims": lambda: wrong(k=dense(2, 7, 8)),
    "k: expected the dtype of q, torch.float32, got torch.float16": lambda: wrong(
        k=dense(2, 2, 7, 8, dtype=torch.float16)
    ),
    "q: expected torch.float32 or": lambda: wrong(
        **{n: wrong()[n].long() for n in ("q", "k", "v")}
    ),
    "q: expected size(0) == branches * k.size(0) = 4, got": lambda: wrong(branches=2),
    "branches: expected at least 1, got 0": lambda: wrong(branches=0),
    "q: expected size(1) a multiple of k.size(1) = 2, got 3": lambda: wrong(q=dense(N, 3, 5, 8)),
    "k: expected size(3) == q.size(3) = 8, got shape (2, 2, 7, 9)": lambda: wrong(
        k=dense(2, 2, 7, 9)
    ),
    "v: expected size(0) == k.size(0) = 2": lambda: wrong(v=dense(1, 2, 7, 12)),
    "v: expected size(1) == k.size(1) = 2": lambda: wrong(v=dense(2, 4, 7, 12)),
    "v: expected size(2) == k.size(2) = 7, got shape (2, 2, 8, 12)": lambda: wrong(
        v=dense(2, 2, 8, 12)
    ),
    "mask: expected a shape broadcastable to (6, 4, 5, 7), got shape (6, 1, 5, 6)": lambda: wrong(
        mask=dense(N, 1, 5, 6)
    ),
    "mask: expected a shape broadcastable to (6, 4, 5, 7), got shape (2, 1, 5, 7)": lambda: wrong(
        mask=dense(2, 1, 5, 7)
    ),
    "mask: expected a shape broadcastable": lambda: wrong(mask=dense(1, 1, 1, 5, 7)),
    "mask: expected torch.bool or": lambda: wrong(mask=torch.ones(5, 7, dtype=torch.int64)),
    "mask: expected torch.bool or torch.float32": lambda: wrong(
        mask=dense(5, 7, dtype=torch.float64)
    ),
    "q_positions: expected torch.int64, got torch.int32": lambda: wrong(
        q_positions=POSITIONS.int()
    ),
    "q_positions: expected a shape broadcastable to (6, 5), got shape (2, 5)": lambda: wrong(
        q_positions=POSITIONS[:2]
    ),
    "window: expected None where q_positions is None, got 3": lambda: wrong(window=3),
    "window: expected at least 1, got 0": lambda: wrong(window=0, q_positions=POSITIONS),
    "softcap: expected a positive number, got 0.0": lambda: wrong(softcap=0.0),
    "k: expected the device of q, cpu, got meta": lambda: wrong(k=dense(2, 2, 7, 8).to("meta")),
}


@pytest.mark.parametrize("fake", [False, True], ids=["eager", "fake"])
@pytest.mark.parametrize("message", WRONG_ATTEND)
def test_attend_says_what_is_wrong(message, fake):
    arguments = WRONG_ATTEND[message]()
    if fake and "device" in message:
        pytest.skip("fake tensors refuse other devices themselves")
    if fake:
        mode = FakeTensorMode()
        tensors = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor)}
        arguments.update({n: mode.from_tensor(a) for n, a in tensors.items()})
    kind = TypeError if "dtype" in message or "expected torch." in message else ValueError
    with pytest.raises(kind) as error:
        ops.attend(**arguments)
    assert message in str(error.value)
    assert str(error.value).startswith("cascade::attend: ")


X, Y = dense(2, 5, 16), dense(2, 5)
WRONG_MERGE = {
    "lse: expected one part or more, as many as o has (0), got 0": ([], []),
    "lse: expected one part or more, as many as o has (2), got 1": ([X, X], [Y]),
    "o[0]: expected torch.float32 or torch.float64, got torch.bfloat16": (
        [X.bfloat16()],
        [Y.bfloat16()],
    ),
    "lse[0]: expected the dtype of o[0], torch.float32, got torch.float64": ([X], [Y.double()]),
    "o[1]: expected the dtype of o[0]": ([X, X.double()], [Y, Y]),
    "o[1]: expected size(1) == o[0].size(1) = 5, got shape (2, 4, 16)": ([X, X[:, 1:]], [Y, Y]),
    "lse[1]: expected size(0) == o[0].size(0) = 2": ([X, X], [Y, Y[:1]]),
    "lse[0]: expected 2 dims, got 3": ([X], [X]),
}


@pytest.mark.parametrize("message", WRONG_MERGE)
def test_merge_says_what_is_wrong(message):
    with pytest.raises((TypeError, ValueError)) as error:
        ops.merge(*WRONG_MERGE[message])
    assert str(error.value).startswith(f"cascade::merge: {message}")


KV, FRESH = dense(2, 3, 7, 16), torch.zeros(2, 4, dtype=torch.int64)
WRONG_REUSE = {
    "v: expected size(2) == k.size(2) = 7": (KV, KV[:, :, 1:], KV, KV, FRESH),
    "k_cached: expected size(0) == k.size(0) = 2": (KV, KV, KV[:1], KV, FRESH),
    "v_cached: expected size(3) == v.size(3) = 16": (KV, KV, KV, KV[..., 1:], FRESH),
    "k_cached: expected the dtype of k": (KV, KV, KV.half(), KV, FRESH),
    "fresh_rows: expected torch.int64, got torch.int32": (KV, KV, KV, KV, FRESH.int()),
    "fresh_rows: expected size(0) == k.size(0) = 2": (KV, KV, KV, KV, FRESH[:1]),
    "fresh_rows: expected 2 dims, got 1": (KV, KV, KV, KV, FRESH[0]),
    "fresh_rows: expected 1 to k.size(2) = 7 tokens a row": (KV, KV, KV, KV, FRESH[:, :0]),
    "fresh_rows: expected 1 to k.size(2) = 7 tokens a row (": (KV, KV, KV, KV, FRESH.repeat(1, 2)),
    "chunks: expected torch.int64, got torch.float32": (KV, KV, KV, KV, FRESH, KV[:, 0, :, 0]),
    "chunks: expected 2 dims, got 1": (KV, KV, KV, KV, FRESH, FRESH[0]),
    "chunks: expected size(1) == k.size(2) = 7": (KV, KV, KV, KV, FRESH, FRESH),
}


@pytest.mark.parametrize("message", WRONG_REUSE)
def test_reuse_kv_says_what_is_wrong(message):
    with pytest.raises((TypeError, ValueError)) as error:
        ops.reuse_kv(*WRONG_REUSE[message])
    assert str(error.value).startswith(f"cascade::reuse_kv: {message}")


ROWS, WEIGHT = dense(5, 16), dense(7, 16)
WRONG_LINEARS = {
    "weights: expected one or more, got 0": (ROWS, []),
    "x: expected 2 dims, got 1": (ROWS[0], [WEIGHT]),
    "x: expected torch.float32 or": (ROWS.int(), [WEIGHT]),
    "weights[1]: expected size(1) == x.size(1) = 16": (ROWS, [WEIGHT, WEIGHT[:, 1:]]),
    "weights[1]: expected the dtype of x": (ROWS, [WEIGHT, WEIGHT.half()]),
    "biases: expected as many as weights, 1, got 2": (ROWS, [WEIGHT], [WEIGHT[:, 0]] * 2),
    "biases[0]: expected size(0) == weights[0].size(0) = 7": (ROWS, [WEIGHT], [WEIGHT[:6, 0]]),
}


@pytest.mark.parametrize("message", WRONG_LINEARS)
def test_linears_says_what_is_wrong(message):
    with pytest.raises((TypeError, ValueError)) as error:
        ops.linears(*WRONG_LINEARS[message])
    assert str(error.value).startswith(f"cascade::linears: {message}")


def test_linears_are_torchs_products():
    x, weights, biases = dense(5, 16), [dense(7, 16), dense(3, 16)], [dense(7), dense(3)]
    plain, with_bias = ops.linears(x, weights), ops.linears(x, weights, biases)
    for i, weight in enumerate(weights):
        assert torch.equal(plain[i], torch.nn.functional.linear(x, weight))
        assert torch.equal(with_bias[i], torch.nn.functional.linear(x, weight, biases[i]))


# --- symbolic sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        BASE.but(mask="NHML", additive=True),
        BASE.but(mask="N11L", positions="NM", window=2, kv_start=3),
        BASE.but(dv=24, softcap=2.0),
    ],
    ids=str,
)
def test_fakes_add_no_guards(case):
    inputs = SymbolicRows(case, symbolic=True)
    with inputs.mode:
        o, lse = inputs.call(ops.attend, tuple(inputs.flat()))
        ops.merge([o, o], [lse, lse])
        fresh = torch.empty(inputs.k.size(0), 2, dtype=torch.int64)
        ops.reuse_kv(inputs.k, inputs.v, inputs.k, inputs.v, fresh)
    assert o.is_contiguous()
    assert lse.is_contiguous()
    assert inputs.new_guards() == []


def test_sizes_that_cannot_be_compared_pass_without_a_guard():
    """Batch sizes that are only equal in the call at hand: neither an error nor a guard."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def symbolic(*shape):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
        return mode.from_tensor(torch.empty(shape), symbolic_context=context)

    q, k, v = symbolic(6, 4, 5, 16), symbolic(2, 2, 7, 16), symbolic(2, 2, 7, 16)
    with mode:
        o, lse = ops.attend(q, k, v, symbolic(6, 4, 5, 7), branches=3)
        ops.merge([o, symbolic(6, 4, 5, 16)], [lse, symbolic(6, 4, 5)])
    assert [str(g.expr) for g in env.guards] == []


def test_a_user_may_compile_the_ops():
    """The ops survive Dynamo and AOTAutograd whole, with symbolic sizes, in one graph."""

    def model(q, k, v):
        o, lse = ops.attend(q, k, v, branches=q.size(0) // k.size(0))
        return ops.merge([o, o], [lse, lse])

    args, _ = BASE.arguments()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for got, expected in zip(compiled(*args[:3]), model(*args[:3]), strict=True):
        assert torch.equal(got, expected)


def test_other_devices_have_the_formula():
    """Only the CPU key holds the CPU kernel: meta tensors go through the fake."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key("cascade::attend", "CPU")
    for name in ops.SCHEMAS:
        key = "CompositeExplicitAutograd"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"cascade::{name}", key)
    q = torch.empty(2, 3, 5, 16, device="meta")
    assert ops.attend(q, q, q)[1].shape == (2, 3, 5)


def test_traced_ops_stay_whole():
    args, options = BASE.arguments()
    traced = make_fx(lambda q, k, v: ops.attend(q, k, v, branches=3))(*args[:3])
    targets = [n.target for n in traced.graph.nodes if n.op == "call_function"]
    assert cascade.attend.default in targets
    assert options["branches"] == 3

"""Attention sinks in `merge`: one more key a row, of value zero, counted once."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attend_cases import BASE
from support.tolerance import assert_close_to_reference
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from torch_cascade.kernels import ops
from torch_cascade.kernels.merge import merge_torch
from torch_cascade.kernels.reference import attend_reference, merge_reference

INF = math.inf
FLOATING = [torch.float32, torch.bfloat16, torch.float16]


def assert_merges(result, o, lse, sinks):
    """The result is the oracle's, as well as straightforward float32 code is."""
    wanted = merge_reference(o, lse, sinks=sinks)
    eager = merge_reference(o, lse, sinks=sinks, dtype=o[0].dtype)
    for got, e, r in zip(result, eager, wanted, strict=True):
        assert got.dtype == o[0].dtype
        assert got.is_contiguous()
        assert_close_to_reference(got, e, r)


def parts(number, dtype=torch.float32, keys=7):
    """Partial states [2, 6, 5] over keys with a needle; some rows of a part see no key."""
    torch.manual_seed(number)
    found = []
    for i in range(number):
        (q, k, v, mask), _ = BASE.but(
            branches=1, keys=keys + i, mask="N1ML", hidden_rows=True
        ).arguments()
        found.append(attend_reference(q, k, v, mask, dtype=dtype))
    o, lse = zip(*found, strict=True)
    return list(o), list(lse)


# --- the oracle -----------------------------------------------------------------------------------


def test_the_oracle_is_a_key_of_value_zero():
    """As HF gpt-oss computes it: the sink is one more column of scores, dropped after softmax."""
    (q, k, v, _), _ = BASE.but(branches=1, dtype=torch.float64).arguments()
    sinks = torch.randn(6, 1, dtype=torch.float64)
    kv = [x.repeat_interleave(3, 1) for x in (k, v)]
    scores = torch.cat([q @ kv[0].mT / 4, sinks[..., None].expand(2, 6, 5, 1)], -1)
    expected = scores.softmax(-1)[..., :-1] @ kv[1], scores.logsumexp(-1)
    o, lse = attend_reference(q, k, v)
    torch.testing.assert_close(merge_reference([o], [lse], sinks=sinks), expected)


def test_by_hand():
    """Weights 1/4 for the part, 3/4 for the sink."""
    o, lse = merge_torch(
        [torch.tensor([[4.0, 8.0]])], [torch.tensor([0.0])], sinks=torch.tensor(math.log(3.0))
    )
    torch.testing.assert_close(o, torch.tensor([[1.0, 2.0]]))
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0)]))


# --- laws -----------------------------------------------------------------------------------------


SHAPES = [(6, 1), (2, 6, 5), (1, 6, 1), (1,), (), (5,), (2, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_equals_the_oracle(dtype, number, shape):
    o, lse = parts(number)
    sinks = (2 * torch.randn(shape)).to(dtype)
    assert_merges(ops.merge(o, lse, sinks=sinks), o, lse, sinks)


@pytest.mark.parametrize("dtype", [torch.float64, *FLOATING], ids=str)
def test_in_float64(dtype):
    o, lse = parts(2, torch.float64)
    sinks = torch.randn(6, 1).to(dtype)
    assert_merges(ops.merge(o, lse, sinks=sinks), o, lse, sinks)


@pytest.mark.parametrize("cut", [0, 3, 16, 17])
def test_counted_once_however_the_keys_are_split(cut):
    """A sink as heavy as the heaviest key: counted twice it would change every row."""
    (q, k, v, _), _ = BASE.but(branches=1, keys=17).arguments()
    sinks = attend_reference(q, k, v)[1].amax((0, 2)).float()[:, None]
    pieces = [
        attend_reference(q, k[:, :, s], v[:, :, s], dtype=torch.float32)
        for s in (slice(0, cut), slice(cut, 12), slice(max(cut, 12), 17))
        if s.start <= s.stop
    ]
    o, lse = ops.merge([o for o, _ in pieces], [lse for _, lse in pieces], sinks=sinks)
    wanted, eager = (
        merge_reference(*zip(attend_reference(q, k, v, dtype=d), strict=True), sinks=sinks, dtype=d)
        for d in (torch.float64, torch.float32)
    )
    assert_close_to_reference(o, eager[0], wanted[0])
    assert_close_to_reference(lse, eager[1], wanted[1])


def test_a_nested_merge_has_them_in_either_place():
    o, lse = parts(3)
    sinks = torch.randn(6, 1)
    inner = ops.merge(o[:2], lse[:2], sinks=sinks)
    outer = ops.merge(o[:2], lse[:2])
    for pair, rest in ((inner, None), (outer, sinks)):
        nested = ops.merge([pair[0], o[2]], [pair[1], lse[2]], sinks=rest)
        assert_merges(nested, o, lse, sinks)


SINK = st.one_of(
    st.just(-INF), st.floats(-5, 5, width=32), st.floats(-(2.0**100), 2.0**100, width=32)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SINK, min_size=3, max_size=3), st.lists(SINK, min_size=6, max_size=6))
def test_any_magnitude(sinks, lses):
    lse = list(torch.tensor(lses).view(2, 3))
    o = [torch.where(part[:, None] == -INF, 0.0, torch.randn(3, 2)) for part in lse]
    assert_merges(merge_torch(o, lse, sinks=torch.tensor(sinks)), o, lse, torch.tensor(sinks))


# --- infinities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_minus_infinity_is_none(number):
    o, lse = parts(number)
    got = ops.merge(o, lse, sinks=torch.full((6, 1), -INF))
    for a, b in zip(got, ops.merge(o, lse), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("number", [1, 2])
def test_a_row_that_saw_no_key_is_its_sink(number):
    o = [torch.full((2, 6, 5, 16), math.nan) for _ in range(number)]
    lse = [torch.full((2, 6, 5), -INF) for _ in range(number)]
    sinks = torch.tensor([-1e30, -3.0, 0.0, 2.5, 1e30, -INF])[:, None]
    out, total = ops.merge(o, lse, sinks=sinks)
    assert (out == 0).all()
    assert torch.equal(total, sinks.expand(2, 6, 5))


def test_a_very_large_sink_takes_everything():
    o, lse = parts(2)
    out, total = ops.merge(o, lse, sinks=torch.tensor(1e30))
    assert (out == 0).all()
    assert (total == 1e30).all()


def test_overflow_and_nan_are_as_those_of_a_part():
    """With a sink of +inf, o is the mean of what is at +inf: the sink alone, or the part and it."""
    o, lse = [torch.ones(2, 1)], [torch.tensor([0.0, INF])]
    out, total = merge_torch(o, lse, sinks=torch.tensor(INF))
    assert (out.flatten().tolist(), total.tolist()) == ([0.0, 0.5], [INF, INF])
    out, total = merge_torch(o, lse, sinks=torch.tensor(math.nan))
    assert out.isnan().all()
    assert total.isnan().all()


# --- form -----------------------------------------------------------------------------------------


def test_no_argument_is_written_and_none_aliased():
    o, lse = parts(1)
    sinks = torch.zeros(2, 6, 5)
    before = [x.clone() for x in (*o, *lse, sinks)]
    for result in ops.merge(o, lse, sinks=sinks):
        result.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip((*o, *lse, sinks), before, strict=True))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("number", [1, 2])
def test_opcheck(number, dtype):
    o, lse = parts(number)
    sinks = torch.randn(6, 1).to(dtype)
    torch.library.opcheck(torch.ops.cascade.merge.default, (o, lse), {"sinks": sinks})


def test_all_of_it_is_one_compiled_kernel():
    o, lse = parts(3)
    sinks = torch.randn(6, 1).bfloat16()
    compiled = torch.compile(merge_torch, fullgraph=True)
    result, (code,) = run_and_get_code(compiled, o, lse, sinks=sinks)
    assert len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE)) == 1
    assert_merges(result, o, lse, sinks)


def test_compiled_through_the_op_with_sizes_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(ops.merge, dynamic=True, fullgraph=True)
    for rows, heads in itertools.product((2, 3), (6, 4)):
        o = [torch.randn(rows, heads, 5, 16) for _ in range(2)]
        lse = [torch.randn(rows, heads, 5) for _ in range(2)]
        sinks = torch.randn(heads, 1)
        assert_merges(compiled(o, lse, sinks=sinks), o, lse, sinks)


def test_symbolic_sizes_add_no_guards():
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
    n, h, m = mode.from_tensor(torch.empty(2, 6, 5), symbolic_context=context).shape
    with mode:
        o, lse = torch.empty(n, h, m, 16), torch.empty(n, h, m)
        for merge in (ops.merge, merge_torch):
            for shape in ((h, 1), (n, h, m), ()):
                out, total = merge([o, o], [lse, lse], sinks=torch.empty(shape))
                assert out.is_contiguous()
                assert total.shape == (n, h, m)
    assert env.guards == []

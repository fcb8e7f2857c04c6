"""The laws of `merge`, and its use: split the keys anywhere, get the whole attention back."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tolerance import assert_close_to_reference
from torch._inductor.utils import run_and_get_code

from torch_cascade.kernels.merge import merge_torch
from torch_cascade.kernels.reference import attend_reference, merge_reference

INF = math.inf
State = tuple[torch.Tensor, torch.Tensor]


def assert_same(actual: State, expected: State, parts: list[State]) -> None:
    """Both are the merge of the parts, up to the rounding that merging in float32 makes."""
    reference = merge_reference(*zip(*parts, strict=True))
    for a, e, r in zip(actual, expected, reference, strict=True):
        assert_close_to_reference(a, e, r)
        assert_close_to_reference(e, a, r)


# Log-sum-exps of every magnitude, and none at all.
LSE = st.one_of(
    st.just(-INF),
    st.floats(-5, 5, width=32),
    st.floats(-(2.0**17), 2.0**17, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
)
OUT = st.floats(-100, 100, width=32)


@st.composite
def states(draw, parts: int):
    """Partial states of 3 rows with 2 features; a row without keys has o = 0."""
    found = []
    for _ in range(parts):
        lse = torch.tensor(draw(st.lists(LSE, min_size=3, max_size=3)))
        o = torch.tensor(draw(st.lists(OUT, min_size=6, max_size=6))).view(3, 2)
        found.append((torch.where(lse[:, None] == -INF, 0.0, o), lse))
    return found


def merged(parts: list[State]) -> State:
    return merge_torch([o for o, _ in parts], [lse for _, lse in parts])


def plain(parts: list[State]) -> State:
    """The merge in straightforward float32 code."""
    o, lse = zip(*parts, strict=True)
    return merge_reference(o, lse, dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(states(3))
def test_equals_the_oracle(parts):
    assert_same(merged(parts), plain(parts), parts)


@settings(max_examples=30, deadline=None)
@given(states(1))
def test_one_part_is_itself(parts):
    ((o, lse),) = parts
    result = merged(parts)
    assert torch.equal(result[0], o)
    assert torch.equal(result[1], lse)


@settings(max_examples=30, deadline=None)
@given(states(2), st.booleans())
def test_the_identity(parts, first):
    o, lse = parts[0]
    empty = (torch.full_like(o, math.nan), torch.full_like(lse, -INF))
    result = merged([empty, parts[0]] if first else [parts[0], empty])
    assert torch.equal(result[0], o)
    assert torch.equal(result[1], lse)


@settings(max_examples=30, deadline=None)
@given(states(3))
def test_commutative(parts):
    for order in itertools.permutations(parts):
        assert_same(merged(list(order)), plain(parts), parts)


@settings(max_examples=30, deadline=None)
@given(states(4))
def test_associative(parts):
    a, b, c, d = parts
    for nested in (
        merged([merged([a, b]), merged([c, d])]),
        merged([merged([merged([a, b]), c]), d]),
        merged([a, merged([b, merged([c, d])])]),
    ):
        assert_same(nested, merged(parts), parts)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 17), min_size=1, max_size=4),
    factor=st.sampled_from([1.0, 20.0, 1000.0]),
    masked=st.booleans(),
)
def test_keys_split_anywhere_give_the_whole(cuts, factor, masked):
    """Pieces may be empty; a needle at each end is seen by whoever may see it."""
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 6, 5, 8) * factor, torch.randn(2, 2, 17, 8), torch.randn(2, 2, 17, 8)
    for end in (0, -1):
        k[:, :, end] = 4 * torch.nn.functional.normalize(q[:, ::3, end], dim=-1)
        v[:, :, end] = 10.0
    mask = torch.rand(2, 1, 5, 17) > 0.5 if masked else torch.ones(2, 1, 5, 17, dtype=torch.bool)
    bounds = [0, *sorted(cuts), 17]
    pieces = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    parts = [
        attend_reference(q, k[:, :, s], v[:, :, s], mask[..., s], dtype=torch.float32)
        for s in pieces
    ]
    whole = attend_reference(q, k, v, mask)
    eager = attend_reference(q, k, v, mask, dtype=torch.float32)
    o, lse = merged(parts)
    assert_close_to_reference(o, eager[0], whole[0], merged_lse=whole[1])
    assert_close_to_reference(lse, eager[1], whole[1])


# --- infinities -----------------------------------------------------------------------------------


def row(*lses: float) -> State:
    """Merge of parts with o = 1, 2, 3, ... and the given lse."""
    o = [torch.tensor([[float(i)]]) for i in range(1, len(lses) + 1)]
    out, lse = merge_torch(o, [torch.tensor([x]) for x in lses])
    return out.item(), lse.item()


def test_no_part_saw_a_key():
    assert row(-INF) == (0.0, -INF)
    assert row(-INF, -INF, -INF) == (0.0, -INF)


def test_overflow_outweighs_everything_finite():
    assert row(INF) == (1.0, INF)
    assert row(3.0, INF) == (2.0, INF)
    assert row(INF, -INF) == (1.0, INF)
    assert row(INF, 0.0, INF) == (2.0, INF)  # the mean of 1 and 3


def test_a_nan_is_not_hidden():
    assert all(math.isnan(x) for x in row(math.nan, 0.0))
    assert all(math.isnan(x) for x in row(INF, math.nan))


def test_magnitudes_no_exponential_survives():
    assert row(1e5, 1e5) == (1.5, pytest.approx(1e5 + math.log(2)))
    assert row(-1e5, -1e5) == (1.5, pytest.approx(-1e5 + math.log(2)))
    assert row(-99998.6, -INF) == (1.0, pytest.approx(-99998.6))
    assert row(3e38, -3e38) == (1.0, pytest.approx(3e38))


# --- form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contiguous_in_the_dtype_of_the_parts(dtype):
    o = [torch.randn(2, 5, 3, 4, dtype=dtype).transpose(1, 2) for _ in range(2)]
    lse = [torch.randn(2, 5, 3, dtype=dtype).transpose(1, 2) for _ in range(2)]
    out, total = merge_torch(o, lse)
    assert (out.dtype, total.dtype) == (dtype, dtype)
    assert out.stride() == torch.empty(out.shape).stride()
    assert total.stride() == torch.empty(total.shape).stride()


@pytest.mark.parametrize("parts", [1, 2])
def test_results_are_nobody_elses_memory(parts):
    o, lse = [torch.randn(2, 4) for _ in range(parts)], [torch.randn(2) for _ in range(parts)]
    before = [x.clone() for x in (*o, *lse)]
    for result in merge_torch(o, lse):
        result.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip((*o, *lse), before, strict=True))


def test_all_parts_fuse_into_one_kernel():
    o = [torch.randn(3, 4, 5, 16) for _ in range(3)]
    lse = [torch.randn(3, 4, 5) for _ in range(3)]
    compiled = torch.compile(merge_torch, fullgraph=True)
    out, (code,) = run_and_get_code(compiled, o, lse)
    assert len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE)) == 1
    assert code.count("empty_strided_cpu((3, 4, 5, 16)") == 1
    reference = merge_reference(o, lse)
    for actual, e, r in zip(out, merge_torch(o, lse), reference, strict=True):
        assert_close_to_reference(actual, e, r)

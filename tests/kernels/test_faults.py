"""Faults that other projects shipped, each on the small input that shows it.

The names are those of the public reports (repository and number). Every case runs the ops as a
user would and is judged by the float64 oracle.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from support.attend_cases import assert_attends, plant_needles
from support.tolerance import assert_close_to_reference, max_error

from torch_cascade.kernels import ops
from torch_cascade.kernels.reference import (
    attend_reference,
    merge_reference,
    sdpa_reference,
)

INF = math.inf


def report(*names: str):
    """Tags a test with the reports it is about, as its parameter id."""
    return pytest.mark.parametrize("_report", [None], ids=[", ".join(names)])


def cascade(q, segments, masks=(None, None), *, branches=1, **options):
    """Attention over segments [(k, v), ...], the first one shared by `branches` rows, merged."""
    shared = [branches, *[1] * (len(segments) - 1)]
    parts = [
        ops.attend(q, k, v, mask, branches=t, **options)
        for (k, v), mask, t in zip(segments, masks, shared, strict=True)
    ]
    return ops.merge([o for o, _ in parts], [lse for _, lse in parts])


def whole(q, segments, masks=(None, None), *, branches=1, dtype=torch.float64, **options):
    """The same attention over the expanded and concatenated keys, in one piece."""
    n = q.size(0)
    (k, v), *rest = segments
    ks = [k.repeat_interleave(branches, 0), *(k for k, _ in rest)]
    vs = [v.repeat_interleave(branches, 0), *(v for _, v in rest)]
    parts = [
        torch.ones(1, 1, 1, k.size(2), dtype=torch.bool) if mask is None else mask
        for k, mask in zip(ks, masks, strict=True)
    ]
    full = [p.expand(n, q.size(1), q.size(2), k.size(2)) for p, k in zip(parts, ks, strict=True)]
    mask = torch.cat(full, -1)
    return attend_reference(q, torch.cat(ks, 2), torch.cat(vs, 2), mask, dtype=dtype, **options)


def assert_exact(q, segments, masks=(None, None), **options):
    """The cascade equals the whole."""
    result = cascade(q, segments, masks, **options)
    wanted = whole(q, segments, masks, **options)
    eager = whole(q, segments, masks, dtype=torch.float32, **options)
    assert_close_to_reference(result[0], eager[0], wanted[0], merged_lse=wanted[1])
    assert_close_to_reference(result[1], eager[1], wanted[1])
    return result


def problem(n, topk, hq, hkv, m, prefix, suffix, d, dtype=torch.float32, dv=None):
    """Queries, a prefix of n / topk rows and a suffix of n rows, each with a needle at its end."""
    dv = dv or d
    q = torch.randn(n, hq, m, d)
    shared = torch.randn(n // topk, hkv, prefix, d), torch.randn(n // topk, hkv, prefix, dv)
    own = torch.randn(n, hkv, suffix, d), torch.randn(n, hkv, suffix, dv)
    plant_needles(q, *shared, topk)
    plant_needles(q, *own)
    return q.to(dtype), [tuple(x.to(dtype) for x in pair) for pair in (shared, own)]


# --- empty and masked -----------------------------------------------------------------------------


@report("flashinfer-4051", "flashinfer-5262")
def test_merge_of_empty_states(_report):
    o, lse = ops.merge([torch.zeros(1, 1, 64)] * 2, [torch.full((1, 1), -INF)] * 2)
    assert torch.equal(o, torch.zeros(1, 1, 64))
    assert torch.equal(lse, torch.full((1, 1), -INF))


@report("vllm-28181", "flashinfer-440")
def test_prefix_and_suffix_empty(_report):
    """Prefix lengths [0, 16] by a mask; the suffix of row 0 is hidden, too."""
    q, segments = problem(4, 2, 6, 2, 3, 16, 5, 32)
    prefix = torch.arange(16) < torch.tensor([0, 0, 16, 16])[:, None, None, None]
    suffix = torch.ones(4, 1, 3, 5, dtype=torch.bool)
    suffix[0] = False
    o, lse = assert_exact(q, segments, (prefix, suffix), branches=2)
    assert (o[0] == 0).all()
    assert (lse[0] == -INF).all()


@report("vllm-39148")
@pytest.mark.parametrize("d", [64, 96, 128])
def test_infinite_lse(_report, d):
    o = [torch.randn(32, 8, d) for _ in range(2)]
    lse = [torch.randn(32, 8) for _ in range(2)]
    empty, overflow = torch.rand(32, 8) < 0.25, torch.rand(32, 8) < 0.1
    for part in lse:
        part[empty] = -INF
    lse[0][overflow & ~empty] = INF
    out, total = ops.merge(o, lse)
    assert torch.isfinite(out).all()
    assert not total.isnan().any()
    assert (out[empty] == 0).all()
    assert (total[empty] == -INF).all()
    assert torch.equal(out[overflow & ~empty], o[0][overflow & ~empty])


@report("flash-attention-978")
def test_a_row_without_keys_has_minus_infinity(_report):
    """FA2 gave +inf, which outweighs everything in a merge."""
    q, segments = problem(2, 1, 8, 8, 2, 17, 3, 64, torch.bfloat16)
    mask = torch.arange(17) < torch.tensor([0, 17])[:, None, None, None]
    _, lse = ops.attend(q, *segments[0], mask)
    assert (lse[0] == -INF).all()
    assert torch.isfinite(lse[1]).all()
    assert_exact(q, segments, (mask, None))


@report("flashinfer-4267", "flashinfer-4401", "flashinfer-4450")
def test_no_finite_number_stands_for_minus_infinity(_report):
    """All scores are near -1e5: below the sentinel -5e4 that other kernels start from."""
    q, k, v = (
        -torch.ones(1, 1, 1, 16),
        torch.full((1, 1, 4, 16), 1e5 / 16),
        torch.randn(1, 1, 4, 16),
    )
    for softcap in (None, 1e6):
        options = {"scale": 1.0, "softcap": softcap}
        o, lse = ops.attend(q, k, v, **options)
        assert_attends((o, lse), (q, k, v), options)
        assert lse.item() < -99_000
        merged, _ = ops.merge([o, torch.zeros_like(o)], [lse, torch.full_like(lse, -INF)])
        assert torch.equal(merged, o)


@report("pytorch-134650")
def test_a_masked_row_leaves_the_other_part_alone(_report):
    q, segments = problem(3, 3, 4, 2, 2, 9, 5, 16)
    mask = torch.tensor([False, True])[:, None].expand(2, 9)
    parts = [ops.attend(q, *segments[0], mask, branches=3), ops.attend(q, *segments[1])]
    o, lse = ops.merge(*zip(*parts, strict=True))
    assert (parts[0][1][:, :, 0] == -INF).all()
    assert torch.equal(o[:, :, 0], parts[1][0][:, :, 0])
    assert torch.equal(lse[:, :, 0], parts[1][1][:, :, 0])


@report("pytorch-103963", "pytorch-103749", "pytorch-110213")
@pytest.mark.parametrize("dv", [16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_see_nothing(_report, dtype, dv):
    q, k, v = (torch.randn(1, 2, 8, d).to(dtype) for d in (16, 16, dv))
    visible = (torch.arange(8) < 4)[:, None].expand(8, 8)[None, None]
    fill = torch.zeros(1, 1, 8, 8, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    args = (q, k, v, visible)
    o, lse = ops.attend(*args)
    assert_attends((o, lse), args, {})
    assert (o[:, :, 4:] == 0).all()
    # A fill with finfo.min hides nothing: scores drown in it and the row is a mean.
    o, lse = ops.attend(q, k, v, fill)
    assert_attends((o, lse), (q, k, v, fill), {})
    assert torch.isfinite(lse).all()
    for mask in (visible, fill):
        assert torch.equal(ops.sdpa(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))


@report("flash-attention-1537")
def test_single_queries_with_zero_length_sequences(_report):
    q, segments = problem(4, 1, 9, 3, 1, 1, 2, 64, torch.bfloat16)
    mask = (torch.tensor([0, 1, 0, 1]) > 0)[:, None, None, None]
    _, lse = ops.attend(q, *segments[0], mask)
    assert (lse[0::2] == -INF).all()
    assert_exact(q, segments, (mask, None))


# --- base and layout of the log-sum-exp -----------------------------------------------------------


@report("flashinfer-2113", "pytorch-181645", "attention-gym-205")
@pytest.mark.parametrize("dv", [16, 24])
def test_the_lse_is_natural(_report, dv):
    q, k, v = (torch.randn(1, 4, 16, d) for d in (64, 64, dv))
    _, lse = ops.attend(q, k, v)
    expected = torch.logsumexp(q.double() @ k.double().transpose(-1, -2) / 8, -1)
    assert (lse / expected).sub(1).abs().max() < 1e-4


@report("sglang-35045")
def test_the_base_matters_here(_report):
    """With a prefix of 4, the error of a wrong base shows; with 4,096 it hides."""
    q, segments = problem(4, 4, 4, 4, 2, 4, 5, 16)
    assert_exact(q, segments, branches=4)
    (o1, lse1), (o2, lse2) = (
        ops.attend(q, *segments[0], branches=4),
        ops.attend(q, *segments[1]),
    )
    log2e = 1 / math.log(2)
    wrong, _ = ops.merge([o1, o2], [lse1 * log2e, lse2 * log2e])
    assert max_error(wrong, whole(q, segments, branches=4)[0]) > 0.05


@report("vllm-22003", "vllm-xpu-kernels-479")
@pytest.mark.parametrize("heads, queries", [(4, 3), (8, 8)])
def test_lse_given_as_a_transposed_view(_report, heads, queries):
    """The kernel's own lse is such a view; a square one has no shape to betray a mistake."""
    o = [torch.randn(2, heads, queries, 16) for _ in range(2)]
    lse = [torch.randn(2, queries, heads).transpose(1, 2) for _ in range(2)]
    assert not lse[0].is_contiguous()
    dense = ops.merge(o, [x.contiguous() for x in lse])
    for actual, expected in zip(ops.merge(o, lse), dense, strict=True):
        assert torch.equal(actual, expected)
    assert_close_to_reference(dense[0], dense[0], merge_reference(o, lse)[0])
    raw = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(o[0], o[1], o[1])[1]
    assert not raw.is_contiguous()
    assert ops.attend(o[0], o[1], o[1])[1].is_contiguous()


@report("local-inference-lab-vllm-468")
def test_a_running_merge_overwrites_nothing(_report):
    """Three chunks into one running state, at a head size that no 128-wide block divides."""
    q, k, v = torch.randn(2, 3, 5, 192), torch.randn(2, 3, 21, 192), torch.randn(2, 3, 21, 192)
    parts = [ops.attend(q, k[:, :, s], v[:, :, s]) for s in map(slice, (0, 8, 13), (8, 13, 21))]
    kept = [tuple(x.clone() for x in part) for part in parts]
    running = parts[0]
    for part in parts[1:]:
        running = ops.merge([running[0], part[0]], [running[1], part[1]])
    reference, eager = (attend_reference(q, k, v, dtype=t) for t in (torch.float64, torch.float32))
    assert_close_to_reference(running[0], eager[0], reference[0])
    assert_close_to_reference(running[1], eager[1], reference[1])
    for part, before in zip(parts, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(part, before, strict=True))


@report("flashinfer cascade.py merge_state_in_place")
def test_no_silent_copy_of_another_dtype(_report):
    """Three levels in float64; mixed dtypes are refused, not converted."""
    parts = [(torch.randn(3, 4).double(), torch.randn(3).double()) for _ in range(3)]
    (a, la), (b, lb), (c, lc) = parts
    ab, lab = ops.merge([a, b], [la, lb])
    o, lse = ops.merge([ab, c], [lab, lc])
    expected = merge_reference([a, b, c], [la, lb, lc])
    torch.testing.assert_close((o, lse), expected, atol=1e-14, rtol=1e-14)
    with pytest.raises(TypeError, match="lse\\[1\\]"):
        ops.merge([ab, c], [lab, lc.float()])


# --- sizes no kernel expected ---------------------------------------------------------------------


@report("flashinfer-761")
@pytest.mark.parametrize("dk, dv", [(192, 128), (576, 512)])
def test_value_size_differs(_report, dk, dv):
    q, segments = problem(4, 2, 4, 1, 1, 6, 5, dk, dv=dv)
    assert_exact(q, segments, branches=2)


@report("pytorch-164931")
@pytest.mark.parametrize("d", [72, 80, 96, 160])
def test_head_sizes(_report, d):
    q, segments = problem(3, 3, 6, 2, 2, 7, 5, d)
    assert_exact(q, segments, branches=3)


@report("pytorch-151359", "pytorch-143117")
@pytest.mark.parametrize("hq, hkv", [(12, 2), (9, 3), (7, 1)])
def test_group_ratios(_report, hq, hkv):
    q, segments = problem(2, 2, hq, hkv, 1, 33, 4, 16)
    assert_exact(q, segments, branches=2)


@report("pytorch-185349")
@pytest.mark.parametrize(
    "topk, m, group", [(2, 50, 1), (1, 127, 1), (4, 16, 2), (3, 43, 1), (5, 20, 2)]
)
def test_packed_rows_round_no_tile(_report, topk, m, group):
    """100, 127, 128, 129 and 200 packed rows."""
    q, segments = problem(topk, topk, 2 * group, 2, m, 9, 5, 16)
    assert_exact(q, segments, branches=topk)


@report("pytorch-133717", "pytorch-133716")
@pytest.mark.parametrize("extra", range(6))
def test_prefix_lengths_no_block_divides(_report, extra):
    q, segments = problem(2, 2, 16, 16, 1, 128 + extra, 3, 64, torch.float16)
    assert_exact(q, segments, branches=2)


@report("Hydragen combine kernel")
@pytest.mark.parametrize("d", [32, 80, 96, 160])
def test_no_row_spills_into_the_next(_report, d):
    """40 rows with outputs a power of ten apart, in head sizes that 64 does not divide."""
    o = [torch.randn(40, d) * 10.0 ** torch.arange(40).remainder(7)[:, None] for _ in range(2)]
    lse = [torch.randn(40) for _ in range(2)]
    out, _ = ops.merge(o, lse)
    reference, eager = (merge_reference(o, lse, dtype=t)[0] for t in (torch.float64, torch.float32))
    for row in range(40):
        assert_close_to_reference(out[row], eager[row], reference[row])


@report("exllamav3-316")
def test_deterministic(_report):
    q, segments = problem(4, 4, 6, 2, 3, 50, 7, 72, torch.float16)
    first = cascade(q, segments, branches=4)
    for _ in range(3):
        again = cascade(q, segments, branches=4)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


# --- who sees what --------------------------------------------------------------------------------


@report("vllm-11635")
def test_a_prefix_that_overlaps_the_queries(_report):
    """The prefix holds two of the three queries' own tokens: positions must hide the later ones."""
    keys, m = 6, 3
    q, k, v = torch.randn(1, 4, m, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
    plant_needles(q, k, v)
    positions = torch.arange(keys - m, keys)
    parts = [
        ops.attend(q, k[:, :, a:b], v[:, :, a:b], q_positions=positions, kv_start=a)
        for a, b in ((0, 5), (5, 6))
    ]
    o, lse = ops.merge(*zip(*parts, strict=True))
    causal = torch.arange(keys) <= positions[:, None]
    reference, eager = (
        attend_reference(q, k, v, causal, dtype=t) for t in (torch.float64, torch.float32)
    )
    assert_close_to_reference(o, eager[0], reference[0])
    assert_close_to_reference(lse, eager[1], reference[1])
    leaking = ops.attend(q, k[:, :, :5], v[:, :, :5])
    both = ops.merge([leaking[0], parts[1][0]], [leaking[1], parts[1][1]])[0]
    assert max_error(both, reference[0]) > 0.01


@report("pytorch-108108", "pytorch-103082", "flash-attention-1778")
@pytest.mark.parametrize("m, keys", [(3, 5), (1, 5), (5, 3)])
def test_causal_is_top_left_in_sdpa_and_by_position_in_attend(_report, m, keys):
    q, k, v = torch.randn(1, 2, m, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
    plant_needles(q, k, v)
    eager = sdpa_reference(q, k, v, None, True, dtype=torch.float32)
    top_left = sdpa_reference(q, k, v, None, True)
    assert_close_to_reference(ops.sdpa(q, k, v, None, True), eager, top_left)
    by_position = ops.attend(q, k, v, q_positions=torch.arange(m))
    assert_close_to_reference(by_position[0], eager, top_left)
    args, options = (q, k, v), {"q_positions": torch.arange(m) + keys - m}
    assert_attends(ops.attend(*args, **options), args, options)


def ancestors(parents):
    """Tree mask: each node sees itself and its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@report("FastDeploy-3514")
@pytest.mark.parametrize(
    "parents",
    [[-1, 0, 0, 1], [-1, *range(29), *range(100)]],
    ids=["four-nodes", "siblings-100-apart"],
)
def test_tree_siblings_do_not_leak(_report, parents):
    nodes = len(parents)
    tree = ancestors(parents)
    q, segments = problem(1, 1, 2, 1, nodes, 6, nodes, 16)
    k, v = segments[1]
    forbidden = 1  # a node that some later node does not descend from, with a needle for all
    k[:, :, forbidden] = 4 * F.normalize(q.mean((1, 2)), dim=-1)[:, None]
    v[:, :, forbidden] = 100.0
    assert not tree.tril().equal(torch.ones_like(tree).tril())
    o, _ = assert_exact(q, segments, (None, tree[None, None]))
    causal = cascade(q, segments, (None, torch.ones_like(tree).tril()[None, None]))[0]
    assert max_error(causal, o.double()) > 1.0


@report("flashinfer-1028")
def test_no_mask_is_remembered(_report):
    q, segments = problem(1, 1, 2, 1, 4, 6, 4, 16)
    plain = cascade(q, segments)
    cascade(q, segments, (None, ancestors([-1, 0, 0, 1])[None, None]))
    assert all(torch.equal(a, b) for a, b in zip(cascade(q, segments), plain, strict=True))


@report("flashinfer soft-cap on one side")
def test_softcap_applies_to_every_segment(_report):
    q, segments = problem(3, 3, 4, 2, 2, 6, 5, 16)
    assert_exact(q * 8, segments, branches=3, softcap=2.0)
    one_side = [
        ops.attend(q * 8, *segments[0], branches=3, softcap=2.0),
        ops.attend(q * 8, *segments[1]),
    ]
    o, _ = ops.merge(*zip(*one_side, strict=True))
    assert max_error(o, whole(q * 8, segments, branches=3, softcap=2.0)[0]) > 1.0


@report("vllm-17276", "pytorch-155792")
def test_nine_branches_of_one_request_with_a_mask_each(_report):
    q, segments = problem(9, 9, 4, 2, 2, 7, 5, 16)
    masks = torch.rand(9, 1, 2, 7) > 0.3, torch.rand(9, 4, 1, 5) > 0.3
    assert_exact(q, segments, masks, branches=9)
    bias = torch.randn(1, 1, 1, 7), torch.randn(9, 1, 2, 5)
    parts = [
        ops.attend(q, *segments[0], bias[0], branches=9),
        ops.attend(q, *segments[1], bias[1]),
    ]
    for part, (k, v), b, t in zip(parts, segments, bias, (9, 1), strict=True):
        assert_attends(part, (q, k, v, b), {"branches": t})


# --- numerics -------------------------------------------------------------------------------------


@report("unstabilised exponentials")
@pytest.mark.parametrize("factor", [4.0, 200.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits(_report, factor, dtype):
    """|lse| from 10 to beyond 1e4: no exponential of it fits float32."""
    q, segments = problem(4, 2, 6, 2, 3, 9, 7, 16)
    q = (q * factor).to(dtype)
    segments = [tuple(x.to(dtype) for x in pair) for pair in segments]
    _, lse = assert_exact(q, segments, branches=2)
    assert lse.abs().max() > (88 if factor > 100 else 10)


@report("rounded partials")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_partials_of_low_precision_inputs_are_float32(_report, dtype):
    """A partial rounded to the input dtype would show: the bound is a few eps of float32."""
    q, segments = problem(4, 2, 6, 2, 3, 9, 7, 16, dtype)
    o, lse = assert_exact(q, segments, branches=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = cascade(q, segments, branches=2)
    assert all(torch.equal(a, b) for a, b in zip(again, (o, lse), strict=True))
    assert (o.dtype, lse.dtype) == (torch.float32, torch.float32)


@report("a whole split anywhere")
def test_several_levels(_report):
    """Four levels with 8, 4, 2 and 1 rows each: the merge does not care how deep the tree is."""
    q = torch.randn(8, 4, 2, 16)
    levels = [
        (torch.randn(rows, 2, keys, 16), torch.randn(rows, 2, keys, 16))
        for rows, keys in ((1, 11), (2, 3), (4, 5), (8, 2))
    ]
    for k, v in levels:
        plant_needles(q, k, v, 8 // k.size(0))
    parts = [ops.attend(q, k, v, branches=8 // k.size(0)) for k, v in levels]
    k, v = (
        torch.cat([x[i].repeat_interleave(8 // x[i].size(0), 0) for x in levels], 2) for i in (0, 1)
    )
    reference, eager = (attend_reference(q, k, v, dtype=t) for t in (torch.float64, torch.float32))
    for order in itertools.permutations(parts):
        o, lse = ops.merge(*zip(*order, strict=True))
        assert_close_to_reference(o, eager[0], reference[0])
        assert_close_to_reference(lse, eager[1], reference[1])

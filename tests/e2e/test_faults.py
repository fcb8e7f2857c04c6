"""Public faults of cascade attention elsewhere: the small input of each, through our product.

Every test is named after the report it comes from. Faults of one kernel alone are tested with the
kernels; here the whole pipeline runs, from `torch.compile` to the numbers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.bias
import torch.nn.functional as F
from support.promises import (
    attend_shared,
    check,
    check_call,
    compiled,
    declined,
    shared_inputs,
    tally,
)
from torch import Tensor

# Empty and fully masked parts.


def test_vllm_28181_prefix_and_suffix_both_empty_for_a_branch():
    visible = torch.ones(4, 1, 5, 16 + 4, dtype=torch.bool)
    visible[:2, :, :, :16] = False  # request 0 has no prefix
    visible[0, :, :, 16:] = False  # and its first branch no suffix
    check(attend_shared, *shared_inputs(branches=2, prefix=16), visible)


def test_pytorch_134650_a_masked_suffix_leaves_the_prefix_exactly():
    q, kp, ks, vp, vs = shared_inputs()
    visible = torch.cat([torch.ones(1, 7), torch.zeros(1, 4)], 1).bool()
    out = compiled(attend_shared)(q, kp, ks, vp, vs, visible)
    prefix_only = F.scaled_dot_product_attention(
        q.double(), *(x.double().repeat_interleave(3, 0) for x in (kp, vp))
    )
    torch.testing.assert_close(out.double(), prefix_only, rtol=1e-5, atol=1e-5)
    check(attend_shared, q, kp, ks, vp, vs, visible)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_flashinfer_440_no_prefix_yet(prefix):
    check(attend_shared, *shared_inputs(prefix=prefix), rewritten=None)


@pytest.mark.parametrize("suffix", [0, 1])
def test_vllm_cascade_empty_second_kernel(suffix):
    check(attend_shared, *shared_inputs(suffix=suffix))


def test_pytorch_103963_rows_that_see_nothing():
    visible = torch.ones(1, 1, 5, 11, dtype=torch.bool)
    visible[:, :, 3:] = False
    check(attend_shared, *shared_inputs(), visible)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorch_110213_rows_filled_with_the_smallest_number(dtype):
    """Not zero and not NaN: a row hidden by a finite number is the mean of all its values."""
    inputs = shared_inputs(dtype=dtype)
    bias = torch.zeros(1, 1, 5, 11, dtype=dtype)
    bias[..., 7:] = torch.finfo(dtype).min
    bias[:, :, 2] = torch.finfo(dtype).min
    check(attend_shared, *inputs, bias, rewritten=None)


def test_flash_attention_1537_one_query_and_empty_prefixes_under_gqa():
    visible = torch.ones(4, 1, 1, 7 + 4, dtype=torch.bool)
    visible[0:2, ..., :7] = False
    inputs = shared_inputs(branches=2, heads=9, kv_heads=3, queries=1, d=64, dtype=torch.bfloat16)
    check(attend_shared_gqa, *inputs, visible)


def attend_shared_gqa(q, kp, ks, vp, vs, mask=None):
    return attend_shared(q, kp, ks, vp, vs, mask, enable_gqa=True)


# Scores out of the ordinary.


@pytest.mark.parametrize("factor", [50.0, 200.0])
def test_large_scores_neither_overflow_nor_vanish(factor):
    """exp(lse) overflows float32 at 88; a sentinel of -5e4 for -inf loses every key (4267)."""
    q, *kv = shared_inputs()
    check(attend_shared, q * factor, *kv)


def test_flashinfer_4267_scores_below_every_sentinel():
    """All scores are -1e5: the mean of all values, up to what float32 can say of an lse of -1e5."""
    q = -torch.ones(6, 2, 3, 16)
    kp, ks = torch.full((2, 2, 5, 16), 1e5 / 16), torch.full((6, 2, 4, 16), 1e5 / 16)
    vp, vs = torch.randn(2, 2, 5, 16), torch.randn(6, 2, 4, 16)
    out = compiled(lambda *x: attend_shared(*x, scale=1.0))(q, kp, ks, vp, vs)
    mean = torch.cat([vp.repeat_interleave(3, 0), vs], 2).mean(2, keepdim=True)
    bound = (
        torch.finfo(torch.float32).eps * 1e5 * torch.cat([vp.flatten(), vs.flatten()]).abs().max()
    )
    assert (out - mean).abs().max() <= bound
    assert tally()["rewritten"] == 1


def test_sglang_35045_lse_base():
    """Base 2 against base e on one side is an error of 0.15 where the parts are as long."""
    check(attend_shared, *shared_inputs(prefix=4, suffix=5, d=16))


def test_vllm_22103_bfloat16_long_prefix_large_scores():
    q, *kv = shared_inputs(prefix=2048, suffix=3, d=64, dtype=torch.bfloat16)
    check(attend_shared, q * 8, *kv)


# Shapes of heads and features.


@pytest.mark.parametrize(("d", "dv"), [(192, 128), (576, 512), (8, 20)])
def test_flashinfer_761_values_of_another_width(d, dv):
    check(attend_shared, *shared_inputs(d=d, dv=dv, queries=2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (9, 3), (7, 1)])
def test_pytorch_151359_group_ratios(heads, kv_heads):
    check(attend_shared_gqa, *shared_inputs(heads=heads, kv_heads=kv_heads, queries=1))


@pytest.mark.parametrize("d", [72, 80, 96, 100, 160])
def test_pytorch_164931_head_dims(d):
    check(attend_shared, *shared_inputs(d=d, queries=2))


@pytest.mark.parametrize(("branches", "queries"), [(25, 2), (127, 1), (16, 4), (43, 3)])
def test_pytorch_185349_packed_rows(branches, queries):
    """Packed rows branches * queries * group: 100, 127, 128, 129."""
    inputs = shared_inputs(1, branches, 4, 2 if branches != 127 else 4, queries)
    check(attend_shared_gqa, *inputs)


def test_pytorch_133717_prefix_lengths_that_no_block_divides():
    run = compiled(attend_shared, dynamic=True)
    for extra in range(3):
        inputs = shared_inputs(prefix=128 + extra, heads=4, d=32, dtype=torch.float16)
        check_call(run, attend_shared, *inputs)
    assert tally()["rewritten"] == 1


def test_exllamav3_316_the_same_bits_every_time():
    run, inputs = compiled(attend_shared), shared_inputs(d=72, dtype=torch.float16)
    first = run(*inputs)
    assert all(torch.equal(first, run(*inputs)) for _ in range(3))


# Masks, trees, windows.


def causal(m: int, keys: int) -> Tensor:
    """Bottom-right: the last query sees the last key."""
    return torch.arange(keys)[None, :] <= torch.arange(m)[:, None] + (keys - m)


def test_vllm_11635_queries_inside_the_prefix():
    """Three queries of which two stand inside the prefix: it is not visible to all of them."""

    def fn(q, kp, ks, vp, vs):
        return attend_shared(q, kp, ks, vp, vs, causal(3, kp.shape[2] + ks.shape[2]))

    check(fn, *shared_inputs(queries=3, prefix=6, suffix=1))


@pytest.mark.parametrize(("queries", "suffix"), [(3, 5), (1, 4), (5, 2)])
def test_pytorch_108108_is_causal_is_top_left(queries, suffix):
    def fn(q, kp, ks, vp, vs):
        return attend_shared(q, kp, ks, vp, vs, is_causal=True)

    check(fn, *shared_inputs(queries=queries, suffix=suffix))


def test_pytorch_144858_causal_lower_right():
    bias = torch.nn.attention.bias.causal_lower_right(5, 11)

    def fn(q, kp, ks, vp, vs):
        return attend_shared(q, kp, ks, vp, vs, bias)

    check(fn, *shared_inputs())


def tree(parents: list[int]) -> Tensor:
    """Ancestors of each token, itself included."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


@pytest.mark.parametrize("parents", [[-1, 0, 0, 1], [-1, *range(29), *range(20), *[0] * 80]])
def test_fastdeploy_3514_siblings_do_not_leak(parents):
    """The suffix is a token tree; a needle in a sibling must not be seen."""
    size = len(parents)
    mask = torch.cat([torch.ones(size, 7, dtype=torch.bool), tree(parents)], 1)
    check(attend_shared, *shared_inputs(queries=size, suffix=size), mask)


def test_flashinfer_1028_no_mask_after_a_tree_mask():
    run, inputs = compiled(attend_shared), shared_inputs(queries=4)
    mask = torch.cat([torch.ones(4, 7, dtype=torch.bool), tree([-1, 0, 0, 1])], 1)
    for given in (mask, None, mask.flip(0)):
        check_call(run, attend_shared, *inputs, given)


def test_sglang_24617_full_and_windowed_layers_in_one_graph():
    def fn(q, kp, ks, vp, vs):
        keys = kp.shape[2] + ks.shape[2]
        distance = torch.arange(q.shape[2])[:, None] + (keys - q.shape[2]) - torch.arange(keys)
        full, windowed = distance >= 0, (distance >= 0) & (distance < 8)
        for mask in (full, windowed, full, windowed):
            q = attend_shared(q, kp, ks, vp, vs, mask)
        return q

    check(fn, *shared_inputs(branches=8), rewritten=4)


def test_alibi_positions_are_global():
    def fn(q, kp, ks, vp, vs):
        keys = kp.shape[2] + ks.shape[2]
        distance = torch.arange(keys) - torch.arange(q.shape[2])[:, None] - (keys - q.shape[2])
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
        bias = (slopes * distance).masked_fill(distance > 0, float("-inf"))
        return attend_shared(q, kp, ks, vp, vs, bias[None].to(q.dtype))

    check(fn, *shared_inputs(heads=4))


def test_transformers_41249_sink_logits():
    """gpt-oss: a logit a head that takes weight and gives no value."""

    def fn(q, kp, ks, vp, vs, sinks):
        k = torch.cat([kp.repeat_interleave(3, 0), ks], 2)
        v = torch.cat([vp.repeat_interleave(3, 0), vs], 2)
        scores = q @ k.transpose(2, 3) * 0.25
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1] @ v

    check(fn, *shared_inputs(), torch.randn(1, 2, 1, 1))


def test_soft_cap_on_both_sides():
    def fn(q, kp, ks, vp, vs):
        k = torch.cat([kp.repeat_interleave(3, 0), ks], 2)
        v = torch.cat([vp.repeat_interleave(3, 0), vs], 2)
        scores = torch.tanh(q @ k.transpose(2, 3) * 0.25 / 2.0) * 2.0
        return scores.softmax(-1) @ v

    q, *kv = shared_inputs()
    check(fn, q * 8, *kv)


@pytest.mark.parametrize("shape", [(6, 1, 5, 11), (1, 1, 1, 11), (6, 2, 5, 11), (6, 1, 1, 11)])
def test_pytorch_155792_the_mask_is_not_forgotten(shape):
    check(attend_shared, *shared_inputs(), torch.randn(shape).mul(3))


# Batches, layouts, sizes that change.


def test_vllm_17276_one_request_of_nine_branches():
    check(attend_shared, *shared_inputs(1, 9))


def test_transformers_32179_cache_of_one_row_under_queries_of_many():
    q, kp, _, vp, _ = shared_inputs(1, 4)
    check(F.scaled_dot_product_attention, q, kp, vp, rewritten=None)


@pytest.mark.parametrize("prefix", [1, 7, 8])
def test_sglang_7725_each_branch_writes_its_own_tail(prefix):
    """The suffix lives in a static buffer of which five keys are written, each branch its own."""

    def fn(q, kp, ks, vp, vs, new, at):
        for step in range(5):
            ks.index_copy_(2, at + step, new[:, :, step : step + 1])
        mask = torch.arange(kp.shape[2] + 8) < kp.shape[2] + 5
        return attend_shared(q, kp, ks, vp, vs, mask[None, :].expand(q.shape[2], -1))

    inputs = shared_inputs(1, 8, prefix=prefix, suffix=8)
    check(fn, *inputs, torch.randn(8, 2, 5, 16), torch.tensor([0]))


def test_pytorch_130243_layouts_other_than_traced():
    q, kp, _, vp, vs = shared_inputs(1, 6, d=100)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide_k, wide_v = kp.expand(6, -1, -1, -1), vp.expand(6, -1, -1, -1)
    sliced = torch.randn(6, 2, 9, 100)[:, :, 2:-3]

    def fn(q, kp, ks, vp, vs):
        k, v = torch.cat([kp, ks], 2), torch.cat([vp, vs], 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    check(fn, q, wide_k, sliced, wide_v, vs)


def test_pytorch_186775_sizes_change_under_one_compile():
    run = compiled(attend_shared, dynamic=True)
    for branches, prefix in ((4, 64), (3, 64), (8, 65)):
        check_call(run, attend_shared, *shared_inputs(2, branches, prefix=prefix))
    assert tally()["rewritten"] == 1


def test_mini_sglang_60_a_growing_suffix_is_compiled_three_times():
    run = compiled(attend_shared, dynamic=None)
    for step in range(10):
        check_call(run, attend_shared, *shared_inputs(suffix=step + 1, queries=1))
    assert tally()["sites"] <= 3
    assert tally()["rewritten"] == tally()["sites"]


def test_tensorrt_llm_16929_it_engages_where_it_is_meant_to():
    check(attend_shared, *shared_inputs(4, 4, prefix=300, suffix=5), rewritten=1, decide="auto")


def test_vllm_12395_the_reason_is_told():
    check(attend_shared, *shared_inputs(3, 1), rewritten=0)
    assert declined() == {"no-shared-prefix"}


# Dtypes.


def test_lse_is_not_cast_under_autocast():
    def fn(q, kp, ks, vp, vs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend_shared(q, kp, ks, vp, vs)

    q, *kv = shared_inputs(prefix=40, suffix=30)
    run = compiled(fn)
    check_call(run, fn, q * 6, *kv, exact=attend_shared)
    assert run(q, *kv).dtype == torch.bfloat16


def test_pytorch_185539_float64():
    check(attend_shared, *shared_inputs(dtype=torch.float64), rewritten=None)

"""The whole pipeline with the GPU's kernels, interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.tolerance import assert_close_to_reference

pytest.importorskip("triton")

from support.lowering import fused_in_the_interpreter

B, T, H, G, P, S, M, D = 2, 3, 2, 2, 19, 17, 3, 16
N = B * T


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """q (in memory [n, m, h, d]), prefix K and V, suffix K and V, a needle in each part."""
    q = torch.randn(N, M, H * G, D).transpose(1, 2)
    prefix_k, prefix_v = torch.randn(B, H, P, D), torch.randn(B, H, P, D)
    suffix_k, suffix_v = torch.randn(N, H, S, D), torch.randn(N, H, S, D)
    prefix_k[:, :, -1], prefix_v[:, :, -1] = q[::T, ::G, 0], 10.0
    suffix_k[:, :, S // 2], suffix_v[:, :, S // 2] = q[:, ::G, 1], -10.0
    return [x.to(dtype) for x in (q, prefix_k, prefix_v, suffix_k, suffix_v)]


def attention(q, pk, pv, sk, sv, mask=None):
    k, v = (torch.cat([p.repeat_interleave(T, 0), s], 2) for p, s in ((pk, sk), (pv, sv)))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def causal(q, *kv):
    """By positions: the last query sees everything."""
    queries = torch.arange(M, device=q.device)[:, None] + P + S - M
    return attention(q, *kv, torch.arange(P + S, device=q.device) <= queries)


def biased(q, *kv):
    """A mask tensor with another value for each head and key, some keys hidden."""
    keys = torch.arange(P + S, device=q.device)
    bias = -0.1 * keys * torch.arange(1, H * G + 1, device=q.device)[:, None, None]
    return attention(q, *kv, bias.masked_fill(keys % 5 == 1, float("-inf")).to(q.dtype))


def levels(q, pk, pv, sk, sv):
    """One row for all, then the prefix of each request, then the suffix."""
    k, v = (
        torch.cat([p[:1].expand(N, -1, -1, -1), p.repeat_interleave(T, 0), s], 2)
        for p, s in ((pk, sk), (pv, sv))
    )
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def hidden(q, *kv):
    """A mask tensor of truth values that nothing is known of."""
    return attention(q, *kv, (kv[2][:, :1, :1, :1] > 0) | (torch.arange(P + S) % 3 > 0))


# (program, dtype, parts of each call of the kernels)
CASES = [
    (attention, torch.bfloat16, [2]),
    (causal, torch.float32, [2]),
    (hidden, torch.float16, [2]),
    (biased, torch.float16, [1, 1]),  # a huge finite bias is not ruled out: `emit_merge` corrects
    (levels, torch.float32, [3]),
]


@pytest.mark.parametrize(("fn", "dtype", "parts"), CASES)
def test_programs(fn, dtype, parts):
    values = inputs(dtype)
    with torch.no_grad(), fused_in_the_interpreter() as made:
        actual = torch.compile(fn, backend=eager_cascade(decide="always"), dynamic=False)(*values)
    assert last_compilation().rewritten == 1 and made == parts
    assert_close_to_reference(actual, fn(*values), fn(*(x.double() for x in values)))
    assert actual.stride() == fn(*values).stride()

"""Ways to write the softmax, and the matmuls around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .spellings import (
    BHQD,
    INF,
    D,
    E,
    H,
    L,
    M,
    N,
    batch_first,
    qkv,
    spelling,
    with_bias,
    with_mask,
)


@spelling(f"{BHQD} 0.25 nan", qkv)
def softmax_in_float32(q, k, v):
    return F.softmax(q @ k.mT * 0.25, -1, dtype=torch.float32).to(q.dtype) @ v


@spelling(f"{BHQD} 0.25 zero keep", with_mask(M, L, blind=True))
def safe_softmax(q, k, v, mask):
    scores = torch.where(mask, q @ k.mT * 0.25, -INF)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


@spelling(f"{BHQD} 0.25 zero add", with_mask(N, H, M, L, blind=True))
def sdpa_as_mathematics(q, k, v, mask):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask)


@spelling(f"{BHQD} 0.25 nan keep", with_mask(M, L, blind=True))
def log_softmax(q, k, v, mask):
    scores = torch.where(mask, q @ k.mT * 0.25, -INF)
    return torch.exp(torch.log_softmax(scores, -1)) @ v


@spelling(f"{BHQD} 0.25 nan keep", with_mask(M, L, blind=True))
def logsumexp(q, k, v, mask):
    scores = torch.where(mask, q @ k.mT * 0.25, -INF)
    weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
    return weights.to(q.dtype) @ v


@spelling(f"{BHQD} 0.25 nan", qkv)
def softmax_by_hand(q, k, v):
    scores = q @ k.mT * 0.25
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return weights / weights.sum(-1)[..., None] @ v


@spelling(f"{BHQD} 0.25 nan keep", with_mask(M, L, blind=True))
def softmax_without_the_maximum(q, k, v, mask):
    weights = torch.exp(torch.where(mask, (q @ k.mT).float() * 0.25, -INF))
    return (weights * weights.sum(-1, keepdim=True).reciprocal()).to(q.dtype) @ v


@spelling(f"{BHQD} 0.25 nan", qkv)
def dropout_that_drops_nothing(q, k, v):
    weights = F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.0, True)
    return F.dropout(weights, 0.5, False) @ v


@spelling("nhqd nhkd nhkd 0.25 nan", qkv)
def einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), v)


@spelling("nqhd nkhd nkhd 0.25 nan -> nqhd", batch_first)
def einsum_batch_first(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)


@spelling("nqhd nkhd nkhd 0.25 nan -> nqhd", batch_first)
def einsum_values_first(q, k, v):
    scores = torch.einsum("bkhd,bqhd->bhkq", k, q) * 0.25
    return torch.einsum("bkhd,bhkq->bqhd", v, torch.softmax(scores, -2))


@spelling("nqd ndk nkd 0.25 nan add", lambda dtype: [x[0] for x in with_bias(1, H, M, L)(dtype)])
def three_dims(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v


@spelling("nhqd nhkd nhkd 0.25 nan", qkv)
def bmm_of_merged_heads(q, k, v):
    n, h, m, _ = q.shape
    q, k, v = (x.reshape(n * h, x.shape[2], x.shape[3]) for x in (q, k, v))
    weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.25, -1)
    return torch.bmm(weights, v).view(n, h, m, v.shape[-1])


@spelling("nhqd nhkd nhkd 0.25 nan add", with_bias(N, 1, M, L))
def merged_heads_and_a_split_mask(q, k, v, bias):
    """BART: the mask is added on [N, H, M, L], everything else is [N * H, ...]."""
    n, h, m, _ = q.shape
    q, k, v = (x.reshape(n * h, x.shape[2], x.shape[3]) for x in (q, k, v))
    scores = torch.bmm(q * 0.25, k.mT).view(n, h, m, -1) + bias
    return torch.bmm(torch.softmax(scores.view(n * h, m, -1), -1), v).view(n, h, m, -1)


@spelling("nhqd nhkd nhkd 0.25 nan add", with_bias(N, 1, M, L))
def merged_heads_and_a_merged_mask(q, k, v, bias):
    n, h, m, _ = q.shape
    bias = bias.expand(-1, h, -1, -1).reshape(n * h, m, -1)
    q, k, v = (x.reshape(n * h, x.shape[2], x.shape[3]) for x in (q, k, v))
    weights = torch.softmax(torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=0.25), -1)
    return torch.bmm(weights, v).view(n, h, m, v.shape[-1])


@spelling("nqd ndk nkd 0.25 nan", lambda dtype: [x[0] for x in qkv(dtype)])
def baddbmm_without_bias(q, k, v):
    scores = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    scores = torch.baddbmm(scores, q, k.mT, beta=0, alpha=0.25)
    return torch.bmm(torch.softmax(scores, -1), v)


@spelling(f"{BHQD} 0.25 nan", lambda dtype: (qkv(dtype)[0], *(x[:, :1] for x in qkv(dtype)[1:])))
def one_kv_head(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@spelling(f"{BHQD} 0.25 nan", lambda dtype: (qkv(dtype)[0][:, :, :1], *qkv(dtype)[1:]))
def one_query(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@spelling(
    "nhqd nhkd nhkd 0.25 nan", lambda dtype: (qkv(dtype)[0], *(x[:, :1] for x in qkv(dtype)[1:]))
)
def repeated_kv_heads(q, k, v):
    k, v = (x[:, :, None].expand(-1, -1, H, -1, -1).flatten(1, 2) for x in (k, v))
    return torch.einsum(
        "bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25, -1), v
    )


@spelling("nhqd nhkd nhkd 0.25 nan", qkv)
def keys_and_values_swapped(q, k, v):
    """Attention all the same: to the keys v, of the values k."""
    q = torch.cat([q, q], -1)[..., :E]
    return torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, v) * 0.25, -1) @ k


@spelling(
    "nhqd nhdk nhkd 0.25 nan", lambda dtype: (qkv(dtype)[0], torch.randn(N, H, D, D).to(dtype))
)
def keys_not_transposed(q, k):
    """The columns of k are the keys, its rows the values."""
    return torch.softmax(q @ k * 0.25, -1) @ k


@spelling(f"{BHQD} 0.25 nan", qkv)
def queries_and_values_used_elsewhere(q, k, v):
    out = torch.softmax(q @ k.mT * 0.25, -1) @ v
    return out, q * 2, v.sum(), k.mT.contiguous()


@spelling(f"{BHQD} 0.25 nan", qkv)
def under_autocast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.softmax(q @ k.mT * 0.25, -1) @ v


@spelling("nhqd nhkd nhkd 0.25 nan add", with_bias(1, 1, 1, L))
def keys_first(q, k, v, bias):
    """Scores are [N, H, L, M]; what is added to them, transposed, is a mask of [N, H, M, L]."""
    scores = torch.einsum("bhqd,bhkd->bhkq", q, k) * 0.25 + bias.mT
    return torch.einsum("bhkq,bhkd->bhqd", torch.softmax(scores, -2), v)


@spelling("nqd ndk nkd 0.25 nan", lambda dtype: (qkv(dtype)[0], *(x[:, 0] for x in qkv(dtype)[1:])))
def heads_as_queries(q, k, v):
    """GPT-BigCode: one KV head, the queries of all heads in one matmul."""
    n, h, m, _ = q.shape
    scores = (q.flatten(1, 2) @ k.mT).view(n, h, m, -1) * 0.25
    return torch.softmax(scores, -1).view(n, h * m, -1) @ v


@spelling("nhqd nhkd nhkd 0.25 nan add", with_bias(M, L))
def einsum_under_autocast(q, k, v, bias):
    """The conversion to bfloat16 comes after rows and heads are one dim."""
    with torch.autocast("cpu", torch.bfloat16):
        scores = torch.einsum("bhqd,bhkd->bhqk", q * 0.5, k * 0.5) + bias
        return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), v)

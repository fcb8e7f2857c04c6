"""Attention written by hand in many ways, each with the site it must be read as.

Sizes differ from one another: N rows, H heads, M queries, L keys, D features, E value features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

N, H, M, L, D, E = 5, 2, 3, 7, 16, 11
INF = math.inf
MIN = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Spelling:
    """A function of its inputs and what must be found in it.

    Attributes:
        fn, inputs: the function, and a maker of its inputs for a dtype.
        site: summary of the site, see `summary`.
    """

    fn: Callable[..., Any]
    inputs: Callable[[torch.dtype], tuple[Any, ...]]
    site: str


SPELLINGS: dict[str, Spelling] = {}
BHQD = "nhqd nhdk nhkd"


def _add(
    site: str, inputs: Callable[[torch.dtype], tuple[Any, ...]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS[fn.__name__] = Spelling(fn, inputs, site)
        return fn

    return register


def qkv(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q [N, H, M, D], k [N, H, L, D], v [N, H, L, E]; scores are spread, values are large."""
    q, k = 2 * torch.randn(N, H, M, D), torch.randn(N, H, L, D)
    return tuple(x.to(dtype) for x in (q, k, 4 * torch.randn(N, H, L, E)))


def batch_first(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v as [N, tokens, H, D]."""
    return tuple(x.transpose(1, 2).contiguous() for x in qkv(dtype))


def keep(*shape: int) -> Tensor:
    """A random bool mask in which every row sees its first key."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


def with_mask(*shape: int, blind: bool = False) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    """q, k, v and a bool mask; `blind` hides every key from one query."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        mask = keep(*shape)
        if blind:
            mask[..., 1, :] = False
        return (*qkv(dtype), mask)

    return make


def with_bias(*shape: int) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    """q, k, v and a floating bias."""
    return lambda dtype: (*qkv(dtype), torch.randn(shape).to(dtype))


@_add(f"{BHQD} 0.25 nan", qkv)
def mul_scale(q, k, v):
    return torch.softmax(q @ k.transpose(2, 3) * D**-0.5, -1) @ v


@_add(f"{BHQD} 0.25 nan", qkv)
def div_scale(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v


@_add(f"{BHQD} 0.25 nan", qkv)
def scaled_q(q, k, v):
    return torch.softmax((q * D**-0.5) @ k.mT, -1) @ v


@_add("nhqd nhkd nhkd 0.25 nan", qkv)
def scaled_k_then_transposed(q, k, v):
    return torch.softmax(q @ (k * D**-0.5).mT, -1) @ v


@_add(f"{BHQD} 0.25 nan", qkv)
def scaled_both(q, k, v):
    return torch.softmax((q * D**-0.25) @ (k.mT * D**-0.25), -1) @ v


@_add(f"{BHQD} 1.0 nan", qkv)
def no_scale(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


@_add(f"{BHQD} -0.5 nan", qkv)
def several_factors(q, k, v):
    return torch.softmax((q @ k.mT / 4) * 2.0 * -1.0, -1) @ v


@_add(f"{BHQD} 0.25 nan", qkv)
def scale_in_a_full_tensor(q, k, v):
    """GPT-2 before it had a float."""
    scores = q @ k.mT
    scores = scores / torch.full([], v.new_ones(1, 1, 1, D).size(-1) ** 0.5, dtype=scores.dtype)
    return torch.softmax(scores, -1) @ v


@_add(f"{BHQD} 0.25 nan", qkv)
def scale_in_a_constant(q, k, v):
    return torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(float(D))), -1) @ v


@_add(f"{BHQD} 0.25 nan keep", with_mask(M, L))
def where_keeps(q, k, v, mask):
    return torch.softmax(torch.where(mask, q @ k.mT * 0.25, -INF), -1) @ v


@_add(f"{BHQD} 0.25 nan drop", with_mask(N, 1, M, L, blind=True))
def masked_fill_drops(q, k, v, mask):
    return torch.softmax((q @ k.mT * 0.25).masked_fill(~mask, -INF), -1) @ v


@_add(f"{BHQD} 0.25 nan drop", with_mask(N, 1, 1, L))
def mask_before_the_scale(q, k, v, mask):
    return torch.softmax((q @ k.mT).masked_fill(~mask, -INF) * 0.25, -1) @ v


@_add(f"{BHQD} 0.25 nan keep", with_mask(N, 1, M, L))
def additive_bool_before_the_scale(q, k, v, mask):
    bias = torch.where(mask, 0.0, -INF).to(q.dtype)
    return torch.softmax((q @ k.mT + bias) * 0.25, -1) @ v


@_add(f"{BHQD} 0.25 nan drop", with_mask(M, L))
def additive_drop_before_the_scale(q, k, v, mask):
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -INF)
    return torch.softmax((q @ k.mT + bias) * 0.25, -1) @ v


@_add(f"{BHQD} 0.25 uniform drop<{MIN}", with_mask(H, M, L, blind=True))
def lowest_fill(q, k, v, mask):
    return torch.softmax((q @ k.mT * 0.25).float().masked_fill(~mask, MIN), -1).to(q.dtype) @ v


@_add(f"{BHQD} 0.25 uniform keep<-1000000000.0", with_mask(M, L, blind=True))
def finite_fill(q, k, v, mask):
    return torch.softmax(torch.where(mask, (q @ k.mT).float() / 4, -1e9), -1).to(q.dtype) @ v


@_add(f"{BHQD} 0.25 uniform keep<-250000000.0", with_mask(M, L))
def finite_fill_before_the_scale(q, k, v, mask):
    return torch.softmax(torch.where(mask, (q @ k.mT).float(), -1e9) / 4, -1).to(q.dtype) @ v


@_add(f"{BHQD} 0.25 nan add", with_bias(N, H, M, L))
def bias(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v


@_add(f"{BHQD} 0.25 nan add", with_bias(1, L))
def bias_first(q, k, v, bias):
    return torch.softmax(torch.add(bias, q @ k.mT * 0.25), -1) @ v


@_add(f"{BHQD} 0.25 nan drop add", lambda dtype: (*with_bias(H, 1, L)(dtype), keep(M, L)))
def bias_then_mask(q, k, v, bias, mask):
    """ALiBi, and a causal mask on top."""
    return torch.softmax((q @ k.mT * 0.25 + bias).masked_fill(~mask, -INF), -1) @ v


@_add(f"{BHQD} 0.25 nan add drop", lambda dtype: (*with_bias(M, L)(dtype), keep(N, 1, 1, L)))
def in_place(q, k, v, bias, mask):
    scores = q @ k.mT
    scores.mul_(0.25)
    scores.masked_fill_(~mask, -INF)
    scores += bias
    return torch.softmax(scores, -1) @ v


@_add(f"{BHQD} 0.25 nan", qkv)
def softmax_in_float32(q, k, v):
    return F.softmax(q @ k.mT * 0.25, -1, dtype=torch.float32).to(q.dtype) @ v


@_add(f"{BHQD} 0.25 zero keep", with_mask(M, L, blind=True))
def safe_softmax(q, k, v, mask):
    scores = torch.where(mask, q @ k.mT * 0.25, -INF)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


@_add(f"{BHQD} 0.25 zero add", with_mask(N, H, M, L, blind=True))
def sdpa_as_mathematics(q, k, v, mask):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask)


@_add(f"{BHQD} 0.25 nan keep", with_mask(M, L, blind=True))
def log_softmax(q, k, v, mask):
    scores = torch.where(mask, q @ k.mT * 0.25, -INF)
    return torch.exp(torch.log_softmax(scores, -1)) @ v


@_add(f"{BHQD} 0.25 nan keep", with_mask(M, L, blind=True))
def logsumexp(q, k, v, mask):
    scores = torch.where(mask, q @ k.mT * 0.25, -INF)
    weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
    return weights.to(q.dtype) @ v


@_add(f"{BHQD} 0.25 nan", qkv)
def softmax_by_hand(q, k, v):
    scores = q @ k.mT * 0.25
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return weights / weights.sum(-1)[..., None] @ v


@_add(f"{BHQD} 0.25 nan keep", with_mask(M, L, blind=True))
def softmax_without_the_maximum(q, k, v, mask):
    weights = torch.exp(torch.where(mask, (q @ k.mT).float() * 0.25, -INF))
    return (weights * weights.sum(-1, keepdim=True).reciprocal()).to(q.dtype) @ v


@_add(f"{BHQD} 0.25 nan", qkv)
def dropout_that_drops_nothing(q, k, v):
    weights = F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.0, True)
    return F.dropout(weights, 0.5, False) @ v


@_add("nhqd nhkd nhkd 0.25 nan", qkv)
def einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), v)


@_add("nqhd nkhd nkhd 0.25 nan -> nqhd", batch_first)
def einsum_batch_first(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)


@_add("nqhd nkhd nkhd 0.25 nan -> nqhd", batch_first)
def einsum_values_first(q, k, v):
    scores = torch.einsum("bkhd,bqhd->bhkq", k, q) * 0.25
    return torch.einsum("bkhd,bhkq->bqhd", v, torch.softmax(scores, -2))


@_add("nqd ndk nkd 0.25 nan add", lambda dtype: [x[0] for x in with_bias(1, H, M, L)(dtype)])
def three_dims(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v


@_add("nhqd nhkd nhkd 0.25 nan", qkv)
def bmm_of_merged_heads(q, k, v):
    n, h, m, _ = q.shape
    q, k, v = (x.reshape(n * h, x.shape[2], x.shape[3]) for x in (q, k, v))
    weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.25, -1)
    return torch.bmm(weights, v).view(n, h, m, v.shape[-1])


@_add("nhqd nhkd nhkd 0.25 nan add", with_bias(N, 1, M, L))
def merged_heads_and_a_split_mask(q, k, v, bias):
    """BART: the mask is added on [N, H, M, L], everything else is [N * H, ...]."""
    n, h, m, _ = q.shape
    q, k, v = (x.reshape(n * h, x.shape[2], x.shape[3]) for x in (q, k, v))
    scores = torch.bmm(q * 0.25, k.mT).view(n, h, m, -1) + bias
    return torch.bmm(torch.softmax(scores.view(n * h, m, -1), -1), v).view(n, h, m, -1)


@_add("nhqd nhkd nhkd 0.25 nan add", with_bias(N, 1, M, L))
def merged_heads_and_a_merged_mask(q, k, v, bias):
    n, h, m, _ = q.shape
    bias = bias.expand(-1, h, -1, -1).reshape(n * h, m, -1)
    q, k, v = (x.reshape(n * h, x.shape[2], x.shape[3]) for x in (q, k, v))
    weights = torch.softmax(torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=0.25), -1)
    return torch.bmm(weights, v).view(n, h, m, v.shape[-1])


@_add("nqd ndk nkd 0.25 nan", lambda dtype: [x[0] for x in qkv(dtype)])
def baddbmm_without_bias(q, k, v):
    scores = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    scores = torch.baddbmm(scores, q, k.mT, beta=0, alpha=0.25)
    return torch.bmm(torch.softmax(scores, -1), v)


@_add(f"{BHQD} 0.25 nan", lambda dtype: (qkv(dtype)[0], *(x[:, :1] for x in qkv(dtype)[1:])))
def one_kv_head(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@_add(f"{BHQD} 0.25 nan", lambda dtype: (qkv(dtype)[0][:, :, :1], *qkv(dtype)[1:]))
def one_query(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@_add("nhqd nhkd nhkd 0.25 nan", lambda dtype: (qkv(dtype)[0], *(x[:, :1] for x in qkv(dtype)[1:])))
def repeated_kv_heads(q, k, v):
    k, v = (x[:, :, None].expand(-1, -1, H, -1, -1).flatten(1, 2) for x in (k, v))
    return torch.einsum(
        "bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25, -1), v
    )


@_add("nhqd nhkd nhkd 0.25 nan", qkv)
def keys_and_values_swapped(q, k, v):
    """Attention all the same: to the keys v, of the values k."""
    q = torch.cat([q, q], -1)[..., :E]
    return torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, v) * 0.25, -1) @ k


@_add("nhqd nhdk nhkd 0.25 nan", lambda dtype: (qkv(dtype)[0], torch.randn(N, H, D, D).to(dtype)))
def keys_not_transposed(q, k):
    """The columns of k are the keys, its rows the values."""
    return torch.softmax(q @ k * 0.25, -1) @ k


@_add(f"{BHQD} 0.25 nan", qkv)
def queries_and_values_used_elsewhere(q, k, v):
    out = torch.softmax(q @ k.mT * 0.25, -1) @ v
    return out, q * 2, v.sum(), k.mT.contiguous()


@_add(f"{BHQD} 0.25 nan", qkv)
def under_autocast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.softmax(q @ k.mT * 0.25, -1) @ v


@_add("nhqd nhkd nhkd 0.25 nan add", with_bias(1, 1, 1, L))
def keys_first(q, k, v, bias):
    """Scores are [N, H, L, M]; what is added to them, transposed, is a mask of [N, H, M, L]."""
    scores = torch.einsum("bhqd,bhkd->bhkq", q, k) * 0.25 + bias.mT
    return torch.einsum("bhkq,bhkd->bhqd", torch.softmax(scores, -2), v)


@_add("nqd ndk nkd 0.25 nan", lambda dtype: (qkv(dtype)[0], *(x[:, 0] for x in qkv(dtype)[1:])))
def heads_as_queries(q, k, v):
    """GPT-BigCode: one KV head, the queries of all heads in one matmul."""
    n, h, m, _ = q.shape
    scores = (q.flatten(1, 2) @ k.mT).view(n, h, m, -1) * 0.25
    return torch.softmax(scores, -1).view(n, h * m, -1) @ v

"""Ways to scale and to mask scores, in place and out of place."""

from __future__ import annotations

import math

import torch

from .spellings import BHQD, INF, MIN, D, H, L, M, N, keep, qkv, spelling, with_bias, with_mask


@spelling(f"{BHQD} 0.25 nan", qkv)
def mul_scale(q, k, v):
    return torch.softmax(q @ k.transpose(2, 3) * D**-0.5, -1) @ v


@spelling(f"{BHQD} 0.25 nan", qkv)
def div_scale(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v


@spelling(f"{BHQD} 0.25 nan", qkv)
def scaled_q(q, k, v):
    return torch.softmax((q * D**-0.5) @ k.mT, -1) @ v


@spelling("nhqd nhkd nhkd 0.25 nan", qkv)
def scaled_k_then_transposed(q, k, v):
    return torch.softmax(q @ (k * D**-0.5).mT, -1) @ v


@spelling(f"{BHQD} 0.25 nan", qkv)
def scaled_both(q, k, v):
    return torch.softmax((q * D**-0.25) @ (k.mT * D**-0.25), -1) @ v


@spelling(f"{BHQD} 1.0 nan", qkv)
def no_scale(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


@spelling(f"{BHQD} -0.5 nan", qkv)
def several_factors(q, k, v):
    return torch.softmax((q @ k.mT / 4) * 2.0 * -1.0, -1) @ v


@spelling(f"{BHQD} 0.25 nan", qkv)
def scale_in_a_full_tensor(q, k, v):
    """GPT-2 before it had a float."""
    scores = q @ k.mT
    scores = scores / torch.full([], v.new_ones(1, 1, 1, D).size(-1) ** 0.5, dtype=scores.dtype)
    return torch.softmax(scores, -1) @ v


@spelling(f"{BHQD} 0.25 nan", qkv)
def scale_in_a_constant(q, k, v):
    return torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(float(D))), -1) @ v


@spelling(f"{BHQD} 0.25 nan keep", with_mask(M, L))
def where_keeps(q, k, v, mask):
    return torch.softmax(torch.where(mask, q @ k.mT * 0.25, -INF), -1) @ v


@spelling(f"{BHQD} 0.25 nan drop", with_mask(N, 1, M, L, blind=True))
def masked_fill_drops(q, k, v, mask):
    return torch.softmax((q @ k.mT * 0.25).masked_fill(~mask, -INF), -1) @ v


@spelling(f"{BHQD} 0.25 nan drop", with_mask(N, 1, 1, L))
def mask_before_the_scale(q, k, v, mask):
    return torch.softmax((q @ k.mT).masked_fill(~mask, -INF) * 0.25, -1) @ v


@spelling(f"{BHQD} 0.25 nan keep", with_mask(N, 1, M, L))
def additive_bool_before_the_scale(q, k, v, mask):
    bias = torch.where(mask, 0.0, -INF).to(q.dtype)
    return torch.softmax((q @ k.mT + bias) * 0.25, -1) @ v


@spelling(f"{BHQD} 0.25 nan drop", with_mask(M, L))
def additive_drop_before_the_scale(q, k, v, mask):
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -INF)
    return torch.softmax((q @ k.mT + bias) * 0.25, -1) @ v


@spelling(f"{BHQD} 0.25 uniform drop<{MIN}", with_mask(H, M, L, blind=True))
def lowest_fill(q, k, v, mask):
    return torch.softmax((q @ k.mT * 0.25).float().masked_fill(~mask, MIN), -1).to(q.dtype) @ v


@spelling(f"{BHQD} 0.25 uniform keep<-1000000000.0", with_mask(M, L, blind=True))
def finite_fill(q, k, v, mask):
    return torch.softmax(torch.where(mask, (q @ k.mT).float() / 4, -1e9), -1).to(q.dtype) @ v


@spelling(f"{BHQD} 0.25 uniform keep<-250000000.0", with_mask(M, L))
def finite_fill_before_the_scale(q, k, v, mask):
    return torch.softmax(torch.where(mask, (q @ k.mT).float(), -1e9) / 4, -1).to(q.dtype) @ v


@spelling(f"{BHQD} 0.25 nan add", with_bias(N, H, M, L))
def bias(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v


@spelling(f"{BHQD} 0.25 nan add", with_bias(1, L))
def bias_first(q, k, v, bias):
    return torch.softmax(torch.add(bias, q @ k.mT * 0.25), -1) @ v


@spelling(f"{BHQD} 0.25 nan drop add", lambda dtype: (*with_bias(H, 1, L)(dtype), keep(M, L)))
def bias_then_mask(q, k, v, bias, mask):
    """ALiBi, and a causal mask on top."""
    return torch.softmax((q @ k.mT * 0.25 + bias).masked_fill(~mask, -INF), -1) @ v


@spelling(f"{BHQD} 0.25 nan add drop", lambda dtype: (*with_bias(M, L)(dtype), keep(N, 1, 1, L)))
def in_place(q, k, v, bias, mask):
    scores = q @ k.mT
    scores.mul_(0.25)
    scores.masked_fill_(~mask, -INF)
    scores += bias
    return torch.softmax(scores, -1) @ v

"""Ways to cap scores softly, and to give them a sink."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .spellings import BHQD, INF, MIN, D, H, L, M, N, keep, qkv, spelling, with_bias, with_mask


@spelling(f"{BHQD} 0.25 cap<3.0 nan", qkv)
def cap(q, k, v):
    return torch.softmax(3.0 * torch.tanh(q @ k.mT * D**-0.5 / 3.0), -1) @ v


@spelling(f"{BHQD} 0.25 cap<49.0 nan", qkv)
def cap_by_the_inverse(q, k, v):
    return torch.softmax(torch.tanh((q @ k.mT * 0.25) * (1 / 49.0)) * 49.0, -1) @ v


@spelling(f"{BHQD} 0.25 cap<5.0 nan", qkv)
def cap_in_the_scale(q, k, v):
    return torch.softmax(torch.tanh((q * (0.25 / 5.0)) @ k.mT) * 5.0, -1) @ v


@spelling(f"{BHQD} 0.5 cap<6.0 nan", qkv)
def cap_of_two_constants(q, k, v):
    """6 tanh(s / 3) is a cap of 6 on scores twice as large."""
    return torch.softmax(torch.tanh(q @ k.mT * 0.25 / 3.0) * 6.0, -1) @ v


@spelling(f"{BHQD} 0.5 cap<6.0 nan", qkv)
def cap_then_scale(q, k, v):
    return torch.softmax(torch.tanh(q @ k.mT * 0.25 / 3.0) * 3.0 * 2.0, -1) @ v


@spelling(f"{BHQD} -0.25 cap<3.0 nan", qkv)
def cap_of_two_signs(q, k, v):
    return torch.softmax(-3.0 * torch.tanh(q @ k.mT * 0.25 / 3.0), -1) @ v


@spelling(f"{BHQD} 0.25 cap<3.0 nan add", with_bias(N, 1, M, L))
def cap_of_gemma(q, k, v, mask):
    """transformers' eager form: in place of the scores, then the mask, softmax in float32."""
    scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    scores = scores / 3.0
    scores = torch.tanh(scores)
    scores = scores * 3.0
    scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


@spelling(f"{BHQD} 0.25 cap<3.0 nan drop", with_mask(N, 1, M, L, blind=True))
def cap_in_place_then_mask(q, k, v, mask):
    scores = q @ k.mT
    scores.mul_(0.25 / 3.0).tanh_().mul_(3.0).masked_fill_(~mask, -INF)
    return torch.softmax(scores, -1) @ v


@spelling(f"{BHQD} 0.25 cap<3.0 nan drop", with_mask(M, L))
def masked_between_tanh_and_cap(q, k, v, mask):
    """-inf times 3 is -inf."""
    return torch.softmax(torch.tanh(q @ k.mT * (0.25 / 3)).masked_fill(~mask, -INF) * 3, -1) @ v


def with_sinks(*shape, spread=3.0):
    """q, k, v and sinks about as large as the largest score."""
    return lambda dtype: (*qkv(dtype), (spread * torch.randn(shape)).to(dtype))


@spelling(
    f"{BHQD} 0.25 nan add sinks<1*11",
    lambda t: (*with_bias(N, 1, M, L)(t), torch.randn(H).to(t)),
)
def sinks_of_gpt_oss(q, k, v, mask, sinks):
    """transformers' eager form."""
    scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    scores = scores + mask
    sinks = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    joined = torch.cat([scores, sinks], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    weights = F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]
    weights = F.dropout(weights, p=0.0, training=False).to(v.dtype)
    return torch.matmul(weights, v)


@spelling(f"{BHQD} 0.25 nan sinks<*11", with_sinks(H, 1, 1))
def sinks_first(q, k, v, sinks):
    scores = torch.cat([sinks.expand(N, H, M, 1), q @ k.mT * 0.25], -1)
    return torch.softmax(scores, -1)[..., 1:] @ v


@spelling(f"{BHQD} 0.25 nan sinks<***1", with_sinks(N, H, M, 1))
def a_sink_a_query(q, k, v, sinks):
    scores = torch.cat([q @ k.mT * 0.25, sinks], -1)
    return scores.softmax(-1).narrow(-1, 0, k.shape[2]) @ v


@spelling(f"{BHQD} 0.25 nan sinks<*1*1", with_sinks(N, M))
def a_sink_of_all_heads(q, k, v, sinks):
    scores = torch.cat([q @ k.mT * 0.25, sinks[:, None, :, None].expand(-1, H, -1, -1)], -1)
    return torch.split(scores.softmax(-1), [k.shape[2], 1], -1)[0] @ v


@spelling(
    f"{BHQD} 0.25 nan drop sinks<1*11",
    lambda t: (*with_mask(N, 1, M, L, blind=True)(t), torch.randn(1, H, 1, 1).to(t)),
)
def sinks_of_blind_queries(q, k, v, mask, sinks):
    """A query that sees the sink only is zero."""
    scores = (q @ k.mT * 0.25).masked_fill(~mask, -INF)
    scores = torch.cat([scores, sinks.repeat(N, 1, M, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


@spelling(
    f"{BHQD} 0.25 uniform drop<{MIN} sinks<1*11",
    lambda t: (*with_mask(M, L, blind=True)(t), torch.tensor([-INF, 1.0]).view(1, H, 1, 1)),
)
def sinks_under_the_lowest_fill(q, k, v, mask, sinks):
    """The blind query is uniform in the first head and zero in the second."""
    scores = (q @ k.mT * 0.25).float().masked_fill(~mask, MIN)
    joined = torch.cat([scores, sinks.expand(N, H, M, 1)], -1)
    return joined.softmax(-1)[..., :-1].to(q.dtype) @ v


@spelling(f"{BHQD} 0.25 nan sinks<1*11", with_sinks(1, H, 1, 1))
def sinks_in_a_softmax_by_hand(q, k, v, sinks):
    scores = torch.cat([q @ k.mT * 0.25, sinks.expand(N, H, M, 1)], -1).float()
    weights = torch.exp(scores)
    return (weights / weights.sum(-1, keepdim=True))[..., :-1].to(v.dtype) @ v


@spelling(f"{BHQD} 0.25 nan sinks<***1", qkv)
def softmax_of_one_more(q, k, v):
    """exp(s) / (1 + sum(exp(s))): a sink of zero."""
    scores = torch.cat([q @ k.mT * 0.25, q.new_zeros(N, H, M, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


@spelling(
    "nqd ndk nkd 0.25 nan sinks<**1",
    lambda t: (*(x[:, 0] for x in qkv(t)), torch.randn(N, M, 1).to(t)),
)
def sinks_without_heads(q, k, v, sinks):
    scores = torch.cat([q @ k.mT * 0.25, sinks], -1)
    return scores.softmax(-1)[..., :-1] @ v


@spelling(
    f"{BHQD} 0.25 cap<3.0 nan drop sinks<1*11",
    lambda t: (*qkv(t), keep(M, L), torch.randn(1, H, 1, 1).to(t)),
)
def cap_and_sinks(q, k, v, mask, sinks):
    """The sink is not capped."""
    scores = 3.0 * torch.tanh(q @ k.mT * 0.25 / 3.0)
    scores = scores.masked_fill(~mask, -INF)
    scores = torch.cat([scores, sinks.expand(N, H, M, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v

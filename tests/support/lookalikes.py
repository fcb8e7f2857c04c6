"""Code that looks like attention and is not, or is one that cannot be rewritten: never a site.

Each function stands with the reason it is declined for; None means that nothing is reported at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torch_cascade.compiler.report import Reason

from .spellings import D, E, H, L, M, N, keep, qkv, with_bias, with_mask

INF = math.inf
MIN = torch.finfo(torch.float32).min

Inputs = Callable[[torch.dtype], tuple[Any, ...]]
LOOKALIKES: dict[str, tuple[Callable[..., Any], Inputs, Reason | None]] = {}


def _add(reason: Reason | None, inputs: Inputs) -> Callable[[Callable[..., Any]], Any]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        LOOKALIKES[fn.__name__] = (fn, inputs, reason)
        return fn

    return register


def _square(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """As many queries as keys, so that a softmax over either fits."""
    return tuple(torch.randn(N, H, L, D).to(dtype) for _ in range(3))


def _with(*extra: Callable[[], Any]) -> Inputs:
    return lambda dtype: (*qkv(dtype), *(make() for make in extra))


@_add(Reason.SPELLING, _square)
def softmax_over_queries(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -2) @ v


@_add(Reason.SPELLING, qkv)
def softmax_over_heads(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, 1) @ v


@_add(Reason.SPELLING, qkv)
def squared_scores(q, k, v):
    scores = q @ k.mT * 0.25
    return torch.softmax(scores * scores, -1) @ v


@_add(Reason.SPELLING, qkv)
def cubed_scores(q, k, v):
    return torch.softmax((q @ k.mT * 0.25) ** 3, -1) @ v


@_add(None, qkv)
def relu_attention(q, k, v):
    return torch.relu(q @ k.mT * 0.25) @ v


@_add(None, qkv)
def linear_attention(q, k, v):
    return torch.softmax(q, -1) @ (torch.softmax(k, -2).mT @ v)


@_add(None, lambda dtype: (torch.randn(N, M, D), torch.randn(D, D), torch.randn(N, D, E)))
def softmax_of_a_projection(x, w, context):
    """The first matmul is a plain projection: its softmax runs over features."""
    return torch.softmax(x @ w, -1) @ context


@_add(None, lambda dtype: (torch.randn(M, D), torch.randn(L, D), torch.randn(L, E)))
def classifier_and_embedding(x, classes, embedding):
    """Of the form of attention, without a batch that could be shared."""
    return torch.softmax(x @ classes.T, -1) @ embedding


@_add(None, qkv)
def log_softmax_of_scores(q, k, v):
    return torch.log_softmax(q @ k.mT * 0.25, -1) @ v


@_add(None, qkv)
def sigmoid_attention(q, k, v):
    return torch.sigmoid(q @ k.mT * 0.25) @ v


@_add(None, qkv)
def softmax_not_normalised(q, k, v):
    scores = q @ k.mT * 0.25
    return torch.exp(scores - scores.amax(-1, keepdim=True)) @ v


@_add(None, _square)
def softmax_divided_by_columns(q, k, v):
    """The sum over keys stands where the sum over queries belongs."""
    weights = torch.exp(q @ k.mT * 0.25)
    return weights / weights.sum(-1)[..., None, :] @ v


@_add(None, qkv)
def softmax_of_two_tensors(q, k, v):
    weights = torch.exp(q @ k.mT * 0.25)
    return weights / torch.exp(q @ k.mT * 0.125).sum(-1, keepdim=True) @ v


@_add(Reason.TENSOR_SCALE, _with(lambda: torch.tensor(0.25)))
def tensor_scale(q, k, v, scale):
    return torch.softmax(q @ k.mT * scale, -1) @ v


@_add(Reason.TENSOR_SCALE, _with(lambda: torch.full((1, 1, 1), 4.0)))
def tensor_divisor(q, k, v, scale):
    return torch.softmax(q @ k.mT / scale, -1) @ v


@_add(Reason.TENSOR_SCALE, _with(lambda: torch.rand(H, 1, 1)))
def temperature_a_head(q, k, v, temperature):
    return torch.softmax(q @ k.mT * temperature, -1) @ v


@_add(Reason.SPELLING, with_bias(M, L))
def bias_before_the_scale(q, k, v, bias):
    return torch.softmax((q @ k.mT + bias) * 0.25, -1) @ v


@_add(Reason.SPELLING, with_mask(M, L))
def hidden_then_negated(q, k, v, mask):
    """A negative scale turns -inf into inf."""
    return torch.softmax((q @ k.mT).masked_fill(~mask, -INF) * -0.25, -1) @ v


@_add(Reason.SPELLING, with_bias(M, L))
def bias_subtracted(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.25 - bias, -1) @ v


@_add(Reason.SPELLING, with_bias(M, L))
def bias_doubled(q, k, v, bias):
    return torch.softmax(torch.add(q @ k.mT * 0.25, bias, alpha=2), -1) @ v


@_add(Reason.SPELLING, lambda dtype: [x[0] for x in with_bias(1, H, M, L)(dtype)])
def baddbmm_halves_the_bias(q, k, v, bias):
    return torch.bmm(torch.softmax(torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=0.25), -1), v)


@_add(Reason.SPELLING, with_mask(M, L))
def bool_mask_added(q, k, v, mask):
    return torch.softmax(q @ k.mT * 0.25 + mask, -1) @ v


@_add(Reason.FINITE_FILL, with_mask(M, L))
def filled_with_zero(q, k, v, mask):
    return torch.softmax((q @ k.mT * 0.25).masked_fill(~mask, 0.0), -1) @ v


@_add(Reason.FINITE_FILL, with_mask(M, L))
def filled_with_little(q, k, v, mask):
    return torch.softmax((q @ k.mT * 0.25).masked_fill(~mask, -100.0), -1) @ v


@_add(Reason.FINITE_FILL, with_mask(M, L))
def scaled_until_the_fill_is_little(q, k, v, mask):
    return torch.softmax((q @ k.mT).masked_fill(~mask, -1e4) * 0.25, -1) @ v


@_add(Reason.FINITE_FILL, with_mask(M, L, blind=True))
def lowest_fill_under_logsumexp(q, k, v, mask):
    """A blind query gets the sum of the values, not their mean: log(L) is lost in rounding."""
    scores = torch.where(mask, q @ k.mT * 0.25, MIN)
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


@_add(Reason.SPELLING, with_mask(M, L))
def masked_after_softmax(q, k, v, mask):
    return torch.softmax(q @ k.mT * 0.25, -1).masked_fill(~mask, 0.0) @ v


@_add(Reason.SPELLING, with_bias(M, L))
def bias_after_softmax(q, k, v, bias):
    return (torch.softmax(q @ k.mT * 0.25, -1) + bias) @ v


@_add(Reason.SPELLING, _with(lambda: torch.rand(H, 1, 1)))
def head_mask(q, k, v, gate):
    return (torch.softmax(q @ k.mT * 0.25, -1) * gate) @ v


@_add(Reason.SPELLING, qkv)
def weights_renormalised(q, k, v):
    weights = torch.softmax(q @ k.mT * 0.25, -1)
    weights = torch.where(weights > 0.1, weights, 0.0)
    return weights / weights.sum(-1, keepdim=True) @ v


@_add(Reason.SPELLING, with_mask(M, L))
def blind_rows_zeroed_by_another_mask(q, k, v, mask):
    weights = torch.softmax(q @ k.mT * 0.25, -1)
    return torch.where(mask.all(-1, keepdim=True), 0.0, weights) @ v


@_add(Reason.SPELLING, qkv)
def only_the_first_keys_have_values(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1)[..., : L - 2] @ v[:, :, : L - 2]


@_add(Reason.SPELLING, qkv)
def keys_joined_after_the_matmul(q, k, v):
    scores = torch.cat([q @ k.mT, q @ k.mT * 2], -1) * 0.25
    return torch.softmax(scores, -1) @ torch.cat([v, v], 2)


@_add(Reason.SPELLING, qkv)
def keeps_the_largest_scores(q, k, v):
    scores = q @ k.mT * 0.25
    lowest = scores.topk(3, -1).values[..., -1:]
    return torch.softmax(scores.masked_fill(scores < lowest, -INF), -1) @ v


@_add(Reason.SPELLING, lambda dtype: (*qkv(dtype)[:2], torch.randn(L, E)))
def values_made_of_the_scores(q, k, w):
    scores = q @ k.mT * 0.25
    values = scores.mean((1, 2))[:, None, :, None] + w
    return torch.softmax(scores, -1) @ values


@_add(Reason.SCORES_USED, qkv)
def weights_returned(q, k, v):
    weights = torch.softmax(q @ k.mT * 0.25, -1)
    return weights @ v, weights


@_add(Reason.SCORES_USED, qkv)
def scores_returned(q, k, v):
    scores = q @ k.mT
    return torch.softmax(scores * 0.25, -1) @ v, scores.mean((-1, -2))


@_add(Reason.SCORES_USED, qkv)
def log_sum_exp_returned(q, k, v):
    scores = q @ k.mT * 0.25
    total = torch.logsumexp(scores, -1, keepdim=True)
    return torch.exp(scores - total) @ v, total


@_add(Reason.SCORES_USED, _with(lambda: torch.zeros(N, H, M, L)))
def weights_written_to_a_buffer(q, k, v, buffer):
    weights = torch.softmax(q @ k.mT * 0.25, -1)
    buffer.copy_(weights)
    return weights @ v


@_add(Reason.DROPOUT, qkv)
def dropout(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.1, True) @ v


@_add(Reason.RANK, lambda dtype: (torch.randn(N, H, 4, M, D), *qkv(dtype)[1:]))
def grouped_heads(q, k, v):
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q, k) * 0.25
    return torch.einsum("bhgqk,bhkd->bhgqd", torch.softmax(scores, -1), v)


@_add(Reason.RANK, lambda dtype: (torch.randn(N, H, 4, M, D), *qkv(dtype)[1:]))
def grouped_heads_broadcast(q, k, v):
    return torch.softmax(q @ k[:, :, None].mT * 0.25, -1) @ v[:, :, None]


@_add(Reason.SPELLING, lambda dtype: (*qkv(dtype), keep(4, 1, 1, 1, L)))
def scores_broadcast_by_their_mask(q, k, v, mask):
    scores = torch.where(mask, q @ k.mT * 0.25, -INF)
    return torch.softmax(scores, -1) @ v


@_add(Reason.MASK_SHAPE, with_bias(L, M))
def bias_with_keys_first(q, k, v, bias):
    scores = torch.einsum("bhqd,bhkd->bhkq", q, k) * 0.25 + bias
    return torch.einsum("bhkq,bhkd->bhqd", torch.softmax(scores, -2), v)

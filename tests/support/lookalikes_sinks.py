"""What looks like a soft-cap or like an attention sink and is none: never a site."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_cascade.compiler.report import Reason

from .lookalikes import INF, _add, _with
from .spellings import H, L, M, N, keep, qkv, with_bias, with_mask


@_add(Reason.SPELLING, with_bias(M, L))
def bias_inside_the_cap(q, k, v, bias):
    return torch.softmax(3 * torch.tanh((q @ k.mT * 0.25 + bias) / 3), -1) @ v


@_add(Reason.SPELLING, with_mask(M, L))
def mask_inside_the_cap(q, k, v, mask):
    """tanh(-inf) is -1: the key is not hidden, it gets the lowest score."""
    return torch.softmax(3 * torch.tanh((q @ k.mT).masked_fill(~mask, -INF) / 3), -1) @ v


@_add(Reason.SPELLING, qkv)
def capped_twice(q, k, v):
    return torch.softmax(3 * torch.tanh(2 * torch.tanh(q @ k.mT / 2) / 3), -1) @ v


@_add(Reason.SPELLING, qkv)
def capped_by_the_arctangent(q, k, v):
    return torch.softmax(3 * torch.atan(q @ k.mT / 3), -1) @ v


@_add(Reason.SPELLING, qkv)
def cap_with_the_scores_added(q, k, v):
    scores = q @ k.mT * 0.25
    return torch.softmax(scores + 3 * torch.tanh(scores / 3), -1) @ v


@_add(Reason.SPELLING, qkv)
def cap_of_zero(q, k, v):
    return torch.softmax(0.0 * torch.tanh(q @ k.mT), -1) @ v


@_add(Reason.TENSOR_SCALE, _with(lambda: torch.tensor(3.0)))
def cap_is_a_tensor(q, k, v, cap):
    return torch.softmax(cap * torch.tanh(q @ k.mT * 0.25 / 3.0), -1) @ v


@_add(Reason.TENSOR_SCALE, _with(lambda: torch.rand(H, 1, 1)))
def cap_a_head(q, k, v, cap):
    return torch.softmax(cap * torch.tanh(q @ k.mT * 0.25 / 3.0), -1) @ v


@_add(Reason.SPELLING, qkv)
def capped_weights(q, k, v):
    return torch.tanh(torch.softmax(q @ k.mT * 0.25, -1)) @ v


def _joined(q, k, *columns):
    return torch.cat([q @ k.mT * 0.25, *columns], -1)


_SINK = _with(lambda: torch.randn(N, H, M, 1))


@_add(Reason.SPELLING, _SINK)
def sink_kept_and_a_key_dropped(q, k, v, sink):
    return _joined(q, k, sink).softmax(-1)[..., 1:] @ v


@_add(Reason.SPELLING, _SINK)
def sink_first_and_a_key_dropped(q, k, v, sink):
    scores = torch.cat([sink, q @ k.mT * 0.25], -1)
    return scores.softmax(-1)[..., :-1] @ v


@_add(Reason.SPELLING, _with(lambda: torch.randn(N, H, M, 1), lambda: torch.randn(N, H, 1, 11)))
def sink_with_a_value(q, k, v, sink, value):
    return _joined(q, k, sink).softmax(-1) @ torch.cat([v, value], 2)


@_add(Reason.SPELLING, _with(lambda: torch.randn(N, H, M, 2)))
def two_sinks(q, k, v, sinks):
    return _joined(q, k, sinks).softmax(-1)[..., :-2] @ v


@_add(Reason.SPELLING, _with(*2 * [lambda: torch.randn(N, H, M, 1)]))
def sinks_on_both_sides(q, k, v, left, right):
    scores = torch.cat([left, q @ k.mT * 0.25, right], -1)
    return scores.softmax(-1)[..., 1:-1] @ v


@_add(Reason.SPELLING, _SINK)
def sink_scaled_with_the_scores(q, k, v, sink):
    return (torch.cat([q @ k.mT, sink], -1) * 0.25).softmax(-1)[..., :-1] @ v


@_add(Reason.SPELLING, _with(lambda: torch.randn(N, H, M, 1), lambda: keep(M, L)))
def sink_hidden_by_the_mask(q, k, v, sink, mask):
    joined = _joined(q, k, sink).masked_fill(~F.pad(mask, (0, 1)), -INF)
    return joined.softmax(-1)[..., :-1] @ v


@_add(Reason.SPELLING, _SINK)
def maximum_taken_of_the_keys_only(q, k, v, sink):
    """The sink is then relative to the row's maximum."""
    scores = q @ k.mT * 0.25
    scores = scores - scores.amax(-1, keepdim=True)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


@_add(Reason.SPELLING, qkv)
def sink_made_of_the_scores(q, k, v):
    scores = q @ k.mT * 0.25
    return torch.cat([scores, scores.mean(-1, True)], -1).softmax(-1)[..., :-1] @ v


@_add(Reason.SPELLING, _with(lambda: torch.randn(N, H, M, 1)))
def one_key_in_place_of_a_sink(q, k, v, sink):
    """No column is added: the last key is dropped."""
    return (q @ k.mT * 0.25 + sink).softmax(-1)[..., :-1] @ v[:, :, :-1]


@_add(Reason.SPELLING, _with(lambda: torch.randn(N, H, 1, L)))
def more_queries_joined(q, k, v, sink):
    """Joined along the queries, softmax over them, and that row dropped."""
    return torch.cat([q @ k.mT * 0.25, sink], 2).softmax(2)[:, :, :-1] @ v


@_add(Reason.SCORES_USED, _SINK)
def weight_of_the_sink_returned(q, k, v, sink):
    weights = _joined(q, k, sink).softmax(-1)
    return weights[..., :-1] @ v, weights[..., -1]

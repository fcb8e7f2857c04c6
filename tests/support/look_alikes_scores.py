"""Look-alikes: hand-written, and not quite a softmax over the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .look_alikes import (
    STANDARD,
    D,
    H,
    M,
    N,
    P,
    S,
    joined,
    look_alike,
)

# Hand-written, and not a softmax over the keys.


def by_hand(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores."""
    return q @ k.transpose(2, 3) * D**-0.5


@look_alike("never")
def softmax_over_queries(q, kp, ks, vp, vs):
    return by_hand(q, joined(kp, ks)).softmax(-2) @ joined(vp, vs)


@look_alike("never")
def softmax_over_heads(q, kp, ks, vp, vs):
    return by_hand(q, joined(kp, ks)).softmax(1) @ joined(vp, vs)


@look_alike("never")
def softmax_over_rows(q, kp, ks, vp, vs):
    return by_hand(q, joined(kp, ks)).softmax(0) @ joined(vp, vs)


@look_alike("never")
def sigmoid_attention(q, kp, ks, vp, vs):
    return by_hand(q, joined(kp, ks)).sigmoid() @ joined(vp, vs)


@look_alike("never")
def linear_attention(q, kp, ks, vp, vs):
    return by_hand(q, joined(kp, ks)) @ joined(vp, vs)


@look_alike("never", (*STANDARD, (1, H, M, P + S)))
def mask_that_multiplies_scores(q, kp, ks, vp, vs, gate):
    return (by_hand(q, joined(kp, ks)) * gate).softmax(-1) @ joined(vp, vs)


@look_alike("never", (*STANDARD, (N, 1, M, P + S)))
def weights_hidden_after_the_softmax(q, kp, ks, vp, vs, gate):
    weights = by_hand(q, joined(kp, ks)).softmax(-1).masked_fill(gate > 0.5, 0)
    return weights @ joined(vp, vs)


@look_alike("either", (*STANDARD, (N, H, M, 1)))
def sink_in_the_denominator(q, kp, ks, vp, vs, sink):
    scores = torch.cat([by_hand(q, joined(kp, ks)), sink], -1)
    return scores.softmax(-1)[..., :-1] @ joined(vp, vs)


@look_alike("never", (*STANDARD, (N, H, M, 1)))
def first_key_dropped_in_place_of_the_sink(q, kp, ks, vp, vs, sink):
    scores = torch.cat([by_hand(q, joined(kp, ks)), sink], -1)
    return scores.softmax(-1)[..., 1:] @ joined(vp, vs)


@look_alike("never", (*STANDARD, (N, H, M, 1)))
def sink_capped_with_the_scores(q, kp, ks, vp, vs, sink):
    scores = torch.cat([by_hand(q, joined(kp, ks)), sink], -1)
    return (torch.tanh(scores / 3) * 3).softmax(-1)[..., :-1] @ joined(vp, vs)


@look_alike("never", (*STANDARD, (1, 1, M, P + S)))
def bias_inside_the_soft_cap(q, kp, ks, vp, vs, bias):
    scores = by_hand(q, joined(kp, ks)) + bias
    return (torch.tanh(scores / 3) * 3).softmax(-1) @ joined(vp, vs)


@look_alike("either")
def weights_returned(q, kp, ks, vp, vs):
    weights = by_hand(q, joined(kp, ks)).softmax(-1)
    return weights @ joined(vp, vs), weights


@look_alike("either")
def scores_used_twice(q, kp, ks, vp, vs):
    scores = by_hand(q, joined(kp, ks))
    return scores.softmax(-1) @ joined(vp, vs), scores.amax(-1)


@look_alike("either")
def weights_used_on_two_values(q, kp, ks, vp, vs):
    weights = by_hand(q, joined(kp, ks)).softmax(-1)
    return weights @ joined(vp, vs) + weights @ joined(vp * 2, vs)


@look_alike("never")
def talking_heads(q, kp, ks, vp, vs):
    scores = by_hand(q, joined(kp, ks))
    return (scores + scores.flip(1)).softmax(-1) @ joined(vp, vs)


@look_alike("never")
def power_of_the_weights(q, kp, ks, vp, vs):
    return by_hand(q, joined(kp, ks)).softmax(-1).square() @ joined(vp, vs)


@look_alike("either", (*STANDARD, (H, 1, 1)))
def scale_a_head(q, kp, ks, vp, vs, scale):
    return (by_hand(q, joined(kp, ks)) * scale).softmax(-1) @ joined(vp, vs)


@look_alike("either", (*STANDARD, ()))
def scale_is_a_tensor(q, kp, ks, vp, vs, scale):
    return (by_hand(q, joined(kp, ks)) * scale).softmax(-1) @ joined(vp, vs)


@look_alike("never")
def weights_against_other_values(q, kp, ks, vp, vs):
    weights = by_hand(q, joined(kp, ks)).softmax(-1)
    return weights.transpose(-1, -2) @ q + vp.sum() * 0 + vs.sum() * 0


@look_alike("either")
def values_summed_over_queries(q, kp, ks, vp, vs):
    return torch.einsum("bhqk,bhkd->bhd", by_hand(q, joined(kp, ks)).softmax(-1), joined(vp, vs))

"""Look-alikes: K and V that disagree, and prefixes that change after the expand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .look_alikes import (
    PREFIX,
    QUERY,
    STANDARD,
    SUFFIX,
    B,
    D,
    H,
    M,
    N,
    P,
    S,
    T,
    joined,
    look_alike,
    sdpa,
)

# K and V disagree.


@look_alike("never", (QUERY, PREFIX, SUFFIX, (*SUFFIX[:2], P, D), SUFFIX))
def only_k_is_shared(q, kp, ks, vp, vs):
    return sdpa(q, joined(kp, ks), torch.cat([vp, vs], 2))


@look_alike("never", (QUERY, (*SUFFIX[:2], P, D), SUFFIX, PREFIX, SUFFIX))
def only_v_is_shared(q, kp, ks, vp, vs):
    return sdpa(q, torch.cat([kp, ks], 2), joined(vp, vs))


@look_alike("either", (QUERY, PREFIX, SUFFIX, (1, H, P, D), SUFFIX))
def k_shared_by_request_v_by_all(q, kp, ks, vp, vs):
    return sdpa(q, joined(kp, ks), torch.cat([vp.expand(N, -1, -1, -1), vs], 2))


@look_alike("either", (QUERY, PREFIX, SUFFIX, PREFIX, SUFFIX))
def v_in_another_order(q, kp, ks, vp, vs):
    v = torch.cat([vs, vp.repeat_interleave(T, 0)], 2)
    return sdpa(q, joined(kp, ks), v)


@look_alike("never", ((N, H, M, D), (B, H, P, D), (N, H, P, D), (B, H, P, D), (N, H, P, D)))
def v_in_another_order_same_lengths(q, kp, ks, vp, vs):
    v = torch.cat([vs, vp.repeat_interleave(T, 0)], 2)
    return sdpa(q, joined(kp, ks), v)


@look_alike("either", (QUERY, PREFIX, (B, H, S, D), PREFIX, (B, H, S, D)))
def v_parts_swapped_all_shared(q, kp, ks, vp, vs):
    k = torch.cat([kp, ks], 2).repeat_interleave(T, 0)
    return sdpa(q, k, torch.cat([vs, vp], 2).repeat_interleave(T, 0))


@look_alike("either")
def keys_flipped_values_not(q, kp, ks, vp, vs):
    k = torch.cat([kp.repeat_interleave(T, 0).flip(2), ks], 2)
    return sdpa(q, k, joined(vp, vs))


@look_alike("either")
def slices_that_overlap(q, kp, ks, vp, vs):
    def part(x: Tensor, cut: int, more: int) -> Tensor:
        wide = x.repeat_interleave(T, 0)
        return torch.cat([wide[:, :, :cut], wide[:, :, more:]], 2)

    k = torch.cat([part(kp, 6, 4), ks], 2)
    return sdpa(q, k, torch.cat([part(vp, 5, 3), vs], 2))


@look_alike("either")
def every_second_key(q, kp, ks, vp, vs):
    return sdpa(q, joined(kp, ks)[:, :, ::2], joined(vp, vs)[:, :, ::2])


@look_alike("either")
def values_are_the_keys(q, kp, ks, vp, vs):
    k = joined(kp, ks)
    return sdpa(q, k, k) + vp.sum() * 0 + vs.sum() * 0


# The prefix changes after the expand.


@look_alike("never", (*STANDARD, (N, 1, 1, D)))
def bias_a_branch(q, kp, ks, vp, vs, bias):
    k = torch.cat([kp.repeat_interleave(T, 0) + bias, ks], 2)
    return sdpa(q, k, joined(vp, vs))


@look_alike("never", (*STANDARD, (N, H, 1, 1)))
def factor_a_branch(q, kp, ks, vp, vs, factor):
    k = torch.cat([kp.repeat_interleave(T, 0) * factor, ks], 2)
    return sdpa(q, k, joined(vp, vs))


@look_alike("never", (*STANDARD, (N, H, 1, 1)))
def v_factor_a_branch(q, kp, ks, vp, vs, factor):
    v = torch.cat([vp.repeat_interleave(T, 0) * factor, vs], 2)
    return sdpa(q, joined(kp, ks), v)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding, half-rotated; angles [rows, 1, length, D / 2]."""
    cos, sin = angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@look_alike("never", (*STANDARD, (N, 1, P, D // 2)))
def rope_a_branch_on_the_expanded_prefix(q, kp, ks, vp, vs, angles):
    k = torch.cat([rotate(kp.repeat_interleave(T, 0), angles), ks], 2)
    return sdpa(q, k, joined(vp, vs))


@look_alike("either", (*STANDARD, (1, 1, P, D // 2)))
def rope_for_all_on_the_expanded_prefix(q, kp, ks, vp, vs, angles):
    k = torch.cat([rotate(kp.repeat_interleave(T, 0), angles), ks], 2)
    return sdpa(q, k, joined(vp, vs))


@look_alike("either", (*STANDARD, (B, 1, P, D // 2)))
def rope_before_the_expand(q, kp, ks, vp, vs, angles):
    return sdpa(q, joined(rotate(kp, angles), ks), joined(vp, vs))


@look_alike("either")
def norm_of_keys_after_the_cat(q, kp, ks, vp, vs):
    return sdpa(q, F.layer_norm(joined(kp, ks), (D,)), joined(vp, vs))


@look_alike("never")
def setitem_on_one_branch(q, kp, ks, vp, vs):
    prefix = kp.repeat_interleave(T, 0)
    prefix[1] = 0
    return sdpa(q, torch.cat([prefix, ks], 2), joined(vp, vs))


@look_alike("never")
def in_place_on_one_branch(q, kp, ks, vp, vs):
    prefix = vp.repeat_interleave(T, 0)
    prefix[2].mul_(3)
    return sdpa(q, joined(kp, ks), torch.cat([prefix, vs], 2))


@look_alike("either")
def in_place_on_one_key(q, kp, ks, vp, vs):
    k = joined(kp, ks)
    k[:, :, 0] = 0
    return sdpa(q, k, joined(vp, vs))


@look_alike("either")
def in_place_between_cat_and_use(q, kp, ks, vp, vs):
    k, v = joined(kp, ks), joined(vp, vs)
    k.mul_(2)
    v.add_(1)
    return sdpa(q, k, v)


@look_alike("never", STANDARD, lambda: torch.tensor([True, False, True, True, False, False]))
def either_of_two_prefixes_by_branch(q, kp, ks, vp, vs, choice):
    other = kp.flip(0).repeat_interleave(T, 0)
    prefix = torch.where(choice[:, None, None, None], kp.repeat_interleave(T, 0), other)
    return sdpa(q, torch.cat([prefix, ks], 2), joined(vp, vs))


@look_alike("never", STANDARD, lambda: torch.arange(N * P).reshape(N, 1, P, 1) * 11 // P % P)
def keys_permuted_by_branch(q, kp, ks, vp, vs, order):
    index = order.expand(N, H, P, D)
    k = torch.cat([kp.repeat_interleave(T, 0).gather(2, index), ks], 2)
    return sdpa(q, k, torch.cat([vp.repeat_interleave(T, 0).gather(2, index), vs], 2))


@look_alike("never")
def heads_and_keys_reinterpreted(q, kp, ks, vp, vs):
    def mixed(x: Tensor) -> Tensor:
        return x.repeat_interleave(T, 0).transpose(1, 2).reshape(N, H, P, D)

    k = torch.cat([mixed(kp) + 0 * ks[:, :, :1], ks], 2)
    return sdpa(q, k, torch.cat([mixed(vp) + 0 * vs[:, :, :1], vs], 2))


@look_alike("either")
def heads_and_keys_reinterpreted_alike(q, kp, ks, vp, vs):
    def mixed(x: Tensor) -> Tensor:
        return x.repeat_interleave(T, 0).transpose(1, 2).reshape(N, H, P, D)

    return sdpa(q, torch.cat([mixed(kp), ks], 2), torch.cat([mixed(vp), vs], 2))


# The wrong axis.


@look_alike("never", ((N, 2 * H, M, D), (1, H, P, D), (N, H, P, D), (1, H, P, D), (N, H, P, D)))
def cat_of_heads(q, kp, ks, vp, vs):
    k = torch.cat([kp.expand(N, -1, -1, -1), ks], 1)
    return sdpa(q, k, torch.cat([vp.expand(N, -1, -1, -1), vs], 1))


@look_alike("either", ((N + 2, H, M, D), (1, H, P, D), (2, H, P, D), (1, H, P, D), (2, H, P, D)))
def cat_of_rows(q, kp, ks, vp, vs):
    k = torch.cat([kp.expand(N, -1, -1, -1), ks], 0)
    return sdpa(q, k, torch.cat([vp.expand(N, -1, -1, -1), vs], 0))


@look_alike("never", ((N, H, M, 2 * D), (1, H, P, D), (N, H, P, D), (N, H, P, D)))
def cat_of_features(q, shared, own, v):
    return sdpa(q, torch.cat([shared.expand(N, -1, -1, -1), own], -1), v)


@look_alike("never", ((N, H, M, D), (N, H, 1, D), (N, H, 1, D)))
def one_key_expanded_to_all(q, k, v):
    return sdpa(q, k.expand(-1, -1, P, -1), v.expand(-1, -1, P, -1))


@look_alike("never", ((N, H, M, D), (N, H, P, D), (N, H, P, D)))
def keys_repeated(q, k, v):
    return sdpa(q, k.repeat_interleave(T, 2), v.repeat_interleave(T, 2))


@look_alike("never", ((P, H, N, D), (1, H, P, D), (1, H, P, D)))
def attention_over_the_batch_axis(q, k, v):
    keys = k.expand(N, -1, -1, -1).permute(2, 1, 0, 3)
    return sdpa(q, keys, v.expand(N, -1, -1, -1).permute(2, 1, 0, 3))


@look_alike("never", ((B, H, M, D), SUFFIX, SUFFIX))
def expanded_queries(q, k, v):
    return sdpa(q.repeat_interleave(T, 0), k, v)


@look_alike("never", ((1, H, P, D), SUFFIX, SUFFIX))
def prefix_used_as_queries(prefix, k, v):
    return sdpa(prefix.expand(N, -1, -1, -1), k, v)


@look_alike("either", ((1, H, P, D),))
def prefix_used_as_everything(prefix):
    wide = prefix.expand(N, -1, -1, -1)
    return sdpa(wide, wide, wide)


# Nothing to share.


@look_alike("never", ((B, H, M, D), PREFIX, (B, H, S, D), PREFIX, (B, H, S, D)))
def one_branch_each(q, kp, ks, vp, vs):
    k = torch.cat([kp.repeat_interleave(1, 0), ks], 2)
    return sdpa(q, k, torch.cat([vp.repeat_interleave(1, 0), vs], 2))


@look_alike("never", ((1, H, M, D), (1, H, P, D), (1, H, P, D)), dynamic=(False, True))
def expanded_to_a_batch_of_one(q, k, v):
    n = q.shape[0]
    return sdpa(q, k.expand(n, -1, -1, -1), v.expand(n, -1, -1, -1))


@look_alike("never", (QUERY, (N, H, P, D), SUFFIX, (N, H, P, D), SUFFIX))
def a_plain_cache(q, kp, ks, vp, vs):
    return sdpa(q, torch.cat([kp, ks], 2), torch.cat([vp, vs], 2))

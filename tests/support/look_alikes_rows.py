"""Look-alikes: expansions of heads, orders of rows, sizes that are equal by accident."""

from __future__ import annotations

import torch
from torch import Tensor

from .look_alikes import (
    STANDARD,
    SUFFIX,
    D,
    G,
    H,
    M,
    N,
    P,
    T,
    joined,
    look_alike,
    repeat_kv,
    sdpa,
)

# Head expansion only.


@look_alike("never", ((N, H * G, M, D), SUFFIX, SUFFIX), dynamic=(False, True))
def gqa_heads_only(q, k, v):
    return sdpa(q, repeat_kv(k), repeat_kv(v))


@look_alike("never", ((1, H * G, M, D), (1, H, P, D), (1, H, P, D)))
def heads_expanded_batch_of_one(q, k, v):
    return sdpa(q, repeat_kv(k), repeat_kv(v))


@look_alike("never", ((N, T, M, D), (N, 1, P, D), (N, 1, P, D)))
def one_head_expanded_to_as_many_as_branches(q, k, v):
    return sdpa(q, k.expand(-1, T, -1, -1), v.expand(-1, T, -1, -1))


@look_alike("never", ((N, H * T, M, D), (N, H, P, D), (N, H, P, D)))
def heads_repeat_interleaved(q, k, v):
    return sdpa(q, k.repeat_interleave(T, 1), v.repeat_interleave(T, 1))


@look_alike("never", ((N, H * T, M, D), (N, H, P, D), (N, H, P, D)))
def heads_tiled(q, k, v):
    return sdpa(q, k.repeat(1, T, 1, 1), v.repeat(1, T, 1, 1))


# The order of the rows.


@look_alike("either", dynamic=(False, True))
def repeat_where_interleave_is_meant(q, kp, ks, vp, vs):
    k = torch.cat([kp.repeat(T, 1, 1, 1), ks], 2)
    return sdpa(q, k, torch.cat([vp.repeat(T, 1, 1, 1), vs], 2))


@look_alike("either")
def tiled_by_expand(q, kp, ks, vp, vs):
    k = torch.cat([kp[None].expand(T, -1, -1, -1, -1).reshape(N, H, P, D), ks], 2)
    return sdpa(q, k, torch.cat([vp[None].expand(T, -1, -1, -1, -1).reshape(N, H, P, D), vs], 2))


@look_alike("never")
def k_interleaved_v_tiled(q, kp, ks, vp, vs):
    return sdpa(q, joined(kp, ks), torch.cat([vp.repeat(T, 1, 1, 1), vs], 2))


@look_alike("either")
def rows_flipped_after_the_expand(q, kp, ks, vp, vs):
    k = torch.cat([kp.repeat_interleave(T, 0).flip(0), ks], 2)
    return sdpa(q, k, torch.cat([vp.repeat_interleave(T, 0).flip(0), vs], 2))


@look_alike("either")
def rows_rolled_after_the_expand(q, kp, ks, vp, vs):
    k = torch.cat([kp.repeat_interleave(T, 0).roll(1, 0), ks], 2)
    return sdpa(q, k, torch.cat([vp.repeat_interleave(T, 0).roll(1, 0), vs], 2))


@look_alike("never", STANDARD, lambda: torch.tensor([0, 0, 0, 1, 1, 1]), dynamic=(False, True))
def gather_by_an_input(q, kp, ks, vp, vs, rows):
    return sdpa(q, torch.cat([kp[rows], ks], 2), torch.cat([vp[rows], vs], 2))


@look_alike("never", STANDARD, lambda: torch.tensor([0, 1, 1, 0, 1, 0]))
def index_select_by_an_input(q, kp, ks, vp, vs, rows):
    k = torch.cat([kp.index_select(0, rows), ks], 2)
    return sdpa(q, k, torch.cat([vp.index_select(0, rows), vs], 2))


@look_alike("either")
def constant_rows_that_are_no_repeat(q, kp, ks, vp, vs):
    rows = torch.tensor([0, 1, 1, 0, 1, 0])
    return sdpa(q, torch.cat([kp[rows], ks], 2), torch.cat([vp[rows], vs], 2))


@look_alike("either", STANDARD, lambda: torch.tensor([3, 0, 5, 1, 2, 4]))
def beams_reordered_after_the_expand(q, kp, ks, vp, vs, beams):
    return sdpa(q, joined(kp, ks)[beams], joined(vp, vs)[beams])


@look_alike("never", ((T * T, T, M, D), (T, T, P, D), (T, T, P, D)))
def branches_and_heads_swapped_under_the_reshape(q, k, v):
    def mixed(x: Tensor) -> Tensor:
        return x[:, None].expand(-1, T, -1, -1, -1).transpose(1, 2).reshape(T * T, T, P, D)

    return sdpa(q, mixed(k), mixed(v))


@look_alike("never", ((4, 6, M, D), (2, 6, P, D), (2, 6, P, D)))
def rows_and_heads_regrouped(q, k, v):
    def mixed(x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(4, 6, P, D)

    return sdpa(q, mixed(k), mixed(v))


# Equal sizes by accident.


@look_alike("never", ((3, 3, 3, 3), (3, 3, 3), (3, 3, 3)), dynamic=(False, True))
def everything_is_three_heads_expanded(q, k, v):
    return sdpa(q, k[:, None].expand(3, 3, 3, 3), v[:, None].expand(3, 3, 3, 3))


@look_alike("either", ((3, 3, 3, 3), (3, 3, 3), (3, 3, 3)))
def everything_is_three_rows_expanded(q, k, v):
    return sdpa(q, k[None].expand(3, 3, 3, 3), v[None].expand(3, 3, 3, 3))


@look_alike("never", ((3, 3, 3, 3), (3, 3, 3), (3, 3, 3)))
def everything_is_three_keys_expanded(q, k, v):
    return sdpa(q, k[:, :, None].expand(3, 3, 3, 3), v[:, :, None].expand(3, 3, 3, 3))


@look_alike("never", ((4, 4, 4, 4), (4, 4, 4, 4), (4, 4, 4, 4)))
def everything_is_four_and_transposed(q, k, v):
    return sdpa(q, k.transpose(0, 1), v.transpose(0, 1))


@look_alike("never", ((2, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2)))
def everything_is_two_and_nothing_shared(q, kp, ks, vp, vs):
    return sdpa(q, torch.cat([kp, ks], 2), torch.cat([vp, vs], 2))

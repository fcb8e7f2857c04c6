"""What attention gives where one token alone keeps its cached key and value, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def change(
    q: Tensor, k: Tensor, v: Tensor, k_cached: Tensor, v_cached: Tensor, seen: Tensor, scale: float
) -> Tensor:
    """[L]: how far the outputs of q [H, F, D] over keys [H, L, D] move; `seen` is bool [F, L]."""

    def output(k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf)
        return scores.softmax(-1).nan_to_num(0) @ v

    moves = []
    for j in range(k.shape[1]):
        one = torch.arange(k.shape[1])[:, None] == j
        old = output(torch.where(one, k_cached, k), torch.where(one, v_cached, v))
        moves.append((old - output(k, v)).norm(dim=-1).amax(-1).sum())
    return torch.stack(moves)

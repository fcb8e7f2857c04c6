"""An attention over keys of a system, of requests and of branches, with needles in each."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Requests, branches, heads, queries, features; keys of system, request and branch.
B, T, H, M, D = 3, 2, 2, 3, 8
N = B * T
SYSTEM, REQUEST, OWN = 5, 13, 7


def inputs():
    """q, and K = V of system [1], request [B] and branch [N], with needles in each."""
    q = torch.randn(N, H, M, D)
    system, request = torch.randn(1, H, SYSTEM, D), torch.randn(B, H, REQUEST, D)
    own = torch.randn(N, H, OWN, D)
    system[:, :, 2], request[:, :, -1], own[:, :, 0] = q[:1, :, 0], q[::T, :, 1], q[:, :, 2]
    return [q, system, request, own]


def paged():
    """An attention like it whose request keys are pages of a pool, and that pool [20, H, 4, D]."""
    size, pages = 4, 3
    pool, table = torch.randn(20, H, size, D), torch.randperm(20)[: B * pages].view(B, pages)

    def fn(q, pool, system, own):
        spread = table.repeat_interleave(T, 0)
        prefix = pool[spread].permute(0, 2, 1, 3, 4).reshape(N, H, pages * size, D)
        kv = torch.cat([system.expand(N, -1, -1, -1), prefix, own], 2)
        return F.scaled_dot_product_attention(q, kv, kv)

    return fn, pool


def attention(q, system, request, own, mask=None, order="interleave"):
    """Branches of a request are neighbours ("interleave"), or those of one number ("repeat")."""
    batch, times = q.shape[0], q.shape[0] // request.shape[0]
    spread = request.repeat_interleave(times, 0)
    if order == "repeat":
        spread = request.repeat(times, 1, 1, 1)
    kv = torch.cat([system.expand(batch, -1, -1, -1), spread, own], 2)
    return F.scaled_dot_product_attention(q, kv, kv, mask)

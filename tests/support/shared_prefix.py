"""The smallest programs that share a prefix, for tests of what surrounds the rewrite."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Requests, branches of each, heads, queries, prefix and suffix keys, features.
B, T, H, M, P, S, D = 2, 4, 3, 5, 37, 7, 16

sdpa = F.scaled_dot_product_attention


def inputs(prefix: int = P, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q [B*T, H, M, D], prefix [B, H, prefix, D] and suffix [B*T, H, S, D] of keys and values."""
    shapes = [(B * T, H, M, D), (B, H, prefix, D), (B * T, H, S, D)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def joined(prefix: Tensor, suffix: Tensor) -> Tensor:
    """The prefix of each request given to its branches, then what each branch has of its own."""
    return torch.cat([prefix.repeat_interleave(suffix.shape[0] // prefix.shape[0], 0), suffix], 2)


def attention(q: Tensor, prefix: Tensor, suffix: Tensor) -> Tensor:
    """One attention over a shared prefix."""
    kv = joined(prefix, suffix)
    return sdpa(q, kv, kv)


def unshared(q: Tensor, prefix: Tensor, suffix: Tensor) -> Tensor:
    """One attention over nothing shared."""
    return sdpa(q, suffix, suffix)


def stack(count: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A model of `count` layers, each with an attention in the same line."""

    def layers(q: Tensor, prefix: Tensor, suffix: Tensor) -> Tensor:
        for layer in range(count):
            kv = joined(prefix * (layer + 2.0), suffix)
            q = q + sdpa(q.sin(), kv, kv)
        return q

    return layers

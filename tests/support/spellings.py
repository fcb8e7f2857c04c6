"""What hand-written attention is made of in tests: sizes, inputs, and the list of all spellings.

Sizes differ from one another: N rows, H heads, M queries, L keys, D features, E value features.
Importing `spellings_scores`, `spellings_matmuls` and `spellings_sinks` fills the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

N, H, M, L, D, E = 5, 2, 3, 7, 16, 11
INF = math.inf
MIN = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Spelling:
    """A function of its inputs and what must be found in it.

    Attributes:
        fn, inputs: the function, and a maker of its inputs for a dtype.
        site: summary of the site, see `summary`.
    """

    fn: Callable[..., Any]
    inputs: Callable[[torch.dtype], tuple[Any, ...]]
    site: str


SPELLINGS: dict[str, Spelling] = {}
BHQD = "nhqd nhdk nhkd"


def spelling(
    site: str, inputs: Callable[[torch.dtype], tuple[Any, ...]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS[fn.__name__] = Spelling(fn, inputs, site)
        return fn

    return register


def qkv(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q [N, H, M, D], k [N, H, L, D], v [N, H, L, E]; scores are spread, values are large."""
    q, k = 2 * torch.randn(N, H, M, D), torch.randn(N, H, L, D)
    return tuple(x.to(dtype) for x in (q, k, 4 * torch.randn(N, H, L, E)))


def batch_first(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v as [N, tokens, H, D]."""
    return tuple(x.transpose(1, 2).contiguous() for x in qkv(dtype))


def keep(*shape: int) -> Tensor:
    """A random bool mask in which every row sees its first key."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


def with_mask(*shape: int, blind: bool = False) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    """q, k, v and a bool mask; `blind` hides every key from one query."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        mask = keep(*shape)
        if blind:
            mask[..., 1, :] = False
        return (*qkv(dtype), mask)

    return make


def with_bias(*shape: int) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    """q, k, v and a floating bias."""
    return lambda dtype: (*qkv(dtype), torch.randn(shape).to(dtype))

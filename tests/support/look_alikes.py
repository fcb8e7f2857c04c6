"""Small programs that look like attention over a shared prefix and are not, or not quite.

`CORPUS` holds them by name, once the modules `look_alikes_*` are imported. `verdict` is "never"
where a rewrite would be wrong or has nothing to share, and "either" where it is legal, so only the
numbers are judged. None of the functions names a dtype: called with float64 inputs each is its own
reference.

Sizes: B requests, T branches of each, N = B * T rows, P prefix and S suffix keys, M queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

B, T, H, G, P, S, M, D = 2, 3, 2, 2, 9, 4, 5, 8
N = B * T

Shape: TypeAlias = "tuple[int, ...]"
sdpa = F.scaled_dot_product_attention

QUERY = (N, H, M, D)
PREFIX = (B, H, P, D)
SUFFIX = (N, H, S, D)
STANDARD = (QUERY, PREFIX, SUFFIX, PREFIX, SUFFIX)


@dataclass(frozen=True)
class LookAlike:
    """One program; `shapes` are of its float inputs, `more` builds the others."""

    fn: Callable[..., Any]
    verdict: Literal["never", "either"]
    shapes: tuple[Shape, ...]
    more: tuple[Callable[[], Tensor], ...] = ()
    dynamic: tuple[bool, ...] = (False,)

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Inputs with large scores, so that every key matters to somebody; the same every time."""
        random = torch.Generator().manual_seed(len(self.fn.__name__))
        floats = [torch.randn(s, generator=random).mul(1.5).to(dtype) for s in self.shapes]
        return floats + [build() for build in self.more]


CORPUS: dict[str, LookAlike] = {}


def look_alike(
    verdict: Literal["never", "either"],
    shapes: tuple[Shape, ...] = STANDARD,
    *more: Callable[[], Tensor],
    dynamic: tuple[bool, ...] = (False,),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the corpus."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CORPUS[fn.__name__] = LookAlike(fn, verdict, shapes, more, dynamic)
        return fn

    return add


def joined(prefix: Tensor, suffix: Tensor) -> Tensor:
    """The pattern itself: a prefix a request, expanded to its branches, and a suffix a branch."""
    return torch.cat([prefix.repeat_interleave(T, 0), suffix], 2)


def repeat_kv(x: Tensor) -> Tensor:
    """GQA head expansion as Hugging Face writes it."""
    n, heads, length, d = x.shape
    return x[:, :, None].expand(n, heads, G, length, d).reshape(n, heads * G, length, d)

"""A model in plain torch whose layers are marked: it compiles in a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.backend import eager_cascade, last_compilation
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from torch_cascade import reuse_kv
from torch_cascade.compiler.record import BlendRecord

T, WIDTH = 14, 24


class Plain(nn.Module):
    """Three layers in plain torch; what follows the last one is given."""

    def __init__(
        self, layers: int = 3, then: Callable[[Tensor], Any] = lambda x: x[:, -1:]
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.then = then

    def forward(
        self,
        x: Tensor,
        cached: list[tuple[Tensor, Tensor]],
        fresh: Tensor,
        chunks: Tensor | None = None,
        between: Callable[[Tensor, int], Tensor] = lambda x, layer: x,
    ) -> Any:
        """x [N, T, WIDTH]; `between` follows each layer, `then` the last."""
        for number, qkv in enumerate(self.qkv):
            heads = qkv(x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
            q, k, v = heads.unbind(0)
            k, v = reuse_kv(k, v, *cached[number], fresh, chunks)
            x = x + sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = between(x, number)
        return self.then(x)


def inputs(batch: int = 1, layers: int = 3, tokens: int = T) -> tuple[Any, ...]:
    """x, the cached keys and values of each layer, and the two last tokens as fresh ones."""
    shape = batch, 4, tokens, WIDTH // 4
    cached = [(torch.randn(shape), torch.randn(shape)) for _ in range(layers)]
    fresh = torch.tensor([[tokens - 2, tokens - 1]]).repeat(batch, 1)
    return torch.randn(batch, tokens, WIDTH), cached, fresh


def compiled(model: Any, *args: Any, **options: Any) -> tuple[Any, BlendRecord | None]:
    """The result, and the record of the blend."""
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(model, backend=eager_cascade(**{"decide": "always"} | options))(*args)
    return got, last_compilation().blend

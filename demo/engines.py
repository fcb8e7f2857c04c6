"""The engines that decode side by side: cascade, and what stock users run.

All start from one prefill of the prompt without its last token and are fed one token a branch and
step, [N, 1]. The stock caches are expanded to N rows once, before the first step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_cascade.runtime.prefix_cache import SharedPrefixCache

BACKEND = "cascade"
STOCK_BACKEND = "inductor"

# Steps in which something may still compile: the growing cache needs two.
WARM_UP = 3


@dataclass
class Engine:
    """One way to decode, and what it did.

    Attributes:
        name: for tables.
        forward: the model, compiled or not.
        cache: its keys and values.
        stock: True for what can be had without this package.
        seconds: time of every step.
        tokens: what it chose, int64 [N] a step.
        margins: how far the chosen token was ahead of the runner-up, [N] a step, in logits.
    """

    name: str
    forward: Callable[..., Any]
    cache: Any
    stock: bool = True
    seconds: list[float] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    margins: list[Tensor] = field(default_factory=list)

    def step(self, argument: str, last: Tensor, noise: Tensor, temperature: float) -> Tensor:
        """Feed one token a branch, [N, 1]; choose the next ones from logits plus `noise` [N, V].

        Returns:
            int64 [N, 1].
        """
        _wait(last.device)
        begin = time.perf_counter()
        logits = self.forward(input_ids=last, use_cache=True, **{argument: self.cache}).logits
        _wait(last.device)
        self.seconds.append(time.perf_counter() - begin)
        best = torch.topk(logits[:, -1].float() / temperature + noise, 2)
        self.tokens.append(best.indices[:, 0])
        self.margins.append((best.values[:, 0] - best.values[:, 1]) * temperature)
        return best.indices[:, :1].contiguous()  # other strides would compile again

    def kv_bytes(self) -> int:
        """Bytes of keys and values that the cache holds."""
        states = [t for layer in self.cache.layers for t in _states(layer)]
        return sum(t.numel() * t.element_size() for t in states)

    def steady(self) -> list[float]:
        """Step times once everything is compiled."""
        return self.seconds[WARM_UP:]

    def compile_seconds(self) -> float:
        """What the first steps took longer than the others."""
        usual = statistics.median(self.steady())
        return max(0.0, sum(self.seconds[:WARM_UP]) - WARM_UP * usual)


def _states(layer: Any) -> list[Tensor]:
    return [v for v in vars(layer).values() if isinstance(v, Tensor) and v.dim() == 4]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(model: Any, prompt: Tensor, branches: int, new_tokens: int) -> list[Engine]:
    """Prefill once and make the four engines, cascade first.

    Args:
        model: a transformers causal language model.
        prompt: int64 [1, L].
        branches: N.
        new_tokens: steps to leave room for.

    Returns:
        cascade first, the eager reference last.
    """
    from transformers import DynamicCache, StaticCache

    shared = SharedPrefixCache.prefill(model, prompt, branches, max_suffix=new_tokens)
    length = shared.get_max_length()
    growing = [_expanded(shared, DynamicCache(config=model.config)) for _ in range(2)]
    static = _expanded(shared, StaticCache(config=model.config, max_cache_len=length))
    cascade = torch.compile(model, backend=BACKEND)
    inductor = torch.compile(model, backend=STOCK_BACKEND)
    return [
        Engine("cascade", cascade, shared, stock=False),
        Engine("inductor dynamic", inductor, growing[0]),
        Engine("inductor static", inductor, static),
        Engine("eager dynamic", model, growing[1]),
    ]


def _expanded(shared: SharedPrefixCache, cache: Any) -> Any:
    """Fill a stock cache with the prefix repeated for every branch."""
    for index, layer in enumerate(shared.layers):
        prefix = (layer.prefix_keys, layer.prefix_values)
        cache.update(*(t.repeat_interleave(layer.branches, 0) for t in prefix), index)
    return cache

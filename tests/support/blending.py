"""Prompts out of chunks, and what a full prefill makes of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.hf_models import VOCABULARY
from torch import Tensor
from transformers import DynamicCache

from torch_cascade.runtime.prefix_cache import cache_argument


def ids(count: int) -> list[int]:
    """Tokens that are no special ones."""
    return [int(i) for i in torch.randint(3, VOCABULARY, (count,))]


def full_prefill(model: Any, row: list[int], positions: Tensor | None = None) -> tuple[Tensor, Any]:
    """Logits [L, V] and the cache of a prompt, computed plainly."""
    cache = DynamicCache()
    inputs = {cache_argument(model): cache}
    if positions is not None:
        inputs["position_ids"] = positions[None]
    with torch.no_grad():
        logits = model(torch.tensor([row]), use_cache=True, **inputs).logits[0]
    return logits, cache


def twin(model: Any) -> Any:
    """The same weights in float64."""
    return copy.deepcopy(model).double()


def cached_at(blended: Any, layer: int, part: int, row: int = 0) -> tuple[Tensor, Tensor]:
    """The re-rotated keys and the values [H, T, D] of the row's cached chunk of that number."""
    cache = blended.past_key_values
    keys, values = cache.rotated(layer)
    mine = cache.layers[layer].reuse.chunks[row] == part
    return keys[row][:, mine], values[row][:, mine]

"""Keys and values of lone tokens at chosen positions, computed by the model itself.

A token alone in its sequence attends to itself only, so its hidden states do not depend on its
position, in any layer: its keys at two positions differ by the rotation and by nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from torch_cascade.runtime.positions import RopeTable
from torch_cascade.runtime.prefix_cache import cache_argument
from torch_cascade.runtime.rotary_modules import Rotary

_TOKENS = 32
# Near positions first: a model with learned positions has few, and is refused by these.
NEAR = (0, 1, 5)
_FAR = (17, 1024)
_FARTHEST = 1 << 17


class RotationError(ValueError):
    """Keys of this model cannot be moved to other positions."""


@dataclass(frozen=True, eq=False)
class Probe:
    """What a model computed for some lone tokens, all at one position.

    Attributes:
        position: of all the tokens.
        tables: of each embedding of the model, as read before the forward.
        keys: float64 [tokens, H, 1, D], one a layer.
        values: float64 [tokens, H, 1, Dv], one a layer.
        dtype: what the model computed them in.
    """

    position: int
    tables: tuple[RopeTable, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    dtype: torch.dtype


def check_model(model: nn.Module) -> None:
    """Refuse what is no decoder with a cache of keys and values.

    Raises:
        TypeError: no transformers model.
        RotationError: in training mode, an encoder-decoder, with positions of several coordinates,
            or with recurrent layers.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"model must be a transformers decoder, got {type(model).__name__}")
    if model.training:
        raise RotationError("the model is in training mode: call model.eval()")
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise RotationError("only decoders: the keys of an encoder-decoder have two meanings")
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "mrope_section" in rope or any(hasattr(m, "mrope_section") for m in model.modules()):
        raise RotationError("positions of this model have several coordinates (mrope)")
    kinds = {type(layer) for layer in DynamicCache(config=config.get_text_config()).layers}
    others = sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
    if others:
        raise RotationError(f"the model's cache holds more than keys and values: {others}")


def takes_positions(model: nn.Module) -> bool:
    """Whether a forward can be told positions; else they count from 0."""
    return "position_ids" in inspect.signature(model.forward).parameters


def far_positions(model: nn.Module, rotaries: Sequence[Rotary]) -> tuple[int, ...]:
    """Positions to try: up to twice the model's longest sequence, or to the end of its tables."""
    config: Any = model.config
    longest = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    limits = [rotary.limit for rotary in rotaries if rotary.limit is not None]
    last = min([max(2 * longest, _FARTHEST), *limits]) - 1
    return (*(p for p in _FAR if p < last), last)


def run_probes(
    model: nn.Module, rotaries: Sequence[Rotary], positions: Sequence[int]
) -> tuple[Probe, ...]:
    """Run some tokens at each position.

    Raises:
        RotationError: what the cache then holds are not the keys of these tokens.
    """
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    device, vocabulary = embedding.weight.device, embedding.weight.shape[0]
    ids = torch.linspace(1, vocabulary - 1, _TOKENS, device=device).long()[:, None]
    if not takes_positions(model):
        return _in_a_row(model, rotaries, ids, positions)
    found = []
    for position in positions:
        tables = tuple(rotary.table(position + 1) for rotary in rotaries)
        pairs = _run(model, ids, position_ids=torch.full_like(ids, position))
        found.append(_probe(position, tables, pairs))
    return tuple(found)


def _in_a_row(
    model: nn.Module, rotaries: Sequence[Rotary], ids: Tensor, positions: Sequence[int]
) -> tuple[Probe, ...]:
    """For a forward without `position_ids`: a token repeated attends to copies of itself only."""
    length = max(positions) + 1
    tables = tuple(rotary.table(length) for rotary in rotaries)
    pairs = _run(model, ids.expand(-1, length).contiguous())
    return tuple(
        _probe(p, tables, [(k[:, :, p : p + 1], v[:, :, p : p + 1]) for k, v in pairs])
        for p in positions
    )


def _run(model: nn.Module, ids: Tensor, **inputs: Any) -> list[tuple[Tensor, Tensor]]:
    cache = DynamicCache()
    inputs |= {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = 1
    model(input_ids=ids, **inputs)
    pairs = [(layer.keys, layer.values) for layer in cache.layers if layer.is_initialized]
    if not pairs or any(k.dim() != 4 or k.shape[2] != ids.shape[1] for k, _ in pairs):
        raise RotationError(
            "the model wrote no keys [rows, heads, tokens, features] of its tokens into the cache"
        )
    return pairs


def _probe(
    position: int, tables: tuple[RopeTable, ...], pairs: list[tuple[Tensor, Tensor]]
) -> Probe:
    keys, values = zip(*((k.double(), v.double()) for k, v in pairs), strict=True)
    return Probe(position, tables, keys, values, pairs[0][0].dtype)

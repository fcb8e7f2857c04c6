"""Chunks: the keys and values that a prefill left for a piece of text, and what names them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_cascade.runtime.blend_layers import KeyValue
from torch_cascade.runtime.chunk_parts import Ids
from torch_cascade.runtime.positions import RopeTable
from torch_cascade.runtime.prefix_cache import cache_argument
from torch_cascade.runtime.rotation import ModelRotation

from transformers.cache_utils import DynamicCache  # isort: skip  (blend_layers says what to install)


@dataclass(frozen=True)
class ChunkKey:
    """What a chunk's keys and values depend on.

    Attributes:
        model: fingerprint of the model that computed them.
        ids: the chunk's tokens.
        context: the tokens before it when it was computed; () for alone.
    """

    model: str
    ids: Ids
    context: Ids = ()

    @property
    def name(self) -> str:
        """A name for the content: equal for equal content, in every process."""
        digest = hashlib.sha256(self.model.encode())
        for ids in (self.context, self.ids):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(torch.tensor(ids, dtype=torch.int64).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Chunk:
    """A piece of text with the keys and values of all of its tokens. Never written again.

    Attributes:
        key: what they depend on.
        tables: of the model's rotary embeddings when they were computed.
        layers: keys [H, T, D], rotated for positions len(key.context) and on, and values
            [H, T, Dv], a pair a layer.
    """

    key: ChunkKey
    tables: tuple[RopeTable, ...]
    layers: tuple[KeyValue, ...]

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    @property
    def position(self) -> int:
        """Of the first token when it was computed."""
        return len(self.key.context)


def capture(model: nn.Module, rotation: ModelRotation, key: ChunkKey) -> Chunk:
    """Prefill a chunk after its context, in eager mode, and keep what the cache then holds of it.

    Raises:
        ValueError: the cache does not hold every token in every layer; a token id that the model
            has not; or a context and chunk longer than the model's table of positions.
    """
    device = _check_ids(model, key)
    ids = torch.tensor([*key.context, *key.ids], device=device)[None]
    tables = rotation.tables(ids.shape[1])
    cache = DynamicCache()  # without config: its sliding layers would drop tokens
    inputs: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    accepted = inspect.signature(type(model).forward).parameters
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = 1
    with torch.no_grad():
        # The class's own: an instance's may be compiled, and would compile for every length.
        type(model).forward(model, input_ids=ids, **inputs)
    return Chunk(key, tables, _kept(cache, rotation, key))


def _check_ids(model: nn.Module, key: ChunkKey) -> torch.device:
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    largest = max(max(key.ids), max(key.context, default=0))
    if largest >= weight.shape[0]:
        raise ValueError(f"the model has {weight.shape[0]} token ids, got {largest}")
    return weight.device


def _kept(cache: Any, rotation: ModelRotation, key: ChunkKey) -> tuple[KeyValue, ...]:
    start, length = len(key.context), len(key.context) + len(key.ids)
    layers = cache.layers
    if len(layers) != len(rotation.layers) or not all(x.is_initialized for x in layers):
        raise ValueError(
            f"the model wrote keys of {sum(x.is_initialized for x in layers)} of {len(layers)} "
            f"layers, {len(rotation.layers)} were proved"
        )
    if any(layer.keys.shape[2] != length for layer in layers):
        raise ValueError(f"the model's cache dropped some of {length} tokens")
    copied = (torch.contiguous_format,)
    return tuple(
        (
            layer.keys[0, :, start:].clone(memory_format=copied[0]),
            layer.values[0, :, start:].clone(memory_format=copied[0]),
        )
        for layer in layers
    )

"""Chunks: the keys and values that a prefill left for a piece of text, and what names them."""

from __future__ import annotations

import hashlib
import inspect
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from torch_cascade.runtime.blend_layers import GrowingLayer, KeyValue
from torch_cascade.runtime.chunk_parts import Ids
from torch_cascade.runtime.positions import Frequencies, RopeTable
from torch_cascade.runtime.prefix_cache import cache_argument
from torch_cascade.runtime.rotation import ModelRotation

Dtypes: TypeAlias = tuple[tuple[torch.dtype, torch.dtype], ...]


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

    @cached_property
    def name(self) -> str:
        """A name for the content: equal for equal content, in every process."""
        digest = hashlib.sha256(self.model.encode())
        for ids in (self.context, self.ids):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(array("q", ids).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Made:
    """Tensors that a CUDA stream was told to compute.

    Attributes:
        stream: which.
        ready: the event after which they are there.
    """

    stream: torch.cuda.Stream
    ready: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> Made | None:
        """After all that the current stream was given; None on other devices than CUDA."""
        if device.type != "cuda":
            return None
        stream, event = torch.cuda.current_stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return cls(stream, event)

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Let the current stream use tensors; one that made them needs nothing."""
        stream = torch.cuda.current_stream(self.stream.device)
        if stream == self.stream:
            return
        stream.wait_event(self.ready)
        for tensor in tensors:
            tensor.record_stream(stream)


@dataclass(frozen=True, eq=False)
class Chunk:
    """A piece of text with the keys and values of all of its tokens. Never written again.

    Attributes:
        key: what they depend on.
        tables: of the model's rotary embeddings when they were computed, on the CPU.
        layers: keys [H, T, D], rotated for positions len(key.context) and on, and values
            [H, T, Dv], a pair a layer.
        made: on CUDA, how they came to be there.
    """

    key: ChunkKey
    tables: tuple[RopeTable, ...]
    layers: tuple[KeyValue, ...]
    made: Made | None = None

    @cached_property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    @cached_property
    def dtypes(self) -> Dtypes:
        """Of each layer's keys and values."""
        return tuple((keys.dtype, values.dtype) for keys, values in self.layers)

    @cached_property
    def frequencies(self) -> bytes:
        """Equal where `tables` are."""
        return table_bytes(self.tables)

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self.layers[0][0].device

    def layer(self, index: int) -> KeyValue:
        """Keys and values of a layer, for the current stream; not to be written."""
        pair = self.layers[index]
        if self.made is not None:
            self.made.lend(pair)
        return pair

    def lent(self) -> tuple[KeyValue, ...]:
        """Those of all layers as a row [1, H, T, D], at less cost than one by one."""
        if self.made is not None:
            self.made.lend(states for pair in self.layers for states in pair)
        return self._row

    @cached_property
    def _row(self) -> tuple[KeyValue, ...]:
        return tuple((keys[None], values[None]) for keys, values in self.layers)

    def like(self, index: int) -> KeyValue:
        """Tensors of the sizes and dtype of a layer's keys and values."""
        return self.layers[index]

    def copied_to(self, device: torch.device) -> Chunk:
        """A copy; on the CPU in pinned memory where there is CUDA to read it."""
        pairs = (self.layer(index) for index in range(len(self.layers)))
        layers = tuple((_copied(k, device), _copied(v, device)) for k, v in pairs)
        return Chunk(self.key, self.tables, layers, Made.now(device))


def table_bytes(tables: Sequence[RopeTable]) -> bytes:
    """Equal for tables of equal frequencies; `tables` on the CPU, so that nothing waits."""
    return b"".join(
        t.inv_freq.numpy().tobytes() + struct.pack("d", t.factor)
        if isinstance(t, Frequencies)
        else b"lookup"
        for t in tables
    )


def _on_host(table: RopeTable) -> RopeTable:
    if not isinstance(table, Frequencies):
        return table
    return Frequencies(table.inv_freq.float().cpu(), table.factor)


def _copied(states: Tensor, device: torch.device) -> Tensor:
    pinned = device.type == "cpu" and states.is_cuda
    out = torch.empty(states.shape, dtype=states.dtype, device=device, pin_memory=pinned)
    return out.copy_(states, non_blocking=device.type == "cuda")


def capture(model: nn.Module, rotation: ModelRotation, key: ChunkKey) -> Chunk:
    """Prefill a chunk after its context, in eager mode, and keep what the cache then holds of it.

    Raises:
        ValueError: the cache does not hold every token in every layer; a token id that the model
            has not; or a context and chunk longer than the model's table of positions.
    """
    check_ids(model, max((*key.context, *key.ids)))
    device = next(model.parameters()).device
    ids = torch.tensor([*key.context, *key.ids], device=device)[None]
    tables = tuple(_on_host(table) for table in rotation.tables(ids.shape[1]))
    # Not a DynamicCache of the model's config: its sliding layers would drop tokens.
    cache = Cache(layer_class_to_replicate=GrowingLayer)
    inputs: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    accepted = inspect.signature(type(model).forward).parameters
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = 1
    with torch.no_grad():
        # The class's own: an instance's may be compiled, and would compile for every length.
        type(model).forward(model, input_ids=ids, **inputs)
    return Chunk(key, tables, _kept(cache, rotation, key), Made.now(device))


def device_of(model: Any, wanted: torch.device | str | None) -> torch.device:
    """The device that all of a model is on.

    Raises:
        ValueError: it is on several, or not on the one that is wanted.
    """
    devices: set[torch.device] = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"the model must be on one device, got {sorted(map(str, devices))}")
    (device,) = devices
    if wanted is not None:
        asked = torch.device(wanted)
        if asked.type != device.type or asked.index not in (None, device.index):
            raise ValueError(f"device={asked}, but the model is on {device}")
    return device


def check_ids(model: Any, largest: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ValueError: the largest is too large.
    """
    known = model.get_input_embeddings().weight.shape[0]
    if largest >= known:
        raise ValueError(f"the model has {known} token ids, got {largest}")


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
    layout = torch.contiguous_format
    pairs = ((layer.keys[0, :, start:], layer.values[0, :, start:]) for layer in layers)
    return tuple((k.clone(memory_format=layout), v.clone(memory_format=layout)) for k, v in pairs)

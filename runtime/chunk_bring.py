"""Cached chunks brought to their places: at once where they are near, else by a `Load`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_cascade.runtime.blend_layers import KeyValue
from torch_cascade.runtime.chunk_files import ChunkFile, ChunkFileError
from torch_cascade.runtime.chunk_joining import assemble, check_dtypes, empty_buffers
from torch_cascade.runtime.chunk_loading import Kept, Load
from torch_cascade.runtime.chunk_parts import Span
from torch_cascade.runtime.chunk_plan import Cached, Plan
from torch_cascade.runtime.chunk_shelf import ChunkShelf
from torch_cascade.runtime.chunks import Chunk
from torch_cascade.runtime.take_kv import Pending


def bring(
    plan: Plan, layers: int, device: torch.device, shelf: ChunkShelf
) -> tuple[Sequence[KeyValue] | Sequence[Pending], Load | None]:
    """What the layers of a `BlendCache` hold, and the load to start, if one is needed.

    Args:
        plan: at least one cached chunk.
        layers: of the model.
        device: the model's.
        shelf: moves chunks up that were loaded.
    """
    near = [_is_near(placed.chunk, device) for row in plan.rows for placed in row]
    if all(near):
        return assemble(plan, layers, device), None
    load = _load(plan, layers, device, shelf)
    return load.pending, load


def _is_near(cached: Cached, device: torch.device) -> bool:
    return isinstance(cached, Chunk) and cached.device == device


def _load(plan: Plan, layers: int, device: torch.device, shelf: ChunkShelf) -> Load:
    places: dict[int, tuple[Cached, list[tuple[int, Span]]]] = {}
    for row, all_placed in enumerate(plan.rows):
        for placed in all_placed:
            entry = places.setdefault(id(placed.chunk), (placed.chunk, []))
            entry[1].append((row, placed.span))
    sources = [cached for cached, _ in places.values()]

    def finished(kept: Kept) -> None:
        for index, pairs in kept.items():
            source = sources[index]
            shelf.promote(Chunk(source.key, source.tables, tuple(pairs)))

    fetches = [
        (_Reporting(cached, shelf), spans, not _is_near(cached, device) and shelf.wants(cached))
        for cached, spans in places.values()
    ]
    check_dtypes(plan)
    buffers = empty_buffers(plan, layers, device, zero=True)
    return Load(fetches, buffers, finished)


class _Reporting:
    """A source whose corrupted file is not used again."""

    def __init__(self, cached: Cached, shelf: ChunkShelf) -> None:
        self._cached, self._shelf = cached, shelf

    def layer(self, index: int) -> KeyValue:
        """Keys and values of a layer."""
        try:
            return self._cached.layer(index)
        except ChunkFileError as error:
            if isinstance(self._cached, ChunkFile):
                self._shelf.refuse(self._cached.key, error)
            raise

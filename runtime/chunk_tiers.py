"""The chunks in the memory of one device: up to a budget, the least recently used leave first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from torch_cascade.runtime.chunks import Chunk


@dataclass(eq=False)
class Tier:
    """The chunks in the memory of one device. Not locked: the store does that.

    Attributes:
        name: for reports: "gpu" or "cpu".
        device: where the chunks are.
        budget: bytes; None for no limit.
        hits: how many chunks of prompts were found here.
        evictions: how many chunks have left.
        used: bytes.
    """

    name: str
    device: torch.device
    budget: int | None
    hits: int = 0
    evictions: int = 0
    used: int = 0
    _chunks: OrderedDict[str, Chunk] = field(default_factory=OrderedDict)

    def __contains__(self, name: str) -> bool:
        return name in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, name: str) -> Chunk | None:
        """The chunk, from now on the most recently used."""
        chunk = self._chunks.get(name)
        if chunk is not None:
            self._chunks.move_to_end(name)
        return chunk

    def fits(self, nbytes: int) -> bool:
        """Whether the whole budget is enough for it."""
        return self.budget is None or nbytes <= self.budget

    def put(self, chunk: Chunk) -> list[Chunk]:
        """Keep a chunk that fits; the chunks that had to leave for it, oldest first."""
        self.discard(chunk.key.name)
        self._chunks[chunk.key.name] = chunk
        self.used += chunk.nbytes
        evicted = []
        while self.budget is not None and self.used > self.budget:
            oldest = next(iter(self._chunks))
            evicted.append(self._chunks[oldest])
            self.discard(oldest)
        self.evictions += len(evicted)
        return evicted

    def discard(self, name: str) -> None:
        """Forget a chunk, if it is here."""
        chunk = self._chunks.pop(name, None)
        if chunk is not None:
            self.used -= chunk.nbytes

    def names(self) -> list[str]:
        """From the least to the most recently used."""
        return list(self._chunks)

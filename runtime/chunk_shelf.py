"""Where the chunks of a store are: in the memory of the GPU, of the host, and on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from torch_cascade.runtime.chunk_files import ChunkFile, ChunkFileError, ChunkFolder
from torch_cascade.runtime.chunk_tiers import Tier
from torch_cascade.runtime.chunks import Chunk, ChunkKey
from torch_cascade.runtime.positions import RopeTable


class ChunkShelf:
    """Chunks by their keys. Safe for threads; the folder also for processes.

    A new chunk goes to the first tier that it fits into, and to disk at once. A chunk that is used
    moves up to the first tier. What leaves a tier for it goes on to the next, unless it is there
    already. What is on disk leaves memory for nothing.

    Attributes:
        tiers: of memory, the fastest first.
        folder: on disk; None for no disk.
        disk_hits: how many chunks of prompts were found there only.
        misses: how many parts of prompts were not found.
        refused: what was wrong with files, newest last.
    """

    def __init__(self, tiers: Sequence[Tier], folder: ChunkFolder | None) -> None:
        """Start with empty tiers and what the folder holds."""
        self.tiers = tuple(tiers)
        self.folder = folder
        self.disk_hits = 0
        self.misses = 0
        self.refused: list[str] = []
        self._bad: set[str] = set()
        self._lock = threading.RLock()

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        """Let the system read the files of chunks that are in no memory, all at once."""
        if self.folder is None:
            return
        with self._lock:
            missing = {key.name: key for key in keys if not self._in_memory(key)}
            wanted = [key for name, key in missing.items() if name not in self._bad]
        for key in wanted:
            self.folder.prefetch(key)

    def _in_memory(self, key: ChunkKey) -> bool:
        return any(key.name in tier for tier in self.tiers)

    def find_first(
        self, keys: Sequence[ChunkKey], model_tables: Sequence[RopeTable]
    ) -> tuple[Chunk | ChunkFile, str] | None:
        """The first chunk that is here, with the name of its tier; None for a miss.

        It is from now on the most recently used.
        """
        found = next((f for key in keys if (f := self._find(key, model_tables))), None)
        if found is None:
            with self._lock:
                self.misses += 1
        return found

    def _find(
        self, key: ChunkKey, model_tables: Sequence[RopeTable]
    ) -> tuple[Chunk | ChunkFile, str] | None:
        with self._lock:
            for tier in self.tiers:
                chunk = tier.get(key.name)
                if chunk is not None:
                    tier.hits += 1
                    return chunk, tier.name
        file = self.open(key, model_tables)
        if file is None:
            return None
        with self._lock:
            self.disk_hits += 1
        return file, "disk"

    def holds(self, key: ChunkKey, model_tables: Sequence[RopeTable]) -> bool:
        """Whether the chunk is anywhere, and then the most recently used."""
        with self._lock:
            if any([tier.get(key.name) is not None for tier in self.tiers]):
                return True
        return self.open(key, model_tables) is not None

    def open(self, key: ChunkKey, model_tables: Sequence[RopeTable]) -> ChunkFile | None:
        """The chunk's file; None, and a reason in `refused`, where it is of no use."""
        if self.folder is None or key.name in self._bad:
            return None
        try:
            return self.folder.open(key, model_tables)
        except ChunkFileError as error:
            self.refuse(key, error)
            return None

    def refuse(self, key: ChunkKey, error: ChunkFileError) -> None:
        """Do not use this file again until it is written anew."""
        with self._lock:
            self._bad.add(key.name)
            self.refused.append(str(error))

    def put(self, chunk: Chunk) -> bool:
        """Keep a new chunk; false if it is too large for everything.

        Raises:
            OSError: the file cannot be written; the chunk is then in memory only.
        """
        with self._lock:
            fitting = [i for i, tier in enumerate(self.tiers) if tier.fits(chunk.nbytes)]
            if fitting:
                self._put(fitting[0], chunk)
        if self.folder is None:
            return bool(fitting)
        written = self.folder.write(chunk)
        with self._lock:
            self._bad.discard(chunk.key.name)
        return bool(fitting) or written

    def promote(self, chunk: Chunk) -> None:
        """Keep a used chunk in every memory tier that it fits into, the fastest included."""
        with self._lock:
            for index in reversed(range(len(self.tiers))):
                tier = self.tiers[index]
                if tier.fits(chunk.nbytes) and chunk.key.name not in tier:
                    self._put(index, chunk)

    def wants(self, cached: Chunk | ChunkFile) -> bool:
        """Whether `promote` would move it."""
        first = next((tier for tier in self.tiers if tier.fits(cached.nbytes)), None)
        return first is not None and cached.key.name not in first

    def _put(self, index: int, chunk: Chunk) -> None:
        tier = self.tiers[index]
        held = chunk if chunk.device == tier.device else chunk.copied_to(tier.device)
        for evicted in tier.put(held):
            self._demote(index + 1, evicted)

    def _demote(self, index: int, chunk: Chunk) -> None:
        """To the next tier that it fits into, if it is not there; where there is none, away."""
        for lower in range(index, len(self.tiers)):
            tier = self.tiers[lower]
            if chunk.key.name in tier:
                return
            if tier.fits(chunk.nbytes):
                self._put(lower, chunk)
                return


def make_tiers(device: torch.device, gpu_bytes: int | None, cpu_bytes: int | None) -> list[Tier]:
    """The memory tiers of a model on `device`; none for a budget of 0.

    Raises:
        TypeError: a budget is no integer.
        ValueError: it is negative, or one for a GPU where the model is on a CPU.
    """
    for name, budget in (("gpu_bytes", gpu_bytes), ("cpu_bytes", cpu_bytes)):
        check_budget(name, budget)
    cpu = Tier("cpu", torch.device("cpu"), cpu_bytes)
    host = [] if cpu_bytes == 0 else [cpu]
    if device.type == "cpu":
        if gpu_bytes:
            raise ValueError(f"gpu_bytes={gpu_bytes}, but the model is on the CPU")
        return host
    return host if gpu_bytes == 0 else [Tier("gpu", device, gpu_bytes), *host]


def check_budget(name: str, budget: int | None) -> None:
    """Refuse what is no number of bytes.

    Raises:
        TypeError: no integer.
        ValueError: negative.
    """
    if budget is None:
        return
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise TypeError(f"{name} must be an integer number of bytes or None, got {budget!r}")
    if budget < 0:
        raise ValueError(f"{name} must not be negative, got {budget}")

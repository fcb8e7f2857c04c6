"""Ways to the first token of a prompt made of cached chunks and a question."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_cascade.benchmarks import arms
from torch_cascade.benchmarks.decode import wait
from torch_cascade.runtime.chunk_store import ChunkStore
from torch_cascade.runtime.prefix_cache import cache_argument

SOURCES = ("gpu", "cpu", "disk")


@dataclass(frozen=True)
class Prompt:
    """A prompt: cached chunks, then a question that is not.

    Attributes:
        chunks: int64 [T] each, on the CPU.
        question: int64 [T].
    """

    chunks: tuple[Tensor, ...]
    question: Tensor

    @classmethod
    def draw(cls, length: int, chunk: int, question: int, vocabulary: int, seed: int) -> Prompt:
        """Random tokens: chunks of `chunk` tokens, the last one shorter where it has to be."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, vocabulary, (length,), generator=generator)
        return cls(ids[:-question].split(chunk), ids[-question:])

    @property
    def parts(self) -> list[Tensor]:
        """What `ChunkStore.blend` takes."""
        return [*self.chunks, self.question]

    @property
    def ids(self) -> Tensor:
        """int64 [1, L]."""
        return torch.cat(self.parts)[None]

    @property
    def tokens(self) -> int:
        """L."""
        return self.ids.shape[1]


@dataclass(frozen=True)
class Prefill:
    """One way to the first token.

    Attributes:
        name: for tables and `--engines`.
        backend: of torch.compile; None for eager.
        ratio: of cached tokens that are computed anew; None computes all, without a store.
        source: where the cached chunks are.
        arm: how tokens are chosen, one of `arms.NAMES`.
    """

    name: str
    backend: str | None
    ratio: Fraction | None = None
    source: str = ""
    arm: str = "v"

    @property
    def looks_ahead(self) -> bool:
        """The question is computed twice: once to see where it looks."""
        return self._chooses and arms.selector_of(self.arm) == "question"

    @property
    def _chooses(self) -> bool:
        """Some cached tokens are computed anew, and not all."""
        return self.ratio is not None and 0 < self.ratio < 1

    def forward(self, model: Any, dynamic: bool, mode: str | None) -> Callable[..., Any]:
        """The model, compiled or not; `cascade` refuses a model in which nothing is reused."""
        if self.backend is None:
            return model  # type: ignore[no-any-return]
        options: dict[str, Any] = {}
        if self.ratio is not None:
            options = self._blend(model) | {"min_tokens": 0, "strict": True}
        if mode is not None:
            options |= torch._inductor.list_mode_options(mode, dynamic)
        compiled: Callable[..., Any] = torch.compile(
            model, backend=self.backend, options=options, dynamic=dynamic
        )
        return compiled

    def _blend(self, model: Any) -> dict[str, Any]:
        """Options that say which tokens are computed anew."""
        assert self.ratio is not None
        if self.arm == "v" or not self._chooses:
            return {"recompute_ratio": str(self.ratio)}
        layers = model.config.get_text_config().num_hidden_layers
        return arms.arm(self.arm, self.ratio, layers).options


def ways(
    ratios: Sequence[Fraction], sources: Sequence[str], chosen: Sequence[str] = ("v",)
) -> list[Prefill]:
    """All: in full, eager and compiled; then each ratio from each place by each arm."""
    made = [Prefill("eager", None), Prefill("full", "inductor")]
    for source in sources:
        for arm in chosen:
            kind = "blend" if arm == "v" else arm
            made += [
                Prefill(f"{kind} {float(ratio):g} {source}", "cascade", ratio, source, arm)
                for ratio in ratios
            ]
    return made


def make_store(model: Any, source: str, folder: Path) -> ChunkStore:
    """A store that keeps chunks in one place only."""
    on_cpu = model.device.type == "cpu"
    if source == "gpu":
        return ChunkStore(model)
    gpu = None if on_cpu else 0
    if source == "cpu":
        return ChunkStore(model, gpu_bytes=gpu)
    return ChunkStore(model, gpu_bytes=gpu, cpu_bytes=0, folder=folder)


def forget_files(folder: Path) -> None:
    """Ask the system to drop its copies of the files, so that they are read from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@dataclass
class Running:
    """A way at work on one prompt.

    Attributes:
        way: which.
        model: of the cache.
        forward: the model, compiled.
        prompt: what it reads.
        store: where its chunks are; None where all is computed.
        folder: of the store's files, "disk" only.
    """

    way: Prefill
    model: Any
    forward: Callable[..., Any]
    prompt: Prompt
    store: ChunkStore | None = None
    folder: Path | None = None

    def once(self) -> tuple[float, float, Tensor]:
        """Seconds until the prompt is put together, until its first token; logits [V]."""
        device = self.model.device
        if self.folder is not None:
            forget_files(self.folder)
        wait(device)
        begin = time.perf_counter()
        inputs = self._inputs()
        ready = time.perf_counter()
        logits = self.forward(**inputs, use_cache=True, logits_to_keep=1).logits[0, -1]
        logits.argmax().item()
        return ready - begin, time.perf_counter() - begin, logits

    def _inputs(self) -> dict[str, Any]:
        if self.store is not None:
            return dict(self.store.blend(self.prompt.parts))
        ids = self.prompt.ids.to(self.model.device)
        return {"input_ids": ids, cache_argument(self.model): DynamicCache()}

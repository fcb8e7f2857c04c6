"""`ChunkStore`: keys and values of text chunks, computed once and used in any prompt."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_cascade.runtime.blend_cache import BlendCache
from torch_cascade.runtime.blended import Blended
from torch_cascade.runtime.chunk_parts import Ids, Layout, Part, lay_out, prompt_rows, token_ids
from torch_cascade.runtime.chunk_plan import Plan, assemble, make_plan, reuse_of
from torch_cascade.runtime.chunks import Chunk, ChunkKey, capture
from torch_cascade.runtime.prefix_cache import cache_argument
from torch_cascade.runtime.rotation import verify_rotation


class ChunkStore:
    """Keys and values of text chunks of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = getattr(model, "_orig_mod", model)
        self.rotation = verify_rotation(self.model)
        self.device = self.model.get_input_embeddings().weight.device
        self._chunks: dict[str, Chunk] = {}
        self._lock = threading.RLock()
        self._fingerprint = ""

    def add(self, ids: Part, context: Part | None = None) -> str:
        before = () if context is None else token_ids(context, "context")
        key = ChunkKey(self._fingerprint, token_ids(ids, "ids"), before)
        with self._lock:
            if key.name not in self._chunks:
                self._chunks[key.name] = capture(self.model, self.rotation, key)
        return key.name

    def blend(
        self, parts: Sequence[Part] | Sequence[Sequence[Part]], *, padding_side: str = "left"
    ) -> Blended:
        layout = lay_out(prompt_rows(parts), padding_side)
        self._warn_of_bos(layout)
        found = [[self._find(row, i) for i in range(len(row))] for row in layout.rows]
        plan = make_plan(layout, found)
        return self._inputs(plan)

    def _find(self, row: Sequence[Ids], index: int) -> Chunk | None:
        before = tuple(token for part in row[:index] for token in part)
        for context in (before, ()):
            chunk = self._chunks.get(ChunkKey(self._fingerprint, row[index], context).name)
            if chunk is not None:
                return chunk
        return None

    def _inputs(self, plan: Plan) -> Blended:
        layout, device = plan.layout, self.device
        ids = layout.ids(self._pad_id())
        cache = BlendCache(self.rotation.layers)
        if plan.reused:
            length = max(layout.tokens(row) for row in range(len(layout.rows)))
            reuse = reuse_of(plan, self.rotation, self.rotation.tables(length), device)
            count = len(self.rotation.layers)
            cached = [assemble(plan, layer, device) for layer in range(count)]
            cache = BlendCache(self.rotation.layers, cached, reuse)
        # generate() would take pad ids inside of a prompt for padding, without a mask.
        masked = layout.padded or bool((ids == self._pad_id()).any())
        placed = "position_ids" in inspect.signature(type(self.model).forward).parameters
        return Blended(
            ids.to(device),
            cache,
            layout.mask().to(device) if masked else None,
            layout.positions().to(device) if layout.padded and placed else None,
            cache_argument(self.model),
        )

    def _pad_id(self) -> int:
        for config in (getattr(self.model, "generation_config", None), self.model.config):
            pad = getattr(config, "pad_token_id", None)
            if isinstance(pad, int):
                return pad
        return 0

    def _warn_of_bos(self, layout: Layout) -> None:
        bos = getattr(self.model.config, "bos_token_id", None)
        again = [
            (n, i)
            for n, row in enumerate(layout.rows)
            for i, p in enumerate(row)
            if i and p[0] == bos
        ]
        if again:
            n, i = again[0]
            warnings.warn(
                f"part {i} of prompt {n} starts with the beginning-of-sequence token {bos}: tokenize "
                "all parts but the first with add_special_tokens=False",
                stacklevel=3,
            )

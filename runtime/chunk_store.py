"""`ChunkStore`: keys and values of text chunks, computed once and used in any prompt."""

from __future__ import annotations

import inspect
import itertools
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_cascade.runtime.blend_cache import BlendCache
from torch_cascade.runtime.blended import Blended
from torch_cascade.runtime.branchless_rotary import without_branches
from torch_cascade.runtime.chunk_bring import bring
from torch_cascade.runtime.chunk_files import ChunkFolder
from torch_cascade.runtime.chunk_parts import (
    Ids,
    Layout,
    Part,
    lay_out,
    pad_id,
    prompt_rows,
    token_ids,
)
from torch_cascade.runtime.chunk_plan import Cached, Plan, make_plan, reuse_of
from torch_cascade.runtime.chunk_report import BlendReport, StoreReport, TierReport, blend_report
from torch_cascade.runtime.chunk_shelf import ChunkShelf, check_budget, make_tiers
from torch_cascade.runtime.chunks import Chunk, ChunkKey, capture, check_ids, device_of
from torch_cascade.runtime.fingerprint import fingerprint, trace, versions
from torch_cascade.runtime.prefix_cache import cache_argument
from torch_cascade.runtime.rotation import verify_rotation

_CHANGED = (
    "the model's weights have changed or moved since the store was made, and what is "
    "cached does not fit them: make another ChunkStore (it may use the same folder)"
)


class ChunkStore:
    """Keys and values of text chunks of one model: `add` a chunk once, `blend` it into any prompt.

    A blended prompt is an ordinary input of the model. In eager mode it is computed in full. With
    `torch.compile(model, backend="cascade")` the chunks' keys, rotated to their new positions, and
    values are reused, and only some tokens are computed in the deeper layers.

    Chunks are named by their token ids, the model (configuration and weights) and the tokens before
    them when they were computed, so nothing is mistaken for something else, in no process. They are
    kept in the GPU's memory, in the host's, and as files, each up to a budget of bytes; what was
    not used for longest moves down and out. What is not on the model's device is loaded in a thread
    of its own while the compiled model already computes its first layers.

    A chunk used after the very tokens that it was computed after is exact. So is the first part of
    any prompt, if it was added alone: that is how to reuse a common beginning, such as a system
    prompt. `add(ids, context=...)` computes a chunk after other tokens.

    Methods may be called from several threads, and a folder may be shared by several processes.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
        ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> a, b, question = [5, 6, 7, 8], [9, 10, 11, 12, 13], [14, 15]
        >>> store = ChunkStore(model)
        >>> names = [store.add(a), store.add(b)]
        >>> blended = store.blend([b, a, question])
        >>> print(blended.report)
        9 of 11 tokens have cached copies: 2,304 bytes from cpu
          prompt 0, part 0: 5 of 5 tokens from cpu, exact
          prompt 0, part 1: 4 of 4 tokens from cpu
          prompt 0, part 2: 0 of 2 tokens from fresh
        >>> model.generate(**blended, max_new_tokens=3, min_new_tokens=3).shape
        torch.Size([1, 14])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device | str | None = None,
        gpu_bytes: int | None = None,
        cpu_bytes: int | None = None,
        disk_bytes: int | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Prove how the model rotates its keys (with dynamic NTK, in one graph), open the folder.

        Args:
            model: a transformers decoder in evaluation mode, compiled or not. Its weights stay as
                they are: a store of other weights is another store. `add` reads them all to see
                whether they did; `blend` notices what torch notes of a tensor, so not what was
                written through `.data` or by a fused optimizer.
            device: where the model is, if that is to be checked.
            gpu_bytes: of keys and values in the memory of the model's device, if that is no CPU;
                None for no limit, 0 for none.
            cpu_bytes: likewise in the host's memory.
            disk_bytes: likewise in the folder.
            folder: keeps every chunk as a file, for later processes too; None for no files.

        Raises:
            TypeError: no transformers decoder, or a budget that is no integer.
            ValueError: a budget that is negative or for what is not there; another device than the
                model's, or several; nothing to keep chunks in.
            RotationError: the model's keys cannot be moved.
        """
        self._model: Any = getattr(model, "_orig_mod", model)
        self._device = device_of(self._model, device)
        check_budget("disk_bytes", disk_bytes)
        if folder is None and disk_bytes:
            raise ValueError(f"disk_bytes={disk_bytes}, but no folder")
        tiers = make_tiers(self._device, gpu_bytes, cpu_bytes)
        files = None if folder is None else ChunkFolder(Path(folder), disk_bytes)
        if not tiers and files is None:
            raise ValueError("every budget is 0 and there is no folder: nothing can be kept")
        self._shelf = ChunkShelf(tiers, files)
        self.rotation = verify_rotation(self._model)
        without_branches(self._model)  # the same rotation, so that a prefill is one graph
        arguments = inspect.signature(type(self._model).forward).parameters
        self._takes_positions = "position_ids" in arguments
        self._cache_name = cache_argument(self._model)
        # Of these only lookup tables are used, which no length changes.
        self._tables = self.rotation.tables(1)
        self._fingerprint = fingerprint(self._model)
        self._trace = trace(self._model)
        self._versions = versions(self._model)
        self._contexts: dict[Ids, list[Ids]] = {}
        self._prefilling = threading.Lock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="torch_cascade.chunks")

    def add(self, ids: Part, context: Part | None = None) -> str:
        """Prefill a chunk, unless it is here already.

        Args:
            ids: its tokens, a list of integers or a tensor [T] or [1, T].
            context: the tokens that it is to be computed after, at position 0; None to compute it
                alone.

        Returns:
            Its name.

        Raises:
            TypeError: no token ids.
            ValueError: none, or ids or a length that the model does not have.
            RuntimeError: the model's weights have changed.
            OSError: the folder cannot be written to.
        """
        self._check_weights()
        before = () if context is None else token_ids(context, "context")
        key = ChunkKey(self._computed_by(), token_ids(ids, "ids"), before)
        with self._prefilling:
            if not self._shelf.holds(key, self._tables):
                self._check_every_weight()
                self._keep(capture(self._model, self.rotation, key))
            known = self._contexts.setdefault(key.ids, [])
            if before not in known:
                known.append(before)
        return key.name

    def blend(
        self, parts: Sequence[Part] | Sequence[Sequence[Part]], *, padding_side: str = "left"
    ) -> Blended:
        """A prompt put together from parts, cached or not, in any order, repeated or not.

        Its forward is to be the model's next: with dynamic NTK the rotation depends on the longest
        sequence that the model has seen.

        Args:
            parts: token ids of each part; or a list of such lists, a batch of prompts.
            padding_side: where shorter prompts of a batch are padded.

        Returns:
            The inputs of the prefill, for `model.generate(**blended)` or `model(**blended)`.

        Raises:
            TypeError: no token ids.
            ValueError: no parts, empty ones, or ids or a length that the model does not have.
            RuntimeError: the model's weights have changed.
        """
        self._check_weights()
        layout = lay_out(prompt_rows(parts), padding_side)
        self._check_ids(layout)
        already = len(self._shelf.refused)
        found = [self._find_all(*row) for row in zip(layout.rows, layout.tokens, strict=True)]
        refused = tuple(self._shelf.refused[already:])
        for reason in refused:
            warnings.warn(f"a chunk is computed anew: {reason}", stacklevel=2)
        plan = make_plan(layout, [[f and f[0] for f in row] for row in found])
        return self._inputs(plan, blend_report(plan, found, refused))

    def report(self) -> StoreReport:
        """What is where, and how often it was found."""
        shelf = self._shelf
        tiers = [TierReport(t.name, len(t), t.used, t.budget, t.hits) for t in shelf.tiers]
        if shelf.folder is not None:
            sizes = shelf.folder.sizes()
            budget = shelf.folder.budget
            disk = TierReport("disk", len(sizes), sum(sizes.values()), budget, shelf.disk_hits)
            tiers.append(disk)
        return StoreReport(tuple(tiers), shelf.misses, tuple(shelf.refused))

    def _find_all(self, row: Sequence[Ids], tokens: Ids) -> list[tuple[Cached, str] | None]:
        """The copies of a prompt's parts, with their tiers."""
        starts = itertools.accumulate(map(len, row[:-1]), initial=0)
        keys = [self._keys(ids, tokens, start) for ids, start in zip(row, starts, strict=True)]
        self._shelf.prefetch(itertools.chain.from_iterable(keys))
        return [self._shelf.find_first(candidates, self._tables) for candidates in keys]

    def _keys(self, ids: Ids, tokens: Ids, start: int) -> list[ChunkKey]:
        """Of copies, the best first: after the same tokens, computed alone, or after others.

        A prompt has many parts, so the tokens before one are looked at only if there may be a copy
        that was computed after as many.
        """
        known = self._contexts.get(ids, ())
        on_disk = self._shelf.folder is not None
        possible = on_disk or any(len(context) == start for context in known)
        before = tokens[:start] if possible else ()
        here = (before,) if on_disk or before in known else ()
        contexts = dict.fromkeys((*here, (), *known))
        return [ChunkKey(self._computed_by(), ids, context) for context in contexts]

    def _inputs(self, plan: Plan, report: BlendReport) -> Blended:
        layout, pad = plan.layout, pad_id(self._model)
        ids = layout.ids(pad)
        # Without a mask, generate() would take pad ids inside of a prompt for padding.
        masked = layout.padded or bool((ids == pad).any())

        def sent(x: Tensor) -> Tensor:
            return x.to(self._device, non_blocking=True)

        # Before the cache: what is sent to a GPU waits for all that the GPU was told before.
        input_ids = sent(ids)
        mask = sent(layout.mask()) if masked else None
        positions = sent(layout.positions()) if layout.padded and self._takes_positions else None
        return Blended(input_ids, self._cache(plan), report, mask, positions, self._cache_name)

    def _cache(self, plan: Plan) -> BlendCache:
        layers, device = self.rotation.layers, self._device
        if not plan.reused:
            return BlendCache(layers)
        tables = self.rotation.tables(max(map(len, plan.layout.tokens)))
        reuse = reuse_of(plan, self.rotation, tables, device)
        cached, load = bring(plan, len(layers), device, self._shelf)
        if load is not None:
            load.start(self._reader)
        return BlendCache(layers, cached, reuse, load)

    def _computed_by(self) -> str:
        """The model, and the autocast under which its keys and values have another dtype."""
        kind = self._device.type
        if not torch.is_autocast_enabled(kind):
            return self._fingerprint
        return f"{self._fingerprint} autocast {torch.get_autocast_dtype(kind)}"

    def _keep(self, chunk: Chunk) -> None:
        if not self._shelf.put(chunk):
            warnings.warn(
                f"a chunk of {chunk.nbytes} bytes is larger than every budget, and is not kept",
                stacklevel=3,
            )

    def _check_weights(self) -> None:
        if versions(self._model) != self._versions:
            raise RuntimeError(_CHANGED)

    def _check_every_weight(self) -> None:
        """Before a chunk is named: writes through `.data` leave no trace but the weights."""
        if trace(self._model) != self._trace:
            raise RuntimeError(_CHANGED)

    def _check_ids(self, layout: Layout) -> None:
        check_ids(self._model, max(map(max, layout.tokens)))
        bos = self._model.config.get_text_config().bos_token_id
        inner = [
            (n, i)
            for n, row in enumerate(layout.rows)
            for i in range(1, len(row))
            if row[i][0] in (bos if isinstance(bos, list) else [bos])
        ]
        if inner:
            prompt, part = inner[0]
            warnings.warn(
                f"part {part} of prompt {prompt} starts with the beginning-of-sequence token "
                f"{bos}: tokenize all parts but the first with add_special_tokens=False",
                stacklevel=3,
            )

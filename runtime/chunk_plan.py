"""Which tokens of a batch of prompts have cached copies, and the tensors that say so."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from torch_cascade.runtime.blend_layers import Reuse
from torch_cascade.runtime.chunk_files import ChunkFile
from torch_cascade.runtime.chunk_parts import Layout, Span, int64_rows
from torch_cascade.runtime.chunks import Chunk
from torch_cascade.runtime.positions import RopeTable, Turn, join
from torch_cascade.runtime.rotation import ModelRotation

Cached: TypeAlias = Chunk | ChunkFile


@dataclass(frozen=True, eq=False)
class Placed:
    """A cached chunk at its place.

    Attributes:
        chunk: what is cached.
        number: counts the cached chunks of a row, each occurrence by itself.
        span: where the tokens go that are reused: the chunk's first `span.length`.
    """

    chunk: Cached
    number: int
    span: Span


@dataclass(frozen=True, eq=False)
class Plan:
    """A batch of prompts with its cached chunks.

    Attributes:
        layout: where the parts stand.
        rows: the chunks of each row, in order.
    """

    layout: Layout
    rows: tuple[tuple[Placed, ...], ...]

    @property
    def reused(self) -> int:
        """Tokens with a cached copy."""
        return sum(placed.span.length for row in self.rows for placed in row)

    def chunks(self) -> Tensor:
        """Int64 [N, L]: the number of the chunk a token is from, -1 for none."""
        return self._by_token(lambda placed: placed.number, -1)

    def fresh_rows(self) -> Tensor:
        """Int64 [N, F], ascending: the tokens without a cached copy, and the last place of a row.

        A row with fewer than others is filled up with padding, from its end, then with its last
        cached tokens. They are two at least: compilers take a size of 1 for a constant, so one
        alone would be another graph.
        """
        cached = self.chunks() >= 0
        padding = self.layout.mask() == 0
        # Fresh tokens first, then padding, then cached ones; within each the last ones first.
        rank = torch.where(cached, 2, torch.where(padding, 1, 0))
        rank[:, -1] = 0  # also where it is padding: a compiled forward's logits end there
        fresh = rank == 0
        counts = fresh.sum(1).tolist()
        count = max(*counts, min(2, self.layout.length))
        if min(counts) == count:  # nothing to fill up, so nothing to sort
            chosen = fresh.nonzero()[:, 1].view(-1, count)
        else:
            places = torch.arange(self.layout.length)
            order = (rank * self.layout.length - places).argsort(dim=1)
            chosen = order[:, :count].sort(dim=1).values
        # The same strides for all, on which a compiled forward has guards.
        return chosen.clone(memory_format=torch.contiguous_format)

    def old_positions(self) -> Tensor:
        """Int64 [N, L]: where each token was when it was cached; its own where it was not."""
        first = self._by_token(lambda p: len(p.chunk.key.context) - p.span.position, 0)
        return self.layout.positions() + first

    def _by_token(self, number: Callable[[Placed], int], none: int) -> Tensor:
        """Int64 [N, L]: a number of the chunk that a token is from, else `none`.

        One op, and not one for each chunk: this is time to the first token.
        """
        numbers = array("q")
        for row in self.rows:
            end = 0
            for placed in row:
                numbers += array("q", [none]) * (placed.span.start - end)
                numbers += array("q", [number(placed)]) * placed.span.length
                end = placed.span.end
            numbers += array("q", [none]) * (self.layout.length - end)
        return int64_rows(numbers, len(self.rows))


def make_plan(layout: Layout, found: Sequence[Sequence[Cached | None]]) -> Plan:
    """Place the chunks that were found, one or None for each part.

    The last token of a prompt is always computed: its logits are what a prefill is for.
    """
    rows = []
    for spans, chunks in zip(layout.spans, found, strict=True):
        kept: list[Placed] = []
        for index, (span, chunk) in enumerate(zip(spans, chunks, strict=True)):
            reused = span.shortened() if index == len(spans) - 1 else span
            if chunk is not None and reused.length > 0:
                kept.append(Placed(chunk, len(kept), reused))
        rows.append(tuple(kept))
    return Plan(layout, tuple(rows))


def reuse_of(
    plan: Plan, rotation: ModelRotation, new: Sequence[RopeTable], device: torch.device
) -> Reuse:
    """All that the layers of a blended prompt share, on `device`.

    Args:
        plan: where the chunks are.
        rotation: the model's.
        new: its tables for the coming forward.
        device: the model's.
    """
    return Reuse(
        _turns(plan, rotation, new, device),
        plan.fresh_rows().to(device, non_blocking=True),
        plan.chunks().to(device, non_blocking=True),
    )


def _turns(
    plan: Plan, rotation: ModelRotation, new: Sequence[RopeTable], device: torch.device
) -> tuple[Turn, ...]:
    if not new:
        return ()
    both = torch.stack([plan.old_positions(), plan.layout.positions()])
    old, positions = both.to(device, non_blocking=True).unbind()
    chunks = [placed.chunk for row in plan.rows for placed in row]
    tables = {chunk.frequencies: chunk.tables for chunk in chunks}
    if len(tables) == 1:
        (only,) = tables.values()
        return rotation.turns(only, new, old, positions)
    rows = [
        _row_turns(placed, rotation, new, old[n : n + 1], positions[n : n + 1])
        for n, placed in enumerate(plan.rows)
    ]
    return tuple(join(turns, rows=True) for turns in zip(*rows, strict=True))


def _row_turns(
    row: Sequence[Placed],
    rotation: ModelRotation,
    new: Sequence[RopeTable],
    old: Tensor,
    positions: Tensor,
) -> list[Turn]:
    """Turns of one row whose chunks were cached under different tables."""
    pieces, end = [], 0
    for placed in row:
        start = placed.span.start
        pieces.append((new, end, start))
        pieces.append((placed.chunk.tables, start, placed.span.end))
        end = placed.span.end
    pieces.append((new, end, old.shape[1]))
    parts = [
        rotation.turns(tables, new, old[:, start:stop], positions[:, start:stop])
        for tables, start, stop in pieces
        if stop > start
    ]
    return [join(turns) for turns in zip(*parts, strict=True)]

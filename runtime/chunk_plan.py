"""Which tokens of a batch of prompts have cached copies, and the tensors that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cascade.runtime.blend_layers import Reuse
from torch_cascade.runtime.chunk_parts import Layout, Span
from torch_cascade.runtime.chunks import Chunk
from torch_cascade.runtime.positions import RopeTable, Turn, join
from torch_cascade.runtime.rotation import ModelRotation


@dataclass(frozen=True, eq=False)
class Placed:
    """A cached chunk at its place.

    Attributes:
        chunk: what is cached.
        number: counts the cached chunks of a row, each occurrence by itself.
        span: where the tokens go that are reused: the chunk's first `span.length`.
    """

    chunk: Chunk
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
        numbers = torch.full((len(self.rows), self.layout.length), -1, dtype=torch.int64)
        for row, all_placed in enumerate(self.rows):
            for placed in all_placed:
                numbers[row, placed.span.start : placed.span.end] = placed.number
        return numbers

    def fresh_rows(self) -> Tensor:
        """Int64 [N, F], ascending: the tokens without a cached copy.

        A row with fewer than others is filled up with padding, from its end, then with its last
        cached tokens.
        """
        cached = self.chunks() >= 0
        padding = self.layout.mask() == 0
        # Fresh tokens first, then padding, then cached ones; within each the last ones first.
        rank = torch.where(cached, 2, torch.where(padding, 1, 0))
        places = torch.arange(self.layout.length)
        order = (rank * self.layout.length - places).argsort(dim=1)
        count = int((rank == 0).sum(1).max())
        return order[:, :count].sort(dim=1).values

    def old_positions(self) -> Tensor:
        """Int64 [N, L]: where each token was when it was cached; its own where it was not."""
        positions = self.layout.positions()
        for row, all_placed in enumerate(self.rows):
            for placed in all_placed:
                span, first = placed.span, placed.chunk.position
                positions[row, span.start : span.end] = first + torch.arange(span.length)
        return positions


def make_plan(layout: Layout, found: Sequence[Sequence[Chunk | None]]) -> Plan:
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
    old, positions = plan.old_positions().to(device), plan.layout.positions().to(device)
    tables = {id(placed.chunk.tables): placed.chunk.tables for row in plan.rows for placed in row}
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


def assemble(plan: Plan, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One layer's cached keys and values at their places: [N, H, L, D] and [N, H, L, Dv].

    Returns:
        New tensors, zero where nothing is cached.
    """
    keys = [[(p.span, p.chunk.layers[layer][0]) for p in row] for row in plan.rows]
    values = [[(p.span, p.chunk.layers[layer][1]) for p in row] for row in plan.rows]
    length = plan.layout.length
    return _side_by_side(keys, length, device), _side_by_side(values, length, device)


def _side_by_side(
    rows: Sequence[Sequence[tuple[Span, Tensor]]], length: int, device: torch.device
) -> Tensor:
    sample = next(states for row in rows for _, states in row)
    heads, _, features = sample.shape
    out = torch.empty(len(rows), heads, length, features, dtype=sample.dtype, device=device)
    for target, row in zip(out, rows, strict=True):
        end = 0
        for span, states in row:
            target[:, end : span.start].zero_()
            target[:, span.start : span.end].copy_(states[:, : span.length], non_blocking=True)
            end = span.end
        target[:, end:].zero_()
    return out

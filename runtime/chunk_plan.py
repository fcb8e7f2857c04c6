"""Which tokens of a batch of prompts have cached copies, and the tensors that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from torch_cascade.runtime.blend_layers import KeyValue, Reuse
from torch_cascade.runtime.chunk_files import ChunkFile
from torch_cascade.runtime.chunk_parts import Layout, Span
from torch_cascade.runtime.chunks import Chunk, table_bytes
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
        numbers = torch.full((len(self.rows), self.layout.length), -1, dtype=torch.int64)
        for row, all_placed in enumerate(self.rows):
            for placed in all_placed:
                numbers[row, placed.span.start : placed.span.end] = placed.number
        return numbers

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
        places = torch.arange(self.layout.length)
        order = (rank * self.layout.length - places).argsort(dim=1)
        count = max(int((rank == 0).sum(1).max()), min(2, self.layout.length))
        return order[:, :count].sort(dim=1).values

    def old_positions(self) -> Tensor:
        """Int64 [N, L]: where each token was when it was cached; its own where it was not."""
        positions = self.layout.positions()
        for row, all_placed in enumerate(self.rows):
            for placed in all_placed:
                span, first = placed.span, len(placed.chunk.key.context)
                positions[row, span.start : span.end] = first + torch.arange(span.length)
        return positions


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
    old, positions = plan.old_positions().to(device), plan.layout.positions().to(device)
    chunks = [placed.chunk for row in plan.rows for placed in row]
    tables = {table_bytes(chunk.tables): chunk.tables for chunk in chunks}
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


def assemble(plan: Plan, layers: int, device: torch.device) -> list[KeyValue]:
    """Every layer's cached keys and values at their places: [N, H, L, D] and [N, H, L, Dv].

    Args:
        plan: of chunks that are on `device`.
        layers: of the model.
        device: the model's.

    Returns:
        New tensors, zero where nothing is cached.

    Raises:
        ValueError: chunks of different dtypes.
    """
    rows = [[(placed.span, _near(placed.chunk).lent()) for placed in row] for row in plan.rows]
    made = []
    for layer in range(layers):
        buffers = empty_buffers(plan, layer, device)
        for target, row in zip(zip(*buffers, strict=True), rows, strict=True):
            for index, part in enumerate(target):
                _join_tokens([(span, pairs[layer][index]) for span, pairs in row], part)
        made.append(buffers)
    return made


def _near(chunk: Cached) -> Chunk:
    assert isinstance(chunk, Chunk)
    return chunk


def empty_buffers(plan: Plan, layer: int, device: torch.device, *, zero: bool = False) -> KeyValue:
    """Room for a layer's cached keys and values, uninitialised or zero.

    Raises:
        ValueError: chunks of different dtypes.
    """
    samples = [placed.chunk.like(layer) for row in plan.rows for placed in row]
    dtypes = {(keys.dtype, values.dtype) for keys, values in samples}
    if len(dtypes) > 1:
        raise ValueError(
            f"chunks were cached in different dtypes, under different autocast: {dtypes}"
        )
    make = torch.zeros if zero else torch.empty
    rows, length = len(plan.rows), plan.layout.length
    keys, values = (
        make(rows, x.shape[0], length, x.shape[2], dtype=x.dtype, device=device) for x in samples[0]
    )
    return keys, values


def _join_tokens(pieces: Sequence[tuple[Span, Tensor]], out: Tensor) -> None:
    """Write pieces [H, T, D] at their places into `out` [H, L, D], zeros elsewhere: one kernel.

    Time to the first token has a call of this for every layer, twice: no view that is not needed.
    """
    parts: list[Tensor] = []
    end = 0
    for span, states in pieces:
        if span.start > end:
            parts.append(_zeros(out, span.start - end))
        parts.append(states if states.shape[1] == span.length else states[:, : span.length])
        end = span.end
    if out.shape[1] > end:
        parts.append(_zeros(out, out.shape[1] - end))
    torch.cat(parts, dim=1, out=out)


def _zeros(like: Tensor, length: int) -> Tensor:
    return like.new_zeros(()).expand(like.shape[0], length, like.shape[2])

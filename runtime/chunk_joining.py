"""Cached chunks side by side: the keys and values of a prompt, at their places."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torch_cascade.runtime.blend_layers import KeyValue
from torch_cascade.runtime.chunk_plan import Cached, Placed, Plan
from torch_cascade.runtime.chunks import Chunk

Parts: TypeAlias = tuple[Tensor, ...]


def assemble(plan: Plan, layers: int, device: torch.device) -> list[KeyValue]:
    """Every layer's cached keys and values at their places: [N, H, L, D] and [N, H, L, Dv].

    Args:
        plan: of chunks that are on `device`.
        layers: of the model.
        device: the model's.

    Returns:
        New tensors, zero where nothing is cached. Each has storage of its own: of parts of a larger
        one, a compiler would guard where in it they are.

    Raises:
        ValueError: chunks of different dtypes.
    """
    check_dtypes(plan)
    zeros = _Zeros([next(_chunks(plan)).like(layer) for layer in range(layers)], device)
    rows = [_columns(_pieces(row, plan.layout.length, zeros)) for row in plan.rows]
    if len(rows) == 1:  # an op a tensor: the host takes longer for it than the GPU
        return [(torch.cat(keys, dim=2), torch.cat(values, dim=2)) for keys, values in rows[0]]
    made = empty_buffers(plan, layers, device)
    for row, columns in enumerate(rows):
        for (keys, values), (key_parts, value_parts) in zip(made, columns, strict=True):
            torch.cat(key_parts, dim=2, out=keys[row : row + 1])
            torch.cat(value_parts, dim=2, out=values[row : row + 1])
    return made


def check_dtypes(plan: Plan) -> None:
    """Refuse what cannot stand side by side.

    Raises:
        ValueError: chunks of different dtypes.
    """
    dtypes = {chunk.dtypes for chunk in _chunks(plan)}
    if len(dtypes) > 1:
        found = set().union(*dtypes)
        raise ValueError(
            f"chunks were cached in different dtypes, under different autocast: {found}"
        )


def empty_buffers(
    plan: Plan, layers: int, device: torch.device, *, zero: bool = False
) -> list[KeyValue]:
    """Room for each layer's cached keys and values, uninitialised or zero."""
    make = torch.zeros if zero else torch.empty
    rows, length = len(plan.rows), plan.layout.length

    def room(x: Tensor) -> Tensor:
        return make(rows, x.shape[0], length, x.shape[2], dtype=x.dtype, device=device)

    likes = (next(_chunks(plan)).like(layer) for layer in range(layers))
    return [(room(keys), room(values)) for keys, values in likes]


def _chunks(plan: Plan) -> Iterator[Cached]:
    return (placed.chunk for row in plan.rows for placed in row)


def _pieces(row: Sequence[Placed], length: int, zeros: _Zeros) -> list[Sequence[KeyValue]]:
    """What stands side by side in a row: chunks, and zeros where nothing is cached.

    A piece has keys [1, H, T, D] and values [1, H, T, Dv] of every layer, all of them contiguous:
    of such tensors CUDA's `cat` moves 16 bytes at a time, of others it takes four times as long.
    """
    pieces: list[Sequence[KeyValue]] = []
    end = 0
    for placed in row:
        pieces += zeros.of(placed.span.start - end)
        pieces.append(_first(placed.chunk, placed.span.length))
        end = placed.span.end
    return pieces + zeros.of(length - end)


def _columns(pieces: Sequence[Sequence[KeyValue]]) -> list[tuple[Parts, Parts]]:
    """For each layer the keys of all pieces, and the values."""
    return [
        (tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs))
        for pairs in zip(*pieces, strict=True)
    ]


def _first(chunk: Cached, tokens: int) -> Sequence[KeyValue]:
    """The first tokens of a chunk that is near: all, but for the last part of a prompt."""
    assert isinstance(chunk, Chunk)
    pairs = chunk.lent()
    if len(chunk.key.ids) == tokens:
        return pairs
    return [(k[:, :, :tokens].contiguous(), v[:, :, :tokens].contiguous()) for k, v in pairs]


class _Zeros:
    """Pieces of zeros: one tensor for all layers of the same sizes."""

    def __init__(self, likes: Sequence[KeyValue], device: torch.device) -> None:
        """Like [H, T, D] and [H, T, Dv], a pair a layer."""
        self._kinds = [(_kind(keys), _kind(values)) for keys, values in likes]
        self._device = device

    def of(self, tokens: int) -> list[Sequence[KeyValue]]:
        """One piece of so many tokens; none of no token."""
        if tokens == 0:
            return []
        made = {
            kind: torch.zeros(1, kind[0], tokens, kind[1], dtype=kind[2], device=self._device)
            for kind in set(itertools.chain.from_iterable(self._kinds))
        }
        return [[(made[keys], made[values]) for keys, values in self._kinds]]


def _kind(states: Tensor) -> tuple[int, int, torch.dtype]:
    return states.shape[0], states.shape[2], states.dtype

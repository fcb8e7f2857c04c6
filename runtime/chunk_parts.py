"""Prompts as lists of parts, in token ids, and where each part of a batch of prompts goes."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

Ids: TypeAlias = tuple[int, ...]
Part: TypeAlias = Sequence[int] | Tensor
SIDES = ("left", "right")


def token_ids(part: object, name: str) -> Ids:
    """The ids of one part: a sequence of integers, or an integer tensor [T] or [1, T].

    Raises:
        TypeError: anything else; text in particular, as separators tokenize differently in context.
        ValueError: no ids, negative ones, or several rows of them.
    """
    ids = _from_tensor(part, name) if isinstance(part, Tensor) else _from_sequence(part, name)
    if not ids:
        raise ValueError(f"{name} holds no tokens")
    if min(ids) < 0:
        raise ValueError(f"{name} holds the id {min(ids)}: ids are not negative")
    return ids


def _from_sequence(part: object, name: str) -> Ids:
    if isinstance(part, str | bytes) or not isinstance(part, Sequence):
        raise TypeError(f"{name} must be token ids, got {type(part).__name__}")
    ids = tuple(part)
    for kind in set(map(type, ids)):  # not one by one: prompts are long
        if not issubclass(kind, int) or kind is bool:
            raise TypeError(f"{name} must be token ids, got one of {kind.__name__}")
    return ids


def _from_tensor(part: Tensor, name: str) -> Ids:
    if part.is_floating_point() or part.is_complex() or part.dtype == torch.bool:
        raise TypeError(f"{name} must be token ids, got a tensor of {part.dtype}")
    if part.dim() != 1 and not (part.dim() == 2 and part.shape[0] == 1):
        raise ValueError(f"{name} must be [tokens] or [1, tokens], got {list(part.shape)}")
    return tuple(part.flatten().tolist())


def prompt_rows(parts: Sequence[Part] | Sequence[Sequence[Part]]) -> list[list[Ids]]:
    """The rows of a batch: one for a list of parts, several for a list of lists of parts.

    Example:
        >>> prompt_rows([[5, 6], [7]])
        [[(5, 6), (7,)]]
        >>> prompt_rows([[[5, 6], [7]], [[8]]])
        [[(5, 6), (7,)], [(8,)]]

    Raises:
        TypeError: not parts of token ids.
        ValueError: no parts, or an empty one.
    """
    if isinstance(parts, Tensor | str | bytes) or not isinstance(parts, Sequence):
        raise TypeError(f"parts must be a list of token id lists, got {type(parts).__name__}")
    if not parts:
        raise ValueError("parts must hold at least one part")
    batched = [_is_row(item) for item in parts]
    if any(batched) and not all(batched):
        raise TypeError("parts must be all token ids (one prompt), or all lists of parts (a batch)")
    rows = parts if batched[0] else [parts]
    return [
        [token_ids(part, f"part {j} of prompt {i}") for j, part in enumerate(row)]
        for i, row in enumerate(rows)
    ]


def _is_row(item: object) -> bool:
    """Whether it is a list of parts, and not a part."""
    if isinstance(item, Tensor | str | bytes) or not isinstance(item, Sequence):
        return False
    return bool(item) and isinstance(item[0], Sequence | Tensor)


def flattened(parts: Sequence[Ids]) -> Ids:
    """The tokens of all parts."""
    return tuple(itertools.chain.from_iterable(parts))


@dataclass(frozen=True)
class Span:
    """Where some tokens of a prompt stand.

    Attributes:
        start: the first token's place in its row, padding counted.
        position: the first token's position, padding not counted.
        length: in tokens.
    """

    start: int
    position: int
    length: int

    @property
    def end(self) -> int:
        """The place after the last token."""
        return self.start + self.length

    def shortened(self) -> Span:
        """Without the last token."""
        return Span(self.start, self.position, self.length - 1)


@dataclass(frozen=True)
class Layout:
    """A batch of prompts, padded to one length.

    Attributes:
        rows: the parts of each prompt.
        spans: where each part stands.
        length: tokens of a row, padding included.
        padding: places of each row's padding.
    """

    rows: tuple[tuple[Ids, ...], ...]
    spans: tuple[tuple[Span, ...], ...]
    length: int
    padding: tuple[range, ...]

    @property
    def padded(self) -> bool:
        """Whether any row has padding."""
        return any(len(places) > 0 for places in self.padding)

    @cached_property
    def tokens(self) -> tuple[Ids, ...]:
        """Of each row, without padding."""
        return tuple(map(flattened, self.rows))

    def ids(self, pad: int) -> Tensor:
        """Int64 [N, L]."""
        ids = array("q")
        for tokens, places in zip(self.tokens, self.padding, strict=True):
            padding = array("q", [pad]) * len(places)
            left = places.start == 0
            ids += padding + array("q", tokens) if left else array("q", tokens) + padding
        return int64_rows(ids, len(self.rows))

    def mask(self) -> Tensor:
        """Int64 [N, L], 0 at padding."""
        mask = torch.ones(len(self.rows), self.length, dtype=torch.int64)
        for row, places in enumerate(self.padding):
            mask[row, places.start : places.stop] = 0
        return mask

    def positions(self) -> Tensor:
        """Int64 [N, L], counted as `generate` does: from the first token; 0 at left padding."""
        mask = self.mask()
        return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


def int64_rows(numbers: array[int], rows: int) -> Tensor:
    """Int64 [rows, M] of so many rows of numbers; a tensor made of a tuple takes ten times as long.

    A copy: what a compiler is given is better no view of something else.
    """
    return torch.frombuffer(numbers, dtype=torch.int64).view(rows, -1).clone()


def lay_out(rows: Sequence[Sequence[Ids]], padding_side: str) -> Layout:
    """Place every part of a batch of prompts.

    Raises:
        ValueError: an unknown side.
    """
    if padding_side not in SIDES:
        raise ValueError(f"padding_side must be one of {SIDES}, got {padding_side!r}")
    lengths = [sum(map(len, parts)) for parts in rows]
    longest = max(lengths)
    spans, padding = [], []
    for parts, length in zip(rows, lengths, strict=True):
        gap = longest - length
        offset = gap if padding_side == "left" else 0
        padding.append(range(0, gap) if padding_side == "left" else range(length, longest))
        spans.append(_spans(parts, offset))
    return Layout(tuple(map(tuple, rows)), tuple(spans), longest, tuple(padding))


def _spans(parts: Sequence[Ids], offset: int) -> tuple[Span, ...]:
    spans, position = [], 0
    for part in parts:
        spans.append(Span(offset + position, position, len(part)))
        position += len(part)
    return tuple(spans)


def pad_id(model: Any) -> int:
    """The token that stands before shorter prompts; 0 where the model names none."""
    for config in (getattr(model, "generation_config", None), model.config):
        pad = getattr(config, "pad_token_id", None)
        if isinstance(pad, int):
            return pad
    return 0

"""Pieces of a value along one dim: slices, selections, and the results of splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_cascade.compiler.graph import Size, shape, size_expr
from torch_cascade.passes.axes import ONE
from torch_cascade.passes.token_frontier import is_result
from torch_cascade.passes.token_registry import bound

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Piece:
    """What a node takes of another.

    Attributes:
        source: of which.
        dim: along which dim.
        start: the first index; negative counts from the end.
        end: the one behind the last; None for the end.
        step: from one to the next.
        one: a single index is selected, and the dim is gone.
        flipped: from the last to the first.
    """

    source: fx.Node
    dim: int
    start: Size
    end: Size | None = None
    step: Any = 1
    one: bool = False
    flipped: bool = False


def piece_of(node: fx.Node) -> Piece | None:
    """The piece that a node is; None for what is no piece."""
    piece = _direct(node)
    return piece if piece is None else _through_flip(node, piece)


def _through_flip(node: fx.Node, piece: Piece) -> Piece:
    """The first ones of a reversed dim are the last ones of it."""
    flip = piece.source
    if flip.target not in (aten.flip.default, prims.rev.default) or piece.step != 1:
        return piece
    source: fx.Node = flip.args[0]  # type: ignore[assignment]
    dims: Sequence[int] = flip.args[1]  # type: ignore[assignment]
    if [dim % len(shape(source)) for dim in dims] != [piece.dim]:
        return piece
    if piece.one:
        return Piece(source, piece.dim, -1 - piece.start, one=True)
    if piece.start != 0:
        return piece
    return Piece(source, piece.dim, -shape(node)[piece.dim], flipped=True)


def _direct(node: fx.Node) -> Piece | None:
    if node.target is aten.slice.Tensor:
        given = bound(node)
        start, end = given.get("start"), given.get("end")
        return Piece(
            given["self"],
            _dim(given),
            size_expr(0 if start is None else start),
            None if end is None else size_expr(end),
            given.get("step", 1),
        )
    if node.target is aten.select.int:
        given = bound(node)
        return Piece(given["self"], _dim(given), size_expr(given["index"]), one=True)
    return _result(node) if is_result(node) else None


def _result(node: fx.Node) -> Piece | None:
    """One of the results of a split."""
    split, place = node.args
    assert isinstance(split, fx.Node) and isinstance(place, int)
    if split.target is aten.unbind.int:
        given = bound(split)
        return Piece(given["self"], _dim(given), ONE * place, one=True)
    if split.target is aten.split_with_sizes.default:
        given = bound(split)
        widths = [size_expr(size) for size in given["split_sizes"]]
    elif split.target is aten.split.Tensor:
        given = bound(split)
        pieces: Sequence[Any] = split.meta["val"]
        widths = [size_expr(piece.shape[_dim(given)]) for piece in pieces]
    else:
        return None
    start = sum(widths[:place], ONE * 0)
    end = None if place == len(widths) - 1 else start + widths[place]
    return Piece(given["self"], _dim(given), start, end)


def _dim(given: dict[str, Any]) -> int:
    return int(given.get("dim", 0)) % len(shape(given["self"]))

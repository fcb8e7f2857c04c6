"""The token axis of a value, and the rows that are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy
from torch import fx

from torch_cascade.compiler.graph import Size
from torch_cascade.passes.axes import ONE


@dataclass(frozen=True)
class Axis:
    """A logical axis inside one dim of a tensor: the dim has size `outer * length * inner`.

    So tokens merged with the batch in front (`[B*T, D]`: outer = B) or with the experts of each
    token behind (`[T*topk, D]`: inner = topk) are as ordinary as a dim of their own.

    Attributes:
        dim: the dim, from 0.
        length: T, or N for the batch axis.
        outer, inner: what is merged before and after it.
    """

    dim: int
    length: Size
    outer: Size = ONE
    inner: Size = ONE

    @property
    def size(self) -> Size:
        """The size of the whole dim."""
        return self.outer * self.length * self.inner

    def at(self, dim: int) -> Axis:
        """The same axis in another dim."""
        return replace(self, dim=dim)


@dataclass(frozen=True)
class Spread:
    """An operand is constant along the axis, but broadcasting would take it from this dim.

    Attributes:
        from_right: the dim, counted from the last (1) to the first.
    """

    from_right: int


@dataclass(frozen=True)
class Tangled:
    """An operand depends on the axis, but not as one of its own: heads of keys for query heads."""


Place: TypeAlias = Axis | Spread | Tangled | None
"""Where an operand has the axis; None: constant along it, and it could not carry it."""

Places: TypeAlias = Mapping[str, Place | tuple[Place, ...]]
"""A place for each argument that is a tensor, by its name in the schema; None may be left out."""


@dataclass(frozen=True)
class Rows:
    """Which rows of a value are asked for: those the index names along `tokens`.

    Attributes:
        tokens: the token axis.
        batch: the batch axis, where each batch row has an index of its own; None where all of the
            value shares one.
        sort: the `aten.sort` in whose order the rows of the dim stand (`token_routes.py`): row i is
            row `indices[i]` of what the axes describe; None where they stand as described.
    """

    tokens: Axis
    batch: Axis | None = None
    sort: fx.Node | None = None


Demand: TypeAlias = tuple[fx.Node, Rows]


@dataclass(frozen=True)
class Operand:
    """An operand of which rows are needed.

    Attributes:
        name, index: which argument, and which of its list.
        demand: the rows.
        lift: the dim, from the right, that the batch axis is to get; None where it has its place.
    """

    name: str
    index: int | None
    demand: Demand
    lift: int | None = None


@dataclass(frozen=True)
class Parts:
    """A value seen with its token axis, and its batch axis, each in a dim of its own.

    Attributes:
        sizes: of the view.
        tokens, batch: the dims of the view that hold them.
    """

    sizes: tuple[Size, ...]
    tokens: int
    batch: int | None


def split(sizes: Sequence[Size], rows: Rows) -> Parts:
    """The sizes with each dim that holds an axis cut into its factors."""
    parts: list[Size] = []
    found: dict[str, int] = {}
    for dim, size in enumerate(sizes):
        for name, part in _factors(dim, size, rows):
            if name:
                found[name] = len(parts)
            parts.append(part)
    return Parts(tuple(parts), found["tokens"], found.get("batch"))


def _factors(dim: int, size: Size, rows: Rows) -> list[tuple[str, Size]]:
    """One dim as dims: those of size 1 that merging left out stay out."""
    tokens, batch = rows.tokens, rows.batch
    in_batch = batch is not None and batch.dim == dim
    if tokens.dim == dim and in_batch:
        assert batch is not None
        between = sympy.cancel(tokens.outer / (batch.outer * batch.length))
        named = [("", batch.outer), ("batch", batch.length), ("", between)]
        named += [("tokens", tokens.length), ("", tokens.inner)]
    elif tokens.dim == dim:
        named = [("", tokens.outer), ("tokens", tokens.length), ("", tokens.inner)]
    elif in_batch:
        assert batch is not None
        named = [("", batch.outer), ("batch", batch.length), ("", batch.inner)]
    else:
        return [("", size)]
    return [(name, part) for name, part in named if name or part != 1]

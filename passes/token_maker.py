"""Writes nodes for the rows an index names: gathers, lifted operands, positions, causal masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import tracing

from torch_cascade.compiler.graph import Emitter, Size, shape, tensor, value
from torch_cascade.passes.axes import ONE
from torch_cascade.passes.token_rows import Axis, Parts, Rows, split

aten = torch.ops.aten
prims = torch.ops.prims


class Maker:
    """Inserts the nodes of one set of rows.

    The index is int64: `[N, K]` where each batch row has rows of its own, `[K]` where all share
    them. Values that do not depend on the batch (positions, masks, tables) are taken at all N * K
    rows at once, as if they shared one index of that length, and get the batch axis where they
    meet a value that has it.

    Only ops that Inductor has lowerings for are written: it decomposes others before our passes.
    """

    def __init__(self, index: fx.Node, *, per_batch_row: bool) -> None:
        """Nodes go after `index`, and after the nodes that `place` names.

        Args:
            index: the rows, `[N, K]` or `[K]`; `[1, K]` serves for a batch of one.
            per_batch_row: each batch row has rows of its own.
        """
        graph = index.graph
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._first = index
        while self._first is index or self._first.op == "placeholder":
            self._first = self._first.next
        self._emits: dict[fx.Node, Emitter] = {}
        self._masks: dict[Any, fx.Node] = {}
        self._lifted: dict[Any, fx.Node] = {}
        self.place(index)
        self._rows = index if per_batch_row else None
        flat = len(shape(index)) == 1
        self._flat = index if flat else self.call(aten.view.default, index, [-1])

    def place(self, node: fx.Node) -> None:
        """From here on insert before `node`, but after the index."""
        anchor = self._first
        if self._order.get(node, -1) > self._order.get(anchor, -1):
            anchor = node
        if anchor not in self._emits:
            self._emits[anchor] = Emitter(anchor)
        self.emit = self._emits[anchor]

    def place_after(self, node: fx.Node) -> None:
        """From here on insert after a node of the original graph, and after the index."""
        following = node.next
        while following.op == "placeholder" or following not in self._order:
            following = following.next
        self.place(following)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert one call; sizes may be sympy expressions."""
        return self.emit.call(target, *args, **kwargs)

    def again(self, node: fx.Node, given: Mapping[str, Any]) -> fx.Node:
        """The call of a node with other arguments, by name."""
        count = len(node.args)
        values = list(given.values())
        kwargs = {name: given[name] for name in node.kwargs}
        return self.call(node.target, *values[:count], **kwargs)

    def positions(self, per_batch_row: bool) -> fx.Node:
        """The index: `[N, K]`, or the flat one that values without a batch axis are taken at."""
        return self._rows if per_batch_row and self._rows is not None else self._flat

    def count(self, per_batch_row: bool) -> Size:
        """How many rows a value has for its T tokens."""
        return shape(self.positions(per_batch_row))[-1]

    def resized(self, sizes: Sequence[Size], rows: Rows) -> list[Size]:
        """The sizes of a value's rows: the token dim holds the rows, the others stay."""
        tokens, result = rows.tokens, list(sizes)
        result[tokens.dim] = tokens.outer * self.count(rows.batch is not None) * tokens.inner
        return result

    def view(self, x: fx.Node, sizes: Sequence[Size]) -> fx.Node:
        """A view, of a copy where the strides of the rows do not allow one."""
        args = [self.emit.size(s) for s in sizes]
        fakes = [value(s) if isinstance(s, fx.Node) else s for s in args]
        try:
            with tracing(None), self.emit.mode:
                tensor(x).view(fakes)
        except (RuntimeError, ValueError):
            x = self.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, x, args)

    def gather(self, x: fx.Node, rows: Rows) -> fx.Node:
        """The rows of a value that is computed in full."""
        whole, parts = shape(x), split(shape(x), rows)
        apart = x if parts.sizes == whole else self.view(x, parts.sizes)
        if rows.batch is None:
            taken = self.call(aten.index.Tensor, apart, [*[None] * parts.tokens, self._flat])
        else:
            taken = self._gather_each(apart, parts)
        if parts.sizes == whole:
            return taken
        return self.view(taken, self.resized(whole, rows))

    def _gather_each(self, x: fx.Node, parts: Parts) -> fx.Node:
        assert self._rows is not None and parts.batch is not None
        sizes = list(parts.sizes)
        sizes[parts.tokens] = self.count(True)
        index = self.spread_index(len(sizes), parts.batch, parts.tokens)
        index = self.call(aten.expand.default, index, sizes)
        return self.call(aten.gather.default, x, parts.tokens, index)

    def spread_index(self, rank: int, batch: int | None, tokens: int) -> fx.Node:
        """The index with N at dim `batch` and K at dim `tokens` of `rank` dims, 1 elsewhere."""
        index = self.positions(batch is not None)
        sizes: list[Size] = [ONE] * rank
        sizes[tokens] = shape(index)[-1]
        if batch is not None:
            sizes[batch] = shape(index)[0]
            if batch > tokens:
                index = self.call(aten.permute.default, index, [1, 0])
        return self.view(index, sizes)

    def lift(self, x: fx.Node, tokens: Axis, from_right: int) -> fx.Node:
        """Rows of a value without a batch axis, N * K at `tokens`: N moved to a dim of its own.

        Args:
            x: the rows; outer = 1.
            tokens: the token axis of `x`.
            from_right: the dim that gets N, counted from the right; its size is 1, or it is new.
        """
        known = (x, tokens.dim, from_right)
        if known not in self._lifted:
            self._lifted[known] = self._lift(x, tokens, from_right)
        return self._lifted[known]

    def _lift(self, x: fx.Node, tokens: Axis, from_right: int) -> fx.Node:
        dim = tokens.dim
        while len(shape(x)) < from_right:
            x, dim = self.call(aten.unsqueeze.default, x, 0), dim + 1
        sizes, rows = list(shape(x)), self.positions(True)
        batch, count = shape(rows)
        sizes[dim : dim + 1] = [batch, count * tokens.inner]
        apart = self.view(x, sizes)
        target = len(sizes) - 1 - from_right
        target += target > dim
        order = list(range(len(sizes)))
        order[target], order[dim] = order[dim], order[target]
        moved = self.call(aten.permute.default, apart, order)
        return self.call(aten.squeeze.dim, moved, dim)

    def causal_mask(self, rank: int, batch: int | None, keys: Size) -> fx.Node:
        """bool, True where key j is at or before the row's position: [.., N, .., K, keys]."""
        known = (rank, batch, keys)
        if known not in self._masks:
            index = self.spread_index(rank, batch, rank - 2)
            device = tensor(index).device
            kwargs = {"start": 0, "step": 1, "dtype": torch.int64, "device": device}
            key = self.call(prims.iota.default, keys, **kwargs, requires_grad=False)
            self._masks[known] = self.call(aten.le.Tensor, key, index)
        return self._masks[known]

    def scatter(self, into: fx.Node, dim: int, rows: fx.Node) -> fx.Node:
        """A contiguous copy of `into` [N, ..] with the indexed rows along `dim` replaced."""
        into = self.call(aten.clone.default, into, memory_format=torch.contiguous_format)
        if self._rows is None:
            return self.call(aten.index_put.default, into, [*[None] * dim, self._flat], rows)
        index = self.spread_index(len(shape(rows)), 0, dim)
        index = self.call(aten.expand.default, index, list(shape(rows)))
        return self.call(aten.scatter.src, into, dim, index, rows)

"""Tokens that an index picks from a value: rows that a blend has to compute, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_cascade.compiler.graph import Emitter, Size, Sizes, product, shape, size_expr, tensor
from torch_cascade.passes.axes import ONE
from torch_cascade.passes.blend_site import ReuseSite
from torch_cascade.passes.token_frontier import Frontier, ancestors
from torch_cascade.passes.token_maker import Maker
from torch_cascade.passes.token_registry import bound, broadcast, is_pointwise
from torch_cascade.passes.token_rows import Axis, Demand, Rows

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Picked:
    """A lookup of tokens by an index that is known before the check layer; it may be data.

    Attributes:
        node: the lookup.
        source: what it looks up.
        rows: the axes of the source.
        index: int, the tokens.
        alike: dims along which the index says the same: one of each is read.
        sizes: of what is left, broadcast: n tokens, or [N, n] with `each`.
        each: each batch row has an index of its own.
        free: nothing but the last token is picked, which is computed anyway.
        wraps: negative indices count from the end; else they are an error, as `gather` has it.
    """

    node: fx.Node
    source: fx.Node
    rows: Rows
    index: fx.Node
    sizes: tuple[Size, ...]
    each: bool
    alike: tuple[int, ...] = ()
    free: bool = False
    wraps: bool = True

    @property
    def count(self) -> Size:
        """N, how many tokens of each batch row."""
        return product(self.sizes[1:] if self.each else self.sizes) * ONE

    @property
    def demand(self) -> Demand:
        """The source, and its rows."""
        return self.source, self.rows

    def wanted(self, emit: Emitter, site: ReuseSite) -> fx.Node:
        """Its tokens, int64 [N, n], written where `emit` stands; not negative, or an error."""
        index = _before(emit, self.index)
        for dim in self.alike:
            index = emit.call(aten.slice.Tensor, index, dim, 0, 1)
        device = tensor(site.fresh_rows).device
        if tensor(index).device != device:
            index = emit.call(prims.device_put.default, index, device)
        if tensor(index).dtype != torch.int64:
            index = emit.call(prims.convert_element_type.default, index, torch.int64)
        index = emit.call(aten.expand.default, index, list(self.sizes))
        index = emit.call(aten.clone.default, index, memory_format=torch.contiguous_format)
        rows = site.batch if self.each else ONE
        index = emit.call(aten.view.default, index, [rows, self.count])
        index = emit.call(aten.expand.default, index, [site.batch, self.count])
        if not self.wraps:
            return index
        from_end = emit.call(aten.add.Tensor, index, site.tokens)
        negative = emit.call(aten.lt.Scalar, index, 0)
        return emit.call(aten.where.self, negative, from_end, index)

    def of_rows(self, rows: fx.Node, index: fx.Node, wanted: fx.Node) -> fx.Node:
        """The node written again.

        Args:
            rows: of the source.
            index: int64 [N, K], ascending: which tokens they are; all that are wanted among them.
            wanted: what `wanted` wrote.
        """
        emit = Emitter(self.node)
        kept = emit.call(aten.unsqueeze.default, index, 1)
        sought = emit.call(aten.unsqueeze.default, wanted, 2)
        before = emit.call(aten.lt.Tensor, kept, sought)
        places = emit.call(aten.sum.dim_IntList, before, [2])
        maker = Maker(places, per_batch_row=self.rows.batch is not None)
        maker.place(self.node)
        few = replace(self.rows, tokens=replace(self.rows.tokens, length=shape(index)[1]))
        return maker.view(maker.gather(rows, few), shape(self.node))


def rows_along(source: fx.Node, dim: int, site: ReuseSite, sizes: Sizes) -> Rows | None:
    """Tokens in `dim`, the batch in the first other dim of its size; None where there is none.

    Sizes that are equal by accident do no harm: what is asked of a value is proved of its axes.
    """
    given, each = shape(source), site.each
    if not sizes.equal(given[dim], site.tokens):
        return None
    if each is None:
        return Rows(Axis(dim, site.tokens))
    others = (d for d, size in enumerate(given) if d != dim and sizes.equal(size, each))
    batch = next(others, None)
    return None if batch is None else Rows(Axis(dim, site.tokens), Axis(batch, each))


def find_picked(
    node: fx.Node, site: ReuseSite, frontier: Frontier, check: fx.Node | None, sizes: Sizes
) -> Picked | None:
    """The lookup that a node is, if its index is provably known before the check layer."""
    found = None
    if node.target is aten.gather.default:
        found = _gather(node, site, sizes)
    elif node.target is aten.index.Tensor:
        found = _index(node, site, sizes)
    if found is None or found.source not in frontier.below:
        return None
    if tensor(found.index).dtype not in (torch.int64, torch.int32):
        return None  # a mask: how many tokens it picks is data
    early = found.index not in frontier.below and check not in ancestors([found.index])
    number = _known(found.index, site, sizes)
    free = _is_last(number, site, sizes) and (found.wraps or number != -1)
    return replace(found, free=free) if early else None


def _index(node: fx.Node, site: ReuseSite, sizes: Sizes) -> Picked | None:
    """`x[:, index]`, or `x[arange(N), index]` for an index of each batch row."""
    given = bound(node)
    source, indices = given["self"], list(given["indices"])
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if len(used) == 2:
        return _index_each(node, source, indices[:2], site, sizes) if used == [0, 1] else None
    rows, index = rows_along(source, used[-1], site, sizes), indices[used[-1]]
    if rows is None or len(used) > 2:
        return None
    return Picked(node, source, rows, index, shape(index), each=False)


def _index_each(
    node: fx.Node, source: fx.Node, indices: Sequence[fx.Node], site: ReuseSite, sizes: Sizes
) -> Picked | None:
    """`x[arange(N), index]`, or `x[index, arange(N)]` with tokens first."""
    for batch, tokens in ((0, 1), (1, 0)):
        rows, index = rows_along(source, tokens, site, sizes), indices[tokens]
        wide = len(shape(index)) > 1
        if rows is None or (rows.batch is not None and rows.batch.dim != batch) or wide > tokens:
            continue
        if _numbers_rows(indices[batch], shape(source)[batch], wide, sizes):
            return Picked(node, source, rows, index, shape(node)[: 1 + wide], each=True)
    return None


def _numbers_rows(node: fx.Node, batch: Size, wide: bool, sizes: Sizes) -> bool:
    """Whether an index is 0 to N - 1, as [N], or [N, 1] beside a `wide` index."""
    wanted = (batch, ONE) if wide else (batch,)
    found = shape(node)
    if len(found) != len(wanted) or not all(map(sizes.equal, found, wanted)):
        return False
    while node.target in _SAME_ORDER:
        node = node.args[0]  # type: ignore[assignment]
    if batch == 1:
        return True
    given = node.kwargs
    return node.target is prims.iota.default and (given["start"], given["step"]) == (0, 1)


def _gather(node: fx.Node, site: ReuseSite, sizes: Sizes) -> Picked | None:
    """Of an index [N, n, ..] that says the same for all features."""
    given = bound(node)
    source, index = given["self"], given["index"]
    found, dim = shape(index), given["dim"] % len(shape(source))
    rows = rows_along(source, dim, site, sizes)
    if rows is None or (rows.batch is not None and rows.batch.dim != 0):
        return None
    others = [d for d in range(len(found)) if d != dim]
    if not all(sizes.equal(found[d], shape(source)[d]) for d in others):
        return None
    each = rows.batch is not None
    alike = tuple(d for d in others if not (each and d == 0))
    if not all(_constant(index, d) for d in alike):
        return None
    left = tuple(ONE if d in alike else size for d, size in enumerate(found))
    return Picked(node, source, rows, index, left, each, alike, wraps=False)


_SAME_ORDER = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.lift_fresh_copy.default,
        aten.squeeze.dim,
        aten.unsqueeze.default,
        aten.view.default,
        prims.convert_element_type.default,
        prims.device_put.default,
    }
)


def _constant(node: fx.Node, dim: int) -> bool:
    """True only if a tensor is the same along a dim, by how it was made."""
    sizes = shape(node)
    if sizes[dim] == 1 or node.target is aten.full.default:
        return True
    if node.target in (aten.alias.default, aten.lift_fresh_copy.default, aten.clone.default):
        return _constant(node.args[0], dim)  # type: ignore[arg-type]
    if node.target is not aten.expand.default and not is_pointwise(node.target):
        return False
    axis = Axis(dim, sizes[dim])
    taken = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
    places = [(n, broadcast(len(sizes), axis, n)) for n in taken]
    return all(not isinstance(p, Axis) or _constant(n, p.dim) for n, p in places)


def _known(node: fx.Node, site: ReuseSite, sizes: Sizes) -> Size | None:
    """The number that all elements of an index are; None where that is not known."""
    given = bound(node) if node.op == "call_function" else {}
    if node.target in _SAME_ORDER or node.target is aten.expand.default:
        return _known(node.args[0], site, sizes)  # type: ignore[arg-type]
    if node.target is aten.full.default:
        return size_expr(given["fill_value"])
    if node.target is prims.iota.default and given["length"] == 1:
        return size_expr(given["start"])
    if node.target is aten.remainder.Scalar and sizes.equal(size_expr(given["other"]), site.tokens):
        inner = _known(given["self"], site, sizes)
        return site.tokens - 1 if _is_last(inner, site, sizes) else None
    return _held(node) if node.op == "get_attr" else None


def _held(node: fx.Node) -> Size | None:
    """Of a constant of the graph."""
    held = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor) or held.numel() == 0:
        return None
    with _disable_current_modes():
        first = held.flatten()[0]
        return sympy.Integer(int(first)) if bool((held == first).all()) else None


def _is_last(number: Size | None, site: ReuseSite, sizes: Sizes) -> bool:
    return number is not None and (number == -1 or sizes.equal(number, site.tokens - 1))


def _before(emit: Emitter, node: fx.Node) -> fx.Node:
    """A node that stands before the anchor of `emit`; a copy of it where it does not itself."""
    place = {n: i for i, n in enumerate(emit.graph.nodes)}
    late = [n for n in {node, *ancestors([node])} if place[n] > place[emit.anchor]]
    copies: dict[fx.Node, fx.Node] = {}
    for found in sorted(late, key=lambda n: place[n]):
        with emit.graph.inserting_before(emit.anchor):
            copies[found] = emit.graph.node_copy(found, lambda n: copies.get(n, n))
    return copies.get(node, node)

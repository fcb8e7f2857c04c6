"""Paged keys and values: `pool[page_table]` read as a table of pages and the pool they are in.

    k = k_pool[table]                    # [blocks, page, H, D][[R, P]] -> [R, P, page, H, D]
    k = k.flatten(1, 2).transpose(1, 2)  # [R, H, P * page, D]

Seen from K, the pool does not depend on the batch row at all, and on the key only through its place
in a page: row and page number choose an entry of the table. So a piece found here has the pool as
its base, with one dim (`Pages.axis`) that the table's entries index, and the table carries digits
of n and k of its own. A table expanded for the branches is walked up like any other tensor, which
is how the sharing is found.

Nothing is assumed of the entries: a negative one counts from the end, as everywhere in torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

from torch_cascade.compiler.graph import Size, Sizes, product, shape, tensor
from torch_cascade.passes.axes import Digit, Dim, Dims, normalise, same_dim
from torch_cascade.passes.index_map import read_position
from torch_cascade.passes.views import RULES

aten = torch.ops.aten

_INTEGERS = (torch.int32, torch.int64)
_DEEPEST = 12


@dataclass(frozen=True)
class Pages:
    """Which dim of a pool is looked up, and in which table.

    Attributes:
        table: the node of the page table, int32 or int64.
        dims: how each dim of `table` is indexed by digits of n and k.
        axis: the dim of the pool that its entries index.
    """

    table: fx.Node
    dims: Dims
    axis: int


def looked_up(node: fx.Node, dims: Dims, sizes: Sizes) -> tuple[fx.Node, Dims, Pages] | None:
    """The pool, its dims and the table, if a node (indexed by `dims`) takes pages from a pool.

    Returns:
        None where the node is no such lookup, or the table's columns and the places in a page do
        not provably spell the key axis in order, or the pool would have to be copied to be read
        as [blocks, heads, page, features].
    """
    call = _lookup(node)
    if call is None:
        return None
    pool, indices = call
    first = indices[0][0]
    rank = len(dims) - (len(shape(pool)) - len(indices))
    inner = dims[first : first + rank]
    own = {d: _aligned(index, inner, node, first, sizes) for d, index in indices}
    if any(found is None for found in own.values()):
        return None
    read: dict[int, Dim] = {}
    tables: list[tuple[int, fx.Node, Dims]] = []
    for dim, index in indices:
        place = own[dim]
        assert place is not None
        position = read_position(index, place, sizes) if len(indices) > 1 else None
        if position is not None and sizes.at_least(position.offset, 0):
            read[dim] = position
        else:
            tables.append((dim, index, place))
    if len(tables) != 1:
        return None
    middle = tuple(read.get(dim, Dim()) for dim, _ in indices)
    above = (*dims[:first], *middle, *dims[first + rank :])
    axis, index, place = tables[0]
    every = [Pages(*stage, axis) for stage in _stages(index, place, sizes)]
    keys = product(d.size for dim in dims for d in dim.digits if d.axis == "k")
    fitting = [pages for pages in every if _spells_keys(above, pages, keys, sizes)]
    return (pool, above, fitting[-1]) if fitting else None


def _lookup(node: fx.Node) -> tuple[fx.Node, list[tuple[int, fx.Node]]] | None:
    """The pool and its index tensors by dim, which stand side by side; None for other nodes."""
    if node.target is aten.index_select.default:
        pool, dim, index = node.args
        assert isinstance(pool, fx.Node) and isinstance(dim, int) and isinstance(index, fx.Node)
        found = [(dim % len(shape(pool)), index)]
    elif node.target is aten.index.Tensor:
        pool, indices = node.args
        assert isinstance(pool, fx.Node) and isinstance(indices, (list, tuple))
        found = [(d, i) for d, i in enumerate(indices) if isinstance(i, fx.Node)]
    else:
        return None
    if not found:
        return None
    dims = [d for d, _ in found]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    integers = all(tensor(index).dtype in _INTEGERS for _, index in found)
    same_device = all(tensor(index).device == tensor(node).device for _, index in found)
    return (pool, found) if adjacent and integers and same_device else None


def _aligned(index: fx.Node, inner: Dims, node: fx.Node, first: int, sizes: Sizes) -> Dims | None:
    """Dims of one index tensor, which broadcasts to the dims `inner` of the lookup's result."""
    own, full = shape(index), shape(node)[first : first + len(inner)]
    skip = len(full) - len(own)
    found: list[Dim] = []
    for size, out, dim in zip(own, full[skip:], inner[skip:], strict=True):
        if size != 1 and not sizes.equal(size, out):
            return None
        found.append(Dim() if size == 1 else dim)
    return tuple(found)


def _stages(node: fx.Node, dims: Dims, sizes: Sizes) -> Iterator[tuple[fx.Node, Dims]]:
    """A table as it is looked up, then as it was before each view: expanded, taken by column."""
    yield node, dims
    while node.op == "call_function" and node.target in RULES:
        source = RULES[node.target](node, dims, sizes)
        if source is None or not _same_entries(node, source[0]):
            return
        node, dims = source
        yield node, dims
    if node.op == "placeholder":  # Dynamo guards the strides of inputs
        strides = zip(tensor(node).stride(), dims, strict=True)
        yield node, tuple(Dim() if s == 0 and _only(dim, "n") else dim for s, dim in strides)


def _same_entries(node: fx.Node, source: fx.Node) -> bool:
    """True iff `node` holds entries of `source` unchanged: the same dtype or a wider one."""
    below, above = tensor(node), tensor(source)
    widened = (torch.int32, torch.int64) == (above.dtype, below.dtype)
    return below.device == above.device and (below.dtype == above.dtype or widened)


def _keys(dims: Dims, sizes: Sizes) -> tuple[Digit, ...]:
    return normalise([d for dim in dims for d in dim.digits if d.axis == "k"], sizes)


def _only(dim: Dim, *axes: str) -> bool:
    return all(digit.axis in axes for digit in dim.digits)


def _spells_keys(pool: Dims, pages: Pages, keys: Size, sizes: Sizes) -> bool:
    """True iff (column of the table, place in the page) is the key, in order, on viewable dims."""
    if not all(_only(dim, "h", "k", "d") for dim in pool) or not all(
        _only(dim, "n", "k") for dim in pages.dims
    ):
        return False
    for axis in ("h", "k", "d"):
        carrying = [dim for dim in pool if any(d.axis == axis for d in dim.digits)]
        if len(carrying) > 1:
            return False
    places, columns = _keys(pool, sizes), _keys(pages.dims, sizes)
    if len(places) > 1 or len(columns) > 1:
        return False
    if not all(sizes.equal(digit.stride, 1) for digit in places):
        return False
    if not all(sizes.equal(digit.stride, page_size(pool)) for digit in columns):
        return False
    return sizes.equal(page_size(pool) * product(d.size for d in columns), keys)


def page_size(pool: Sequence[Dim]) -> Size:
    """Keys in a page of a pool of these dims."""
    return product(d.size for dim in pool for d in dim.digits if d.axis == "k")


def same_pages(a: Pages | None, b: Pages | None, sizes: Sizes) -> bool:
    """True iff K and V are looked up in the same entries of the same table."""
    if a is None or b is None or not _same_value(a.table, b.table, _DEEPEST):
        return False
    return all(same_dim(x, y, sizes) for x, y in zip(a.dims, b.dims, strict=True))


def _same_value(a: Any, b: Any, depth: int) -> bool:
    """True iff two arguments are the same, or computed alike from the same: K and V may each do."""
    if a is b or depth == 0:
        return a is b
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and bool(a == b)
    if a.op != "call_function" or a.target is not b.target or not _is_pure(a):
        return False
    left, left_spec = tree_flatten((a.args, a.kwargs))
    right, right_spec = tree_flatten((b.args, b.kwargs))
    pairs = zip(left, right, strict=True) if left_spec == right_spec else ()
    return left_spec == right_spec and all(_same_value(x, y, depth - 1) for x, y in pairs)


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # size arithmetic
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags

"""One rule an ATen op: an element of its result from elements of its operands.

This module has the registry and the views, which only move the index; `mask_sources` has the ops
that make or join elements. Pointwise ops need no rule where their operands are known numbers,
for the op itself computes them; `mask_arithmetic` adds integers that depend on indices, sizes or
data. A rule answers None where it cannot say.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from torch_cascade.compiler.graph import Size, Sizes, product, shape, size_expr
from torch_cascade.passes.predicate import Index, Tree

if TYPE_CHECKING:
    from torch_cascade.passes.mask_elements import Elements

aten = torch.ops.aten
prims = torch.ops.prims

Rule: TypeAlias = "Callable[[Elements, fx.Node, Index], Tree | None]"

RULES: dict[Any, Rule] = {}
_ZERO = sympy.Integer(0)


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register one rule for some op overloads."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def aligned(index: Index, sizes: Sequence[Size]) -> Index:
    """The index of an operand that broadcasts to a tensor indexed by `index`."""
    tail = index[len(index) - len(sizes) :]
    return tuple(_ZERO if s == 1 else i for i, s in zip(tail, sizes, strict=True))


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call by position or name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def source_of(node: fx.Node) -> fx.Node:
    """The first argument of a call, a node."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def replaced(index: Index, dim: int, *by: Size) -> Index:
    """An index with the entry of one dim replaced (by nothing: removed)."""
    return (*index[:dim], *by, *index[dim + 1 :])


@rule(aten.alias.default, aten.clone.default, aten.detach.default, prims.device_put.default)
def _same(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    return read.at(source_of(node), index)


@rule(aten.unsqueeze.default)
def _unsqueeze(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    return read.at(source_of(node), replaced(index, argument(node, 1, "dim") % len(index)))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    source = source_of(node)
    sizes = shape(source)
    given = argument(node, 1, "dim", range(len(sizes)))
    dims = {d % len(sizes) for d in (given if isinstance(given, Sequence) else (given,))}
    gone = [d in dims and s == 1 for d, s in enumerate(sizes)]
    if gone.count(False) != len(index):
        return None
    kept = iter(index)
    return read.at(source, tuple(_ZERO if g else next(kept) for g in gone))


@rule(aten.expand.default)
def _expand(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    return read.at(source_of(node), aligned(index, shape(source_of(node))))


@rule(aten.permute.default)
def _permute(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    order = [d % len(index) for d in argument(node, 1, "dims")]
    return read.at(source_of(node), tuple(index[order.index(d)] for d in range(len(index))))


@rule(aten.transpose.int)
def _transpose(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    a, b = (argument(node, i, f"dim{i - 1}") % len(index) for i in (1, 2))
    moved = list(index)
    moved[a], moved[b] = index[b], index[a]
    return read.at(source_of(node), tuple(moved))


def position_in(read: Elements, given: Any, length: Size) -> Size | None:
    """A start or an index counted from the front, None where its sign is not known."""
    position = _ZERO if given is None else size_expr(given)
    if read.prover.known(position):
        return position
    if read.prover.known(-position - 1) and read.prover.known(position + length):
        return position + length
    return None


@rule(aten.slice.Tensor)
def _slice(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    dim = argument(node, 1, "dim", 0) % len(index)
    start = position_in(read, argument(node, 2, "start"), shape(source_of(node))[dim])
    step = size_expr(argument(node, 4, "step", 1))
    if start is None:
        return None
    return read.at(source_of(node), replaced(index, dim, start + step * index[dim]))


@rule(aten.select.int)
def _select(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    source = source_of(node)
    dim = argument(node, 1, "dim") % len(shape(source))
    position = position_in(read, argument(node, 2, "index"), shape(source)[dim])
    if position is None:
        return None
    return read.at(source, (*index[:dim], position, *index[dim:]))


@rule(prims.rev.default, aten.flip.default)
def _reversed(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    flipped = {d % len(index) for d in argument(node, 1, "dims")}
    pairs = zip(index, shape(node), strict=True)
    return read.at(
        source_of(node), tuple(s - 1 - i if d in flipped else i for d, (i, s) in enumerate(pairs))
    )


@rule(operator.getitem)
def _piece(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    """One tensor of a split or an unbind."""
    pieces, which = source_of(node), argument(node, 1, "index")
    if pieces.target is aten.unbind.int:
        dim = argument(pieces, 1, "dim", 0) % (len(index) + 1)
        return read.at(source_of(pieces), (*index[:dim], sympy.Integer(which), *index[dim:]))
    if pieces.target is not aten.split_with_sizes.default:
        return None
    dim = argument(pieces, 2, "dim", 0) % len(index)
    lengths = [size_expr(s) for s in argument(pieces, 1, "split_sizes")[:which]]
    return read.at(source_of(pieces), replaced(index, dim, index[dim] + sum(lengths, _ZERO)))


@rule(aten.repeat.default)
def _repeat(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    source = source_of(node)
    sizes = shape(source)
    new = len(index) - len(sizes)
    counts = [size_expr(r) for r in argument(node, 1, "repeats")[new:]]
    triples = zip(aligned(index, sizes), sizes, counts, strict=True)
    return read.at(source, tuple(i if c == 1 else Mod(i, s) for i, s, c in triples))


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _reshape(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    source = source_of(node)
    groups = list(_groups(shape(node), shape(source), read.sizes))
    moved: list[Size] = []
    rest = list(index)
    for new, old in groups:
        taken = [rest.pop(0) for _ in new]
        if new == old:
            moved += taken
            continue
        flat = _ZERO
        for i, s in zip(taken, new, strict=True):
            flat = flat * s + i
        moved += [_digit(read, flat, product(old[d + 1 :]), s) for d, s in enumerate(old)]
    complete = not rest and len(moved) == len(shape(source))
    return read.at(source, tuple(moved)) if complete else None


def _digit(read: Elements, flat: Size, stride: Size, length: Size) -> Size:
    """`flat // stride % length`, without the operations that change nothing."""
    if read.prover.always(stride - 1 - flat, read.box):
        return _ZERO
    digit = FloorDiv(flat, stride)
    below = read.prover.always(stride * length - 1 - flat, read.box)
    return digit if below else Mod(digit, length)


def _groups(
    new: tuple[Size, ...], old: tuple[Size, ...], sizes: Sizes
) -> Iterator[tuple[tuple[Size, ...], tuple[Size, ...]]]:
    """Shortest runs of dims of two shapes that hold the same elements; ends where none does."""
    a = b = 0
    while a < len(new) or b < len(old):
        spans = [(i, j) for i in range(a, len(new) + 1) for j in range(b, len(old) + 1)]
        spans = sorted((s for s in spans if s != (a, b)), key=sum)
        fits = (s for s in spans if sizes.equal(product(new[a : s[0]]), product(old[b : s[1]])))
        end = next(fits, None)
        if end is None:
            return
        yield new[a : end[0]], old[b : end[1]]
        a, b = end

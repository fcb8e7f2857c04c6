"""One rule an ATen op: how the dims of its input are indexed, given how its output is.

A rule answers with the input node and its dims, or None where it cannot say (the walk then takes
the node as a base: always right). Rules never guard and never edit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape, size_expr
from torch_cascade.passes.axes import ONE, ZERO, Dim, Dims, distribute, regroup

aten = torch.ops.aten
prims = torch.ops.prims

Source: TypeAlias = tuple[fx.Node, Dims]
Rule: TypeAlias = Callable[[fx.Node, Dims, Sizes], "Source | None"]

RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register one rule for some op overloads."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def source_of(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    """One step up: the rule's answer; None where there is no rule."""
    found = RULES.get(node.target) if node.op == "call_function" else None
    return None if found is None else found(node, dims, sizes)


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call by position or name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _dim(node: fx.Node, index: int = 1, name: str = "dim") -> int:
    dim: int = argument(node, index, name, 0)
    return dim % max(len(shape(node)), 1)


@rule(
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
)
def _same(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    return _source(node), dims


@rule(aten.unsqueeze.default)
def _unsqueeze(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    dim = _dim(node)
    return _source(node), dims[:dim] + dims[dim + 1 :]


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    source = _source(node)
    rank = len(shape(source))
    given = argument(node, 1, "dim", tuple(range(rank)))
    chosen = {d % rank for d in (given if isinstance(given, Sequence) else (given,))}
    gone = [d in chosen and s == 1 for d, s in enumerate(shape(source))]
    if gone.count(False) != len(dims):
        return None  # a symbolic size: squeeze may or may not have removed the dim
    kept = iter(dims)
    return source, tuple(Dim() if g else next(kept) for g in gone)


@rule(aten.expand.default)
def _expand(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    source = _source(node)
    new = len(dims) - len(shape(source))
    pairs = zip(dims[new:], shape(source), shape(node)[new:], strict=True)
    if any(s != 1 and not sizes.equal(s, out) for _, s, out in pairs):
        return None
    pairs = zip(dims[new:], shape(source), shape(node)[new:], strict=True)
    return source, tuple(Dim() if s == 1 else dim for dim, s, _ in pairs)


@rule(aten.permute.default)
def _permute(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    order = [d % len(dims) for d in argument(node, 1, "dims")]
    return _source(node), tuple(dims[order.index(d)] for d in range(len(dims)))


@rule(aten.transpose.int)
def _transpose(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    a, b = _dim(node), _dim(node, 2, "dim1")
    swapped = list(dims)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return _source(node), tuple(swapped)


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    source = _source(node)
    regrouped = regroup(dims, shape(node), shape(source), sizes)
    return None if regrouped is None else (source, regrouped)


@rule(aten.slice.Tensor)
def _slice(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    source, dim = _source(node), _dim(node)
    start = argument(node, 2, "start")
    if argument(node, 4, "step", 1) != 1:
        return None
    start = ZERO if start is None else size_expr(start)
    if sizes.known(sympy.Lt(start, 0)):
        start = start + shape(source)[dim]
    if not sizes.at_least(start, 0) or not sizes.at_least(shape(source)[dim], start):
        return None
    return source, _shifted(dims, dim, start)


def _shifted(dims: Dims, dim: int, by: Size) -> Dims:
    moved = Dim(dims[dim].digits, dims[dim].offset + by)
    return (*dims[:dim], moved, *dims[dim + 1 :])


@rule(aten.select.int)
def _select(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    dim, index = argument(node, 1, "dim"), argument(node, 2, "index")
    return _selected(_source(node), dims, dim, index, sizes)


def _selected(source: fx.Node, dims: Dims, dim: int, index: Any, sizes: Sizes) -> Source | None:
    dim = dim % len(shape(source))
    position = size_expr(index)
    if sizes.known(sympy.Lt(position, 0)):
        position = position + shape(source)[dim]
    if not sizes.at_least(position, 0):
        return None
    return source, (*dims[:dim], Dim((), position), *dims[dim:])


@rule(operator.getitem)
def _getitem(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    pieces, index = _source(node), node.args[1]
    assert isinstance(index, int)
    if pieces.target is aten.unbind.int:
        return _selected(_source(pieces), dims, argument(pieces, 1, "dim", 0), index, sizes)
    if pieces.target is aten.split_with_sizes.default:
        lengths = [size_expr(s) for s in argument(pieces, 1, "split_sizes")]
        start = sum(lengths[:index], ZERO)
    elif pieces.target is aten.split.Tensor:
        start = size_expr(argument(pieces, 1, "split_size")) * index
    else:
        return None
    dim = argument(pieces, 2, "dim", 0) % len(dims)
    return _source(pieces), _shifted(dims, dim, start)


@rule(aten.repeat.default)
def _repeat(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    source = _source(node)
    new = len(dims) - len(shape(source))
    repeats = [size_expr(r) for r in argument(node, 1, "repeats")][new:]
    kept: list[Dim] = []
    for dim, count, size in zip(dims[new:], repeats, shape(source), strict=True):
        tail = _tail(dim, count, size, sizes)
        if tail is None:
            return None
        kept.append(tail)
    return source, tuple(kept)


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(node: fx.Node, dims: Dims, sizes: Sizes) -> Source | None:
    source, dim = _source(node), argument(node, 2, "dim")
    if dim is None:
        return None
    dim = dim % len(dims)
    repeats = size_expr(argument(node, 1, "repeats"))
    parts = split_dim(dims[dim], [shape(source)[dim], repeats], sizes)
    return None if parts is None else (source, (*dims[:dim], parts[0], *dims[dim + 1 :]))


def _tail(dim: Dim, count: Size, size: Size, sizes: Sizes) -> Dim | None:
    """The dim below `count` copies of it along itself: its minor `size` indices."""
    if count == 1:
        return dim
    parts = split_dim(dim, [count, size], sizes)
    return None if parts is None else parts[1]


def split_dim(dim: Dim, targets: list[Size], sizes: Sizes) -> list[Dim] | None:
    """A dim seen as several dims of the sizes `targets`, if it covers them whole."""
    real = [t for t in targets if t != ONE]
    if not dim.covers(sympy.prod(targets), sizes):
        return None
    parts = distribute(dim.digits, real, sizes)
    if parts is None:
        return None
    filled = iter(parts)
    return [Dim() if t == ONE else next(filled) for t in targets]

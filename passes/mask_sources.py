"""Rules of ops that make elements (iota, fills, literals), join them (cat, pad), or write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_cascade.compiler.graph import Size, shape, size_expr, tensor
from torch_cascade.passes.mask_leaves import constant, is_integer, number
from torch_cascade.passes.mask_rules import (
    RULES,
    Rule,
    aligned,
    argument,
    position_in,
    replaced,
    rule,
    source_of,
)
from torch_cascade.passes.predicate import Index, Tree, apply, both, if_else, leaves

if TYPE_CHECKING:
    from torch_cascade.passes.mask_elements import Elements

__all__ = ["RULES"]

aten = torch.ops.aten
prims = torch.ops.prims

_ZERO = sympy.Integer(0)


@rule(aten.lift_fresh_copy.default)
def _literal(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    """A number written in the program as a tensor: the graph holds it as a constant of its own."""
    source = source_of(node)
    if source.op != "get_attr" or set(source.users) != {node}:
        return read.at(source, index)
    held = getattr(node.graph.owning_module, str(source.target), None)
    if type(held) is not torch.Tensor or held.numel() != 1:
        return None
    with unset_fake_temporarily():  # Inductor's fake mode may be active around the passes
        return constant(held.item())


@rule(prims.iota.default)
def _iota(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    start, step = (size_expr(node.kwargs.get(k, d)) for k, d in (("start", 0), ("step", 1)))
    return _progression(read, node, start, step, index[0])


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    start = node.args[0] if len(node.args) > 1 else 0
    step = argument(node, 2, "step", 1)
    if isinstance(start, float) or isinstance(step, float):
        return None
    return _progression(read, node, size_expr(start), size_expr(step), index[0])


def _progression(
    read: Elements, node: fx.Node, start: Size, step: Size, position: Size
) -> Tree | None:
    element, dtype = sympy.expand(start + step * position), tensor(node).dtype
    # The position is in range, so the ends bound the element whatever its expression looks like.
    ends = (start, start + step * (shape(node)[0] - 1))
    fits = read.fits(element, dtype) or all(read.fits(end, dtype) for end in ends)
    return element if fits else None


def _filled(position: int, name: str) -> Rule:
    """A tensor of one value, an argument of the call."""

    def read_fill(read: Elements, node: fx.Node, index: Index) -> Tree | None:
        given, dtype = argument(node, position, name), tensor(node).dtype
        if not isinstance(given, fx.Node):
            return number(given, dtype)
        size = size_expr(given) if is_integer(dtype) else None
        return size if size is not None and read.fits(size, dtype) else None

    return read_fill


RULES[aten.scalar_tensor.default] = _filled(0, "s")
RULES[aten.full.default] = RULES[aten.full_like.default] = _filled(1, "fill_value")
RULES[aten.new_full.default] = _filled(2, "fill_value")
for _target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
    RULES[_target] = lambda read, node, index: number(0, tensor(node).dtype)
for _target in (aten.ones.default, aten.ones_like.default, aten.new_ones.default):
    RULES[_target] = lambda read, node, index: number(1, tensor(node).dtype)


@rule(aten.cat.default)
def _cat(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    pieces: list[fx.Node] = list(argument(node, 0, "tensors"))
    dim = argument(node, 1, "dim", 0) % len(index)
    if any(len(shape(p)) != len(index) for p in pieces):
        return None
    end = sum((shape(p)[dim] for p in pieces), _ZERO)
    tree: Tree | None = None
    for piece in reversed(pieces):
        start = end - shape(piece)[dim]
        there = _as_dtype(read, piece, replaced(index, dim, index[dim] - start), node)
        if there is None:
            return None
        before = read.atoms.at_least_zero(end - 1 - index[dim])
        tree, end = there if tree is None else if_else(before, there, tree), start
    return tree


def _as_dtype(read: Elements, source: fx.Node, index: Index, node: fx.Node) -> Tree | None:
    """An element of `source` in the dtype of `node`."""
    dtypes = tensor(source).dtype, tensor(node).dtype
    tree = apply(lambda leaf: read.converted(leaf, *dtypes), read.at(source, index))
    return None if None in leaves(tree) else tree


@rule(aten._to_copy.default)
def _to_copy(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    return _as_dtype(read, source_of(node), index, node)


@rule(aten.copy.default)
def _copy(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    source = node.args[1]
    assert isinstance(source, fx.Node)
    return _as_dtype(read, source, aligned(index, shape(source)), node)


@rule(aten.slice_scatter.default)
def _slice_scatter(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    """`x[..., start:end] = written` along one dim."""
    source, written = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(written, fx.Node)
    dim = argument(node, 2, "dim", 0) % len(index)
    start = position_in(read, argument(node, 3, "start"), shape(source)[dim])
    if start is None or argument(node, 5, "step", 1) != 1:
        return None
    moved = index[dim] - start
    inside = _within(read, moved, shape(written)[dim])
    there = read.at(written, replaced(index, dim, moved))
    return if_else(inside, there, read.at(source, index))


@rule(aten.select_scatter.default)
def _select_scatter(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    """`x[..., position] = written` along one dim."""
    source, written = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(written, fx.Node)
    dim = argument(node, 2, "dim") % len(index)
    position = position_in(read, argument(node, 3, "index"), shape(source)[dim])
    if position is None:
        return None
    inside = _within(read, index[dim] - position, sympy.Integer(1))
    return if_else(inside, read.at(written, replaced(index, dim)), read.at(source, index))


def _within(read: Elements, position: Size, length: Size) -> Tree:
    """0 <= position < length."""
    at_least_zero = read.atoms.at_least_zero
    return both(at_least_zero(position), at_least_zero(length - 1 - position))


@rule(aten.constant_pad_nd.default)
def _pad(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    source, dtype = source_of(node), tensor(node).dtype
    pads = [size_expr(p) for p in argument(node, 1, "pad")]
    inside: Tree = True
    moved = list(index)
    for dim, left, right in zip(reversed(range(len(index))), pads[::2], pads[1::2], strict=False):
        moved[dim] = index[dim] - left
        if left != 0 or right != 0:
            inside = both(inside, _within(read, moved[dim], shape(source)[dim]))
    fill = number(argument(node, 2, "value", 0.0), dtype)
    return if_else(inside, read.at(source, tuple(moved)), fill) if fill is not None else None


@rule(aten.index.Tensor)
def _index(read: Elements, node: fx.Node, index: Index) -> Tree | None:
    """`x[i0, i1, ...]` with an integer tensor for every dim of x."""
    source, positions = source_of(node), list(argument(node, 1, "indices"))
    sizes = shape(source)
    if len(positions) != len(sizes) or not all(isinstance(p, fx.Node) for p in positions):
        return None
    if not all(is_integer(tensor(p).dtype) for p in positions):
        return None
    found = [read.at(p, aligned(index, shape(p))) for p in positions]
    known = [isinstance(f, sympy.Expr) and read.prover.always(f, read.box) for f in found]
    return read.at(source, tuple(found)) if all(known) else None


def _triangle(sign: int) -> Rule:
    """Tril (sign 1) keeps col - row <= diagonal, triu (-1) keeps >=; zero elsewhere."""

    def read_triangle(read: Elements, node: fx.Node, index: Index) -> Tree | None:
        diagonal = size_expr(argument(node, 1, "diagonal", 0))
        inside = read.atoms.at_least_zero(sign * (diagonal - (index[-1] - index[-2])))
        return if_else(inside, read.at(source_of(node), index), number(0, tensor(node).dtype))

    return read_triangle


RULES[aten.tril.default] = _triangle(1)
RULES[aten.triu.default] = _triangle(-1)

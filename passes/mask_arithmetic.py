"""Pointwise ops on integers that depend on indices, sizes or data: one rule an op.

A rule gets the leaves of its operands (and Python numbers as they stand in the call) and answers
with a leaf or a tree, or None where it cannot say. Arithmetic is checked for overflow of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Size, tensor, value
from torch_cascade.passes.mask_leaves import number
from torch_cascade.passes.predicate import Index, Tree, apply, both, if_else

if TYPE_CHECKING:
    from torch_cascade.passes.mask_elements import Elements

aten = torch.ops.aten
prims = torch.ops.prims

LeafRule: TypeAlias = "Callable[..., Tree | None]"

LEAF_RULES: dict[Any, LeafRule] = {}


def _integers(*numbers: Any) -> list[Size] | None:
    """Leaves and Python numbers as integer expressions, if all of them are integers."""
    if not all(isinstance(x, (int, sympy.Expr)) for x in numbers):
        return None
    return [sympy.Integer(x) if isinstance(x, int) else x for x in numbers]


def _operands(read: Elements, node: fx.Node, *numbers: Any) -> list[Size] | None:
    """The operands of an op as integers, if the dtype it computes in holds them."""
    found = _integers(*numbers)
    if found is None:
        return None
    vals = [value(a) if isinstance(a, fx.Node) else a for a in node.args[: len(numbers)]]
    first, last = (v if isinstance(v, torch.Tensor) else 0 for v in (vals[0], vals[-1]))
    dtype = torch.result_type(first, last)
    held = [isinstance(v, torch.Tensor) and v.dtype == dtype for v in vals]
    fits = (h or read.fits(x, dtype) for x, h in zip(found, held, strict=True))
    return found if all(fits) else None


def _computed(read: Elements, node: fx.Node, result: Size) -> Tree | None:
    result = sympy.expand(result)
    return result if read.fits(result, tensor(node).dtype) else None


def _arithmetic(function: Callable[[Size, Size], Size]) -> LeafRule:
    """A function of two integers, with the `alpha` of add and sub."""

    def rule(
        read: Elements, node: fx.Node, index: Index, a: Any, b: Any, alpha: Any = 1
    ) -> Tree | None:
        pair, factor = _operands(read, node, a, b), _integers(alpha)
        if pair is None or factor is None:
            return None
        return _computed(read, node, function(pair[0], factor[0] * pair[1]))

    return rule


for _op, _function in {
    aten.add: lambda a, b: a + b,
    aten.sub: lambda a, b: a - b,
    aten.rsub: lambda a, b: b - a,
    aten.mul: lambda a, b: a * b,
}.items():
    LEAF_RULES[_op.Tensor] = LEAF_RULES[_op.Scalar] = _arithmetic(_function)


def _comparison(function: Callable[[Elements, Size], Tree]) -> LeafRule:
    """A comparison of two integers, as a function of their difference b - a."""

    def rule(read: Elements, node: fx.Node, index: Index, a: Any, b: Any) -> Tree | None:
        pair = _operands(read, node, a, b)
        return None if pair is None else function(read, pair[1] - pair[0])

    return rule


def _is_zero(read: Elements, expr: Size) -> Tree:
    return both(read.atoms.at_least_zero(expr), read.atoms.at_least_zero(-expr))


for _op, _test in {
    aten.le: lambda read, d: read.atoms.at_least_zero(d),
    aten.lt: lambda read, d: read.atoms.at_least_zero(d - 1),
    aten.ge: lambda read, d: read.atoms.at_least_zero(-d),
    aten.gt: lambda read, d: read.atoms.at_least_zero(-d - 1),
    aten.eq: _is_zero,
    aten.ne: lambda read, d: if_else(_is_zero(read, d), False, True),
}.items():
    LEAF_RULES[_op.Tensor] = LEAF_RULES[_op.Scalar] = _comparison(_test)


def _negative(read: Elements, node: fx.Node, index: Index, a: Any) -> Tree | None:
    found = _operands(read, node, a)
    return None if found is None else _computed(read, node, -found[0])


def _absolute(read: Elements, node: fx.Node, index: Index, a: Any) -> Tree | None:
    found = _operands(read, node, a)
    if found is None or not read.fits(-found[0], tensor(node).dtype):
        return None
    return if_else(read.atoms.at_least_zero(found[0]), found[0], -found[0])


LEAF_RULES[aten.neg.default] = _negative
LEAF_RULES[aten.abs.default] = _absolute


def _clamp(
    read: Elements, node: fx.Node, index: Index, a: Any, min: Any = None, max: Any = None
) -> Tree | None:
    """clamp(a, min, max) = minimum(maximum(a, min), max)."""
    given = _integers(*(x for x in (a, min, max) if x is not None))
    if given is None or not all(read.fits(x, tensor(node).dtype) for x in given):
        return None
    tree: Tree = given[0]
    if min is not None:
        tree = if_else(read.atoms.at_least_zero(given[0] - given[1]), given[0], given[1])
    if max is not None:
        below = apply(lambda x: read.atoms.at_least_zero(given[-1] - x), tree)
        tree = if_else(below, tree, given[-1])
    return tree


def _clamp_max(read: Elements, node: fx.Node, index: Index, a: Any, max: Any) -> Tree | None:
    return _clamp(read, node, index, a, None, max)


for _target in (aten.clamp.default, aten.clamp.Tensor, aten.maximum.default):
    LEAF_RULES[_target] = _clamp
LEAF_RULES[aten.clamp_min.default] = LEAF_RULES[aten.clamp_min.Tensor] = _clamp
for _target in (aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor):
    LEAF_RULES[_target] = _clamp_max


def _where(
    read: Elements, node: fx.Node, index: Index, condition: Any, a: Any, b: Any
) -> Tree | None:
    """The chosen operand; the condition is a leaf, so it is known here."""
    if not isinstance(condition, bool):
        return None  # a condition of another dtype
    return _chosen(read, node, node.args[1 if condition else 2], a if condition else b)


def _chosen(read: Elements, node: fx.Node, arg: Any, leaf: Any) -> Tree | None:
    """A leaf of an operand in the dtype of the result."""
    dtype = tensor(node).dtype
    if isinstance(arg, fx.Node) and isinstance(value(arg), torch.Tensor):
        return read.converted(leaf, tensor(arg).dtype, dtype)
    if isinstance(arg, fx.Node):
        return read.converted(leaf, torch.int64, dtype)
    return number(arg, dtype)


for _target in (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar):
    LEAF_RULES[_target] = _where


def _masked_fill(
    read: Elements, node: fx.Node, index: Index, a: Any, mask: Any, fill: Any
) -> Tree | None:
    if not isinstance(mask, bool):
        return None
    return _chosen(read, node, node.args[2 if mask else 0], fill if mask else a)


LEAF_RULES[aten.masked_fill.Scalar] = LEAF_RULES[aten.masked_fill.Tensor] = _masked_fill


def _convert(
    read: Elements, node: fx.Node, index: Index, a: Any, *args: Any, **kwargs: Any
) -> Tree | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return read.converted(a, tensor(source).dtype, tensor(node).dtype)


LEAF_RULES[prims.convert_element_type.default] = _convert

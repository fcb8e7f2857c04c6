"""Recognises softmax in the forms that decompositions and people give it.

    exp(s - m) / sum(exp(s - m))        the decomposition, and by hand; any m constant along a row
    exp(s - m) * (1 / sum(...))
    exp((s - m) - log(sum(exp(s - m))))               exp of log_softmax
    exp(s - (log(sum(exp(s - m))) + m))               exp of s - logsumexp
    where(all(s == -inf), 0, softmax(s))              the safe softmax of SDPA: 0, not NaN

Conversions between floating dtypes may stand anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from torch_cascade.compiler.graph import Sizes, shape
from torch_cascade.passes.labels import same_shape
from torch_cascade.passes.scalars import constant, is_value, uncast
from torch_cascade.passes.views import argument

aten = torch.ops.aten


@dataclass(frozen=True)
class Softmax:
    """`softmax(scores, dim)`.

    Attributes:
        scores: its input.
        dim: the dim it runs over, non-negative.
        empty: what a row of -inf only gives.
        by_max: True if the rows' maximum is subtracted first of all. Else a row of huge finite
            scores only is 0 / 0, or rounds to weights that do not sum to one.
    """

    scores: fx.Node
    dim: int
    empty: Literal["nan", "zero"] = "nan"
    by_max: bool = True


@dataclass(frozen=True)
class _Shifted:
    """`base - sum(rows)`, every one of `rows` constant along `dim`.

    Attributes:
        base, rows: see above; sums among the rows are taken apart.
        first: what is subtracted from `base` itself, None if nothing is.
    """

    base: fx.Node
    rows: tuple[fx.Node, ...]
    first: fx.Node | None


def match_softmax(node: fx.Node, sizes: Sizes) -> Softmax | None:
    """The softmax whose value `node` is, or None."""
    if node.target in (aten._softmax.default, aten._safe_softmax.default):
        return _operator(node)
    if node.target is aten.where.self:
        return _safe(node, sizes)
    if node.target in (aten.div.Tensor, aten.mul.Tensor):
        return _quotient(node, sizes)
    if node.target is aten.exp.default:
        return _exp_of_log(node, sizes)
    return None


def _operator(node: fx.Node) -> Softmax | None:
    scores, dim = node.args[0], node.args[1]
    assert isinstance(scores, fx.Node) and isinstance(dim, int)
    safe = node.target is aten._safe_softmax.default
    return Softmax(scores, dim % len(shape(scores)), "zero" if safe else "nan")


def _quotient(node: fx.Node, sizes: Sizes) -> Softmax | None:
    for over, under in _fractions(node):
        exp, total = uncast(over), _row_sum(under)
        if exp.target is not aten.exp.default or total is None or uncast(total[0]) is not exp:
            continue
        dim, argument_ = total[1], exp.args[0]
        assert isinstance(argument_, fx.Node)
        shifted = _unshifted(argument_, dim, sizes)
        return Softmax(shifted.base, dim, by_max=_by_max(shifted, dim))
    return None


def _fractions(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """(numerator, denominator) readings of a div, or of a mul by a reciprocal."""
    a, b = node.args[0], node.args[1]
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return []
    if node.target is aten.div.Tensor:
        return [(a, b)]
    pairs = ((a, uncast(b)), (b, uncast(a)))
    found = [(x, y.args[0]) for x, y in pairs if y.target is aten.reciprocal.default]
    return [(x, y) for x, y in found if isinstance(y, fx.Node)]


def _row_sum(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The tensor and the dim that `node` sums over, keeping the dim with size 1."""
    node = uncast(node)
    inserted = None
    if node.target is aten.unsqueeze.default:
        source, dim = node.args[0], argument(node, 1, "dim")
        assert isinstance(source, fx.Node)
        inserted = dim % len(shape(node))
        node = uncast(source)
    if node.target is not aten.sum.dim_IntList:
        return None
    summed, dims = node.args[0], argument(node, 1, "dim")
    if not isinstance(summed, fx.Node) or not dims or len(dims) != 1:
        return None
    dim = dims[0] % len(shape(summed))
    keepdim = bool(argument(node, 2, "keepdim", False))
    if (inserted is None) != keepdim or inserted not in (None, dim):
        return None
    return summed, dim


def _unshifted(node: fx.Node, dim: int, sizes: Sizes) -> _Shifted:
    """Take off everything that is subtracted from whole rows: softmax does not see it."""
    rows: list[fx.Node] = []
    first: fx.Node | None = None
    node = uncast(node)
    while node.target is aten.sub.Tensor and not node.kwargs:
        minuend, row = node.args[0], node.args[1]
        if not isinstance(minuend, fx.Node) or not isinstance(row, fx.Node):
            break
        if not _constant_along(row, minuend, dim, sizes):
            break
        first = row
        rows += _summands(row)
        node = uncast(minuend)
    return _Shifted(node, tuple(rows), first)


def _constant_along(row: fx.Node, full: fx.Node, dim: int, sizes: Sizes) -> bool:
    """True iff `row` is one value along a dim of `full` and broadcasts to it."""
    own, sizes_full = shape(row), shape(full)
    if len(own) != len(sizes_full) or not sizes.equal(own[dim], 1):
        return False
    return all(s == 1 or sizes.equal(s, f) for s, f in zip(own, sizes_full, strict=True))


def _summands(row: fx.Node) -> list[fx.Node]:
    row = uncast(row)
    parts = row.args[:2]
    if row.target is not aten.add.Tensor or row.kwargs:
        return [row]
    return [s for p in parts if isinstance(p, fx.Node) for s in _summands(p)] or [row]


def _by_max(shifted: _Shifted, dim: int) -> bool:
    """True iff the first thing subtracted from the base is its maximum along `dim`."""
    if shifted.first is None:
        return False
    row = uncast(shifted.first)
    if row.target is aten.amax.default:
        source, dims = row.args[0], argument(row, 1, "dim")
    elif isinstance(row.args[0] if row.args else None, fx.Node) and row.args[1:] == (0,):
        row = row.args[0]  # type: ignore[assignment]
        if row.target is not aten.max.dim:
            return False
        source, dims = row.args[0], [argument(row, 1, "dim")]
    else:
        return False
    assert isinstance(source, fx.Node)
    rank = len(shape(source))
    return uncast(source) is shifted.base and [d % rank for d in dims] == [dim]


def _exp_of_log(node: fx.Node, sizes: Sizes) -> Softmax | None:
    inner = node.args[0]
    assert isinstance(inner, fx.Node)
    for dim in range(len(shape(node))):
        shifted = _unshifted(inner, dim, sizes)
        for row in shifted.rows:
            rest = list(shifted.rows)
            rest.remove(row)
            if _is_log_sum_exp(row, shifted.base, rest, dim, sizes):
                return Softmax(shifted.base, dim, by_max=_by_max(shifted, dim))
    return None


def _is_log_sum_exp(
    row: fx.Node, base: fx.Node, rest: list[fx.Node], dim: int, sizes: Sizes
) -> bool:
    """True iff `row = log(sum(exp(base - sum(rest))))`."""
    if row.target is aten.logsumexp.default:
        source, dims = row.args[0], argument(row, 1, "dim")
        assert isinstance(source, fx.Node)
        same = uncast(source) is base and not rest
        return same and [d % len(shape(source)) for d in dims] == [dim]
    total = row.args[0] if row.target is aten.log.default else None
    summed = _row_sum(total) if isinstance(total, fx.Node) else None
    if summed is None or summed[1] != dim:
        return False
    exp = uncast(summed[0])
    inner = exp.args[0] if exp.target is aten.exp.default else None
    if not isinstance(inner, fx.Node):
        return False
    found = _unshifted(inner, dim, sizes)
    return found.base is base and sorted(found.rows) == sorted(rest)


def _safe(node: fx.Node, sizes: Sizes) -> Softmax | None:
    """`where(no key is visible in the row, 0, softmax)`."""
    condition, zero, plain = node.args
    if (
        not isinstance(condition, fx.Node)
        or not isinstance(plain, fx.Node)
        or not is_value(constant(zero), 0)
    ):
        return None
    found = match_softmax(uncast(plain), sizes)
    if found is None or not same_shape(plain, node, sizes) or not _all_hidden(condition, found):
        return None
    return replace(found, empty="zero")


def _all_hidden(condition: fx.Node, softmax: Softmax) -> bool:
    """True iff `condition = not any(not (scores == -inf))` along the softmax's dim, kept."""
    found = _argument_of(condition, aten.logical_not.default)
    if found is None or found.target is not aten.any.dim:
        return False
    dim, keepdim = argument(found, 1, "dim"), argument(found, 2, "keepdim", False)
    visible = _argument_of(found, aten.any.dim)
    hidden = visible and _argument_of(visible, aten.logical_not.default)
    scores = hidden and _argument_of(hidden, aten.eq.Scalar)
    if scores is None or hidden is None or not is_value(constant(hidden.args[1]), -math.inf):
        return False
    same_dim = dim % len(shape(scores)) == softmax.dim and keepdim
    return bool(same_dim) and uncast(scores) is uncast(softmax.scores)


def _argument_of(node: fx.Node, target: object) -> fx.Node | None:
    if node.target is not target:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None

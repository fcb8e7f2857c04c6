"""The scores of a hand-written attention: from the input of a softmax up to q k^T.

On the way stand scale factors, masks and a soft-cap, in any order. What is met first is applied
last, so a mask found below a scale factor would be scaled by it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Sizes, tensor
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import Dims
from torch_cascade.passes.labels import SAME_ORDER, above, same_shape
from torch_cascade.passes.scalars import (
    DIVIDES,
    FLOATS,
    MULTIPLIES,
    Factor,
    constant,
    is_float_cast,
    is_value,
    scaling,
    uncast,
)
from torch_cascade.passes.site import MaskKind

aten = torch.ops.aten

MATMULS = frozenset({aten.bmm.default, aten.baddbmm.default})
_BARRIERS = MATMULS | {aten.mm.default, aten.addmm.default, aten.convolution.default}
_SEARCH_LIMIT = 32

# A finite fill above this is no mask anyone writes: -10000 is the smallest in use.
_HIGHEST_FILL = -9000


@dataclass(frozen=True)
class ScoreMask:
    """A mask of the scores at one place.

    Attributes:
        node: the mask.
        kind: as in `MaskTerm`.
        fill: the finite score of a hidden key after all scaling, None for -inf.
        at: the scores it was applied to, and their dims.
        dims: dims of `at`.
    """

    node: fx.Node
    kind: MaskKind
    at: fx.Node
    dims: Dims
    fill: float | None = None


@dataclass(frozen=True)
class Scores:
    """`factor * matmul` under `masks`; `dims` are those of the matmul's output.

    With a `softcap` c > 0 it is `c * tanh(factor * matmul / c)` under them.
    """

    matmul: fx.Node
    dims: Dims
    factor: Factor
    masks: tuple[ScoreMask, ...] = ()
    softcap: float | None = None


@dataclass(frozen=True)
class _Place:
    """A value on the way up: its dims, and what multiplies it further down."""

    node: fx.Node
    dims: Dims
    factor: Factor
    sizes: Sizes


_Result = Scores | Declined | None


def trace_scores(node: fx.Node, dims: Dims, sizes: Sizes) -> _Result:
    """Read the scores that a softmax is taken of.

    Returns:
        The scores; a decline if a matmul stands above but something on the way is no scale and no
        mask; None if no matmul stands above: this softmax belongs to no attention.
    """
    return _trace(_Place(node, dims, Factor(), sizes))


def _trace(place: _Place) -> _Result:
    rule = _RULES.get(place.node.target)
    if rule is not None:
        return rule(place)
    step = above(place.node, place.dims, place.sizes)
    if step is None:
        return _stuck(place)
    return _trace(replace(place, node=step[0], dims=step[1]))


def _bmm(place: _Place) -> _Result:
    return Scores(place.node, place.dims, place.factor)


def _baddbmm(place: _Place) -> _Result:
    """`beta * bias + alpha * q k^T`."""
    node = place.node
    beta, alpha = constant(node.kwargs.get("beta", 1)), constant(node.kwargs.get("alpha", 1))
    bias = node.args[0]
    if alpha is None or not (is_value(beta, 0) or is_value(beta, 1)):
        return _decline(Reason.SPELLING, node, f"baddbmm with beta {beta} and alpha {alpha}")
    found = Scores(node, place.dims, place.factor * Factor(alpha))
    return found if is_value(beta, 0) else _with_bias(found, bias, place)


def _cast(place: _Place) -> _Result:
    source = place.node.args[0]
    assert isinstance(source, fx.Node)
    return _trace(replace(place, node=source)) if is_float_cast(place.node) else _stuck(place)


def _scaled(place: _Place) -> _Result:
    found = scaling(place.node, place.sizes)
    if found is None:
        return _stuck(place)
    scores, factor = found
    result = _trace(replace(place, node=scores, factor=place.factor * factor))
    if factor.opaque and isinstance(result, Scores):
        return _decline(Reason.TENSOR_SCALE, place.node, "the scale is a tensor")
    return result


def _capped(place: _Place) -> _Result:
    """`b * tanh(a * scores)`, b the factor met so far: soft-cap |b| of scores scaled by a * b.

    So the two constants need not be the same number, and their signs need not agree.
    """
    source = place.node.args[0]
    assert isinstance(source, fx.Node)
    found = _trace(replace(place, node=source, factor=Factor()))
    if not isinstance(found, Scores):
        return found
    outer = place.factor
    if outer.opaque or outer.nodes or not outer.number.is_number:
        return _decline(Reason.TENSOR_SCALE, place.node, "the soft-cap is not a known number")
    cap = abs(float(outer.number))
    if found.masks or found.softcap is not None or not 0 < cap < math.inf:
        detail = "masks or another tanh below the tanh of a soft-cap, or one of size 0"
        return _decline(Reason.SPELLING, place.node, detail)
    return replace(found, factor=found.factor * outer, softcap=cap)


def _added(place: _Place) -> _Result:
    """Scores plus bias, in either order; the side that leads to a matmul is the scores."""
    node = place.node
    if not is_value(constant(node.kwargs.get("alpha", 1)), 1):
        return _stuck(place)
    declined: Declined | None = None
    for scores, bias in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        if not isinstance(scores, fx.Node) or not same_shape(scores, node, place.sizes):
            continue
        found = _trace(replace(place, node=scores))
        if isinstance(found, Scores):
            return _with_bias(found, bias, place)
        declined = found if declined is None else declined
    return _stuck(place) if declined is None else declined


def _with_bias(found: Scores, bias: Any, place: _Place) -> _Result:
    if is_value(constant(bias), 0):
        return found
    if not isinstance(bias, fx.Node) or tensor(bias).dtype not in FLOATS:
        return _decline(Reason.SPELLING, place.node, f"{bias} added to the scores")
    if place.factor.is_one:
        return _masked(found, ScoreMask(bias, "add", place.node, place.dims))
    hides = _zero_or_hidden(bias)
    if hides is None or not place.factor.is_positive:
        return _decline(Reason.SPELLING, place.node, "a bias added before the scale")
    kind, condition = hides
    return _masked(found, ScoreMask(condition, kind, place.node, place.dims))


def _masked(found: Scores, mask: ScoreMask) -> Scores:
    return replace(found, masks=(mask, *found.masks))


def _zero_or_hidden(bias: fx.Node) -> tuple[MaskKind, fx.Node] | None:
    """The bool mask behind `where(keep, 0, -inf)` or `where(drop, -inf, 0)`, of any dtype."""
    bias = uncast(bias)
    if bias.target is not aten.where.self:
        return None
    condition = bias.args[0]
    assert isinstance(condition, fx.Node)
    first, second = constant(bias.args[1]), constant(bias.args[2])
    if is_value(first, 0) and is_value(second, -math.inf):
        return "keep", condition
    return ("drop", condition) if is_value(first, -math.inf) and is_value(second, 0) else None


def _filled(place: _Place) -> _Result:
    """`where(keep, scores, fill)` or `where(drop, fill, scores)`."""
    condition, chosen, other = place.node.args
    if constant(other) is not None:
        kind, scores, fill = "keep", chosen, constant(other)
    else:
        kind, scores, fill = "drop", other, constant(chosen)
    if fill is None or not isinstance(scores, fx.Node) or not isinstance(condition, fx.Node):
        return _stuck(place)
    if tensor(condition).dtype != torch.bool or not same_shape(scores, place.node, place.sizes):
        return _stuck(place)
    found = _trace(replace(place, node=scores))
    if not isinstance(found, Scores):
        return found
    if not place.factor.is_positive:
        detail = "scores are masked before a scale that may be negative"
        return _decline(Reason.SPELLING, place.node, detail)
    return _with_fill(found, place, condition, "keep" if kind == "keep" else "drop", fill)


def _with_fill(
    found: Scores, place: _Place, condition: fx.Node, kind: MaskKind, fill: sympy.Expr
) -> _Result:
    if is_value(fill, -math.inf):
        return _masked(found, ScoreMask(condition, kind, place.node, place.dims))
    final = fill * place.factor.number
    if not final.is_number or not final.is_extended_real or not final < _HIGHEST_FILL:
        detail = f"scores of hidden keys are set to {final}"
        return _decline(Reason.FINITE_FILL, place.node, detail, "mask with -inf")
    mask = ScoreMask(condition, kind, place.node, place.dims, float(final))
    return _masked(found, mask)


_RULES: dict[Any, Callable[[_Place], _Result]] = {
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    torch.ops.prims.convert_element_type.default: _cast,
    **dict.fromkeys(MULTIPLIES | DIVIDES, _scaled),
    aten.add.Tensor: _added,
    aten.add.Scalar: _added,
    aten.where.self: _filled,
    aten.tanh.default: _capped,
}


def _decline(reason: Reason, node: fx.Node, detail: str, hint: str = "") -> Declined:
    return Declined(reason, node.name, detail, hint)


def _stuck(place: _Place) -> Declined | None:
    """Why the walk ends here, if scores are above; None if no matmul is in reach."""
    node = place.node
    if find_above(node, lambda n: n.target in MATMULS) is None:
        return None
    if node.target in MULTIPLIES | DIVIDES and node.args[0] is not node.args[1]:
        return _decline(Reason.TENSOR_SCALE, node, "the scores are scaled by a tensor")
    if node.target in SAME_ORDER:
        return _decline(Reason.RANK, node, "dims of the scores are joined or split unprovably")
    return _decline(Reason.SPELLING, node, _MEANINGS.get(node.target, f"{node.target} of scores"))


_MEANINGS: dict[Any, str] = {
    aten.cat.default: "scores are joined with more columns (an attention sink?)",
    aten.sub.Tensor: "something is subtracted from the scores: add its negative",
}


def find_above(node: fx.Node, wanted: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The nearest node, itself or above, that is `wanted`; does not look past a matmul."""
    queue, seen = [node], {node}
    while queue and len(seen) < _SEARCH_LIMIT:
        current = queue.pop(0)
        if wanted(current):
            return current
        if current.target in _BARRIERS:
            continue
        fresh = [n for n in current.all_input_nodes if n not in seen]
        seen.update(fresh)
        queue += fresh
    return None

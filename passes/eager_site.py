"""From two matched matmuls to an `AttentionSite`: operands with named axes, masks, scale.

A `bmm` has rows and heads in one batch dim. Where q, k, v, the output and the masks all have them
apart somewhere on their way, the site is [n, h, q, d]; else it is [n, q, d] with both in n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy
import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape, tensor
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import Dim, Dims, normalise, same_digits, whole
from torch_cascade.passes.labels import above, below, broadcast, labels
from torch_cascade.passes.scalars import Factor, is_float_cast, is_value, scaling
from torch_cascade.passes.scores import ScoreMask, Scores
from torch_cascade.passes.sinks import Sinks
from torch_cascade.passes.site import AttentionSite, AxisName, MaskTerm, Operand
from torch_cascade.passes.softmax import Softmax
from torch_cascade.passes.views import RULES

aten = torch.ops.aten

_WITH_HEADS: tuple[AxisName, ...] = ("n", "h")
_ONE_BATCH: tuple[AxisName, ...] = ("n",)
_CASTS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})


@dataclass(frozen=True)
class View:
    """A node and how its dims are indexed by n (rows and heads in one), q, k and d."""

    node: fx.Node
    dims: Dims


@dataclass(frozen=True)
class Matmuls:
    """Two matmuls with nothing but scale, soft-cap, masks, a sink and softmax between.

    Attributes:
        out: the second matmul, with the dims of the output.
        softmax: the softmax between.
        scores: the first matmul, its scale, soft-cap and masks.
        q, k, v: operands of the two, as they take them.
        keys, width: sizes of the key axis and of the features of q and k.
        sinks: the column of scores that has no value.
    """

    out: View
    softmax: Softmax
    scores: Scores
    q: View
    k: View
    v: View
    keys: Size
    width: Size
    sinks: Sinks | None = None


def eager_site(found: Matmuls, sizes: Sizes) -> AttentionSite | Declined:
    """The site of two matmuls, with rows and heads apart if that is possible.

    Where they are not, but K has heads of its own, the site is declined: in one batch, heads that
    share KV (GQA) would look like rows that do.
    """
    apart = _Builder(found, _WITH_HEADS, sizes).site()
    if isinstance(apart, AttentionSite):
        return apart
    uncast = _Builder(found, _WITH_HEADS, sizes, casts=True)
    site = uncast.site()
    if isinstance(site, AttentionSite):
        return site
    dims = len(shape(found.softmax.scores))
    if dims > 4:
        detail = f"scores of {dims} dims: heads in groups, or rows of more than one dim"
        return Declined(Reason.RANK, found.out.node.name, detail)
    if uncast.keys_have_heads():
        return apart
    merged = _Builder(found, _ONE_BATCH, sizes).site()
    return merged if isinstance(merged, AttentionSite) else apart


class _Builder:
    """Builds the site of two matmuls with a given set of batch axes.

    With `casts`, rows and heads of q, k and v may stand apart above a conversion between floating
    dtypes (autocast of an einsum); the attention is then computed in the dtype above it.
    """

    def __init__(
        self, found: Matmuls, batch: tuple[AxisName, ...], sizes: Sizes, casts: bool = False
    ) -> None:
        self.found = found
        self.batch = batch
        self.sizes = sizes
        self.casts = casts

    def site(self) -> AttentionSite | Declined:
        """The site, or what is missing for one."""
        found, batch = self.found, self.batch
        q, q_factor = self._factored(found.q, (*batch, "q", "d"))
        k, k_factor = self._factored(found.k, (*batch, "k", "d"))
        v = self._operand(found.v, (*batch, "k", "d"))
        out = self._output((*batch, "q", "d"))
        if q is None or k is None or v is None or out is None:
            return self._decline(Reason.RANK, "rows and heads are not apart everywhere")
        if not all(self._same_batch(out, operand) for operand in (q, k, v)):
            return self._decline(Reason.RANK, "rows and heads are not apart in the same way")
        if self.casts and len({tensor(operand.node).dtype for operand in (q, k, v)}) > 1:
            return self._decline(Reason.RANK, "rows and heads are apart in different dtypes")
        finite = any(m.fill is not None or m.kind == "add" for m in found.scores.masks)
        if finite and not found.softmax.by_max:
            detail = "finite masks under a softmax that does not first subtract the row's maximum"
            return self._decline(Reason.FINITE_FILL, detail)
        scale = self._scale(found.scores.factor * q_factor * k_factor)
        if isinstance(scale, Declined):
            return scale
        masks = self._masks(out)
        if isinstance(masks, Declined):
            return masks
        sinks = self._sinks(out)
        if isinstance(sinks, Declined):
            return sinks
        return AttentionSite(
            node=out.node,
            q=q,
            k=k,
            v=v,
            masks=masks,
            scale=scale,
            softcap=found.scores.softcap,
            sinks=sinks,
            fully_masked=_fully_masked(found),
            form="eager",
            axes=None if out.axes == (*batch, "q", "d") else out.axes,
        )

    def keys_have_heads(self) -> bool:
        """True iff K has a dim of heads, and not of one head."""
        k = self._operand(self.found.k, (*_WITH_HEADS, "k", "d"))
        return k is not None and not self.sizes.equal(_size(k, "h"), 1)

    def _decline(self, reason: Reason, detail: str) -> Declined:
        return Declined(reason, self.found.out.node.name, detail)

    def _operand(self, view: View, axes: tuple[AxisName, ...]) -> Operand | None:
        """The nearest tensor above whose dims are `axes`, past expands that expand nothing."""
        best: Operand | None = None
        node, dims = view.node, view.dims
        while True:
            names = labels(dims, axes, self.sizes)
            if best is not None and names != best.axes:
                return best
            best = Operand(node, names) if names is not None else None
            step = self._above(node, dims) if best is None else above(node, dims, self.sizes)
            if step is None:
                return best
            node, dims = step

    def _above(self, node: fx.Node, dims: Dims) -> tuple[fx.Node, Dims] | None:
        source = node.args[0] if self.casts and is_float_cast(node) else None
        return (source, dims) if isinstance(source, fx.Node) else above(node, dims, self.sizes)

    def _factored(self, view: View, axes: tuple[AxisName, ...]) -> tuple[Operand | None, Factor]:
        """An operand without the numbers it is multiplied by, and their product."""
        best, factor = self._operand(view, axes), Factor()
        node, dims, product = view.node, view.dims, Factor()
        while True:
            scaled = scaling(node, self.sizes)
            if scaled is None:
                step = self._above(node, dims)
                if step is None:
                    return best, factor
                node, dims = step
                continue
            product = product * scaled[1]
            if product.opaque or tensor(node).dtype != tensor(scaled[0]).dtype:
                return best, factor
            node = scaled[0]
            operand = self._operand(View(node, dims), axes)
            if operand is not None:
                best, factor = operand, product

    def _output(self, axes: tuple[AxisName, ...]) -> Operand | None:
        """The nearest value below the second matmul whose dims are `axes`."""
        node, dims = self.found.out.node, self.found.out.dims
        while True:
            names = labels(dims, axes, self.sizes)
            if names is not None:
                return Operand(node, names)
            users = [u for u in node.users if u.target is not aten.sym_size.int]
            after = below(users[0], dims, self.sizes) if len(users) == 1 else None
            if after is None:
                return None
            node, dims = users[0], after

    def _same_batch(self, a: Operand, b: Operand) -> bool:
        return all(self.sizes.equal(_size(a, axis), _size(b, axis)) for axis in self.batch)

    def _scale(self, factor: Factor) -> float | fx.Node | Declined | None:
        number = factor.number
        if factor.opaque or len(factor.nodes) > 1 or (factor.nodes and not is_value(number, 1)):
            return self._decline(Reason.TENSOR_SCALE, "the scale is a tensor, or divides by one")
        if factor.nodes:
            return factor.nodes[0]
        if number.is_number:
            return float(number)
        if is_value(number * sympy.sqrt(self.found.width), 1):
            return None
        return self._decline(Reason.TENSOR_SCALE, f"a scale of {number}")

    def _masks(self, out: Operand) -> tuple[MaskTerm, ...] | Declined:
        """The masks as terms that broadcast to the scores, [n, h, q, k] or [n, q, k]."""
        wanted = (*self._rows(out), whole("k", self.found.keys))
        terms: list[MaskTerm] = []
        for mask in self.found.scores.masks:
            node = self._aligned(mask, wanted)
            if node is None:
                detail = f"mask {mask.node.name} {list(shape(mask.node))} does not broadcast"
                return self._decline(Reason.MASK_SHAPE, f"{detail} to {list(out.axes[:-1])} and k")
            terms.append(MaskTerm(node, mask.kind, mask.fill))
        return tuple(terms)

    def _rows(self, out: Operand) -> tuple[Dim, ...]:
        """Dims of the scores without the keys: [n, h, q] or [n, q]."""
        heads = _size(out, "h") if "h" in self.batch else sympy.Integer(1)
        batch = [whole("n", _size(out, "n"), heads)]
        batch += [whole("n", heads)] if "h" in self.batch else []
        return (*batch, whole("q", _size(out, "q")))

    def _sinks(self, out: Operand) -> fx.Node | Declined | None:
        """The outermost tensor that broadcasts to one column of scores and holds the sinks."""
        sinks = self.found.sinks
        if sinks is None:
            return None
        node, dims = sinks.node, sinks.dims
        double = torch.float64 in {tensor(node).dtype} - {tensor(out.node).dtype}
        if double or not tensor(node).dtype.is_floating_point:
            return self._decline(Reason.AUTOCAST_MIXED, f"a sink of {tensor(node).dtype}")
        best: fx.Node | None = None
        while True:
            if self._broadcasts(node, dims, (*self._rows(out), Dim())):
                best = node
            rule = None if node.target in _CASTS else RULES.get(node.target)
            source = rule(node, dims, self.sizes) if rule is not None else None
            if source is None:
                break
            node, dims = source
        detail = f"a sink {sinks.node.name} {list(shape(sinks.node))} that does not broadcast"
        return self._decline(Reason.SPELLING, detail) if best is None else best

    def _aligned(self, mask: ScoreMask, wanted: tuple[Dim, ...]) -> fx.Node | None:
        """The nearest tensor, at or above a mask, that broadcasts to scores of dims `wanted`."""
        node, dims = mask.node, broadcast(mask.node, mask.at, mask.dims, self.sizes)
        while dims is not None:
            if self._broadcasts(node, dims, wanted):
                return node
            rule = None if node.target in _CASTS else RULES.get(node.target)
            source = rule(node, dims, self.sizes) if rule is not None else None
            if source is None:
                return None
            node, dims = source
        return None

    def _broadcasts(self, node: fx.Node, dims: Dims, wanted: tuple[Dim, ...]) -> bool:
        if len(dims) > len(wanted):
            return False
        aligned = wanted[len(wanted) - len(dims) :]
        for size, dim, want in zip(shape(node), dims, aligned, strict=True):
            one = size == 1 and not dim.digits and dim.offset == 0
            digits = normalise(dim.digits, self.sizes)
            same = same_digits(digits, want.digits, self.sizes.equal)
            same = same and dim.covers(size, self.sizes)
            if not one and not same:
                return False
        return True


def _size(operand: Operand, axis: AxisName) -> Size:
    return shape(operand.node)[operand.axes.index(axis)]


def _fully_masked(found: Matmuls) -> Literal["zero", "nan", "uniform"]:
    finite = any(mask.fill is not None for mask in found.scores.masks)
    return "uniform" if finite else found.softmax.empty

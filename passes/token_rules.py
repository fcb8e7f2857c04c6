"""Token rules of ops that compute: matrix products, reductions, constants, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import torch_cascade.kernels.ops  # noqa: F401  (defines the ops of the namespace cascade)
from torch_cascade.compiler.graph import Sizes, shape, tensor
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.axes import ONE
from torch_cascade.passes.token_maker import Maker
from torch_cascade.passes.token_registry import (
    Arguments,
    bound,
    broadcast,
    mixed,
    rank_of,
    token_rule,
)
from torch_cascade.passes.token_rows import Axis, Place, Places, Rows, Tangled

aten = torch.ops.aten
prims = torch.ops.prims
cascade = torch.ops.cascade

DECLINED_OPS: dict[str, str] = {
    "aten.histc": "counts over all tokens",
    "aten.bincount": "counts over all tokens",
    "aten.index_put": "writes rows that the data name",
    "aten.index_add": "adds to rows that the data name",
    "aten.scatter_reduce": "reduces into rows that the data name",
    "aten.nonzero": "its size is data",
    "aten.masked_select": "its size is data",
    "aten._grouped_mm": "its rows are not provably sorted by expert and put back",
    "transformers.grouped_mm_fallback": "its rows are not provably sorted by expert and put back",
}
DECLINED_OPS |= dict.fromkeys(
    (
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.reduce_scatter_tensor",
    ),
    "ranks that hold some tokens or features each, and exchange them",
)
"""Ops known to have no token rule, and why."""


def without_rule(target: Any) -> str:
    """What to say of an op that has no rule."""
    name = op_name(target)
    why = DECLINED_OPS.get(name)
    return f"no token rule for {name}" + (f": {why}" if why else "")


def op_name(target: Any) -> str:
    """An op's name without its overload, such as `aten.mm`."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    return str(getattr(target, "__name__", target))


@token_rule(aten.mm.default, aten.bmm.default)
def _matmul(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return _product(node, axis, "self", "mat2")


@token_rule(aten.addmm.default)
def _addmm(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return _biased(node, axis, _product(node, axis, "mat1", "mat2"))


@token_rule(aten.baddbmm.default)
def _baddbmm(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return _biased(node, axis, _product(node, axis, "batch1", "batch2"))


def _product(node: fx.Node, axis: Axis, left: str, right: str) -> Places:
    """[.., M, N] from [.., M, K] and [.., K, N]."""
    from_right = rank_of(node) - axis.dim
    found: dict[str, Place] = {}
    if from_right != 1:
        found[left] = axis
    if from_right != 2:
        found[right] = axis
    return found


def _biased(node: fx.Node, axis: Axis, factors: Places) -> Places:
    bias = bound(node)["self"]
    return {**factors, "self": broadcast(rank_of(node), axis, bias)}


@token_rule(aten.linear.default)
def _linear(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    if axis.dim < rank_of(node) - 1:
        return {"input": axis}
    return {"weight": axis.at(0), "bias": axis.at(0)}


@token_rule(
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.var_mean.correction,
    aten.any.dim,
    aten.any.dims,
    aten.all.dim,
    aten.all.dims,
    aten.prod.dim_int,
    aten.argmax.default,
    aten.argmin.default,
    aten.logsumexp.default,
    aten.max.dim,
    aten.min.dim,
)
def _reduce(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """A reduction over other dims than the axis."""
    given = bound(node)
    source = given["self"]
    rank, gone = rank_of(source), _reduced(given, rank_of(source))
    kept = list(range(rank))
    if not given.get("keepdim", False):
        kept = [d for d in kept if d not in gone]
    if kept[axis.dim] in gone:
        return mixed(node, "it reduces over the tokens")
    return {"self": axis.at(kept[axis.dim])}


def _reduced(given: Arguments, rank: int) -> set[int]:
    dims = given.get("dim")
    if isinstance(dims, int):
        return {dims % rank}
    return {d % rank for d in dims} if dims else set(range(rank))


def _sized(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    sizes = maker.resized(shape(node), rows)
    return maker.call(node.target, sizes, *node.args[1:], **node.kwargs)


@token_rule(aten.full.default, aten.zeros.default, aten.ones.default, make=_sized, resizes=True)
def _constant(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return {}


@token_rule(aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
def _like(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    return {"self": axis}


def _numbered(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    """Write start + step * index: the rows of an iota are the index itself."""
    result = maker.positions(False)
    for op, number, neutral in (
        (aten.mul.Tensor, given.get("step", 1), 1),
        (aten.add.Tensor, given.get("start", 0), 0),
    ):
        if number != neutral:
            result = maker.call(op, result, number)
    dtype = tensor(node).dtype
    if tensor(result).dtype != dtype:
        result = maker.call(prims.convert_element_type.default, result, dtype)
    if tensor(result).device != tensor(node).device:
        result = maker.call(prims.device_put.default, result, tensor(node).device)
    return result


@token_rule(prims.iota.default, make=_numbered, resizes=True, counts=True)
@token_rule(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    make=_numbered,
    resizes=True,
    counts=True,
)
def _iota(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    if (axis.outer, axis.inner) != (ONE, ONE):
        return mixed(node, "it numbers more than the tokens")
    if not all(isinstance(n, (int, fx.Node)) for n in _numbers(node)):
        return mixed(node, "fractional steps are rounded in an order of their own")
    return {}


def _numbers(node: fx.Node) -> list[Any]:
    given = bound(node)
    return [given[name] for name in ("start", "step") if name in given]


@token_rule(cascade.attend.default, counts=True)
def _attend(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """Of o [N, H, M, D] and lse [N, H, M]: tokens are queries, and the batch is dim 0."""
    given = bound(node)
    if axis.dim not in (0, 2):
        return mixed(node, f"dim {axis.dim} holds neither queries nor the batch")
    found: dict[str, Place] = {"q": axis}
    if axis.dim == 0:
        found |= dict.fromkeys(("k", "v", "kv_lens", "page_table"), Tangled())
    if given.get("mask") is not None:
        found["mask"] = broadcast(4, axis, given["mask"])
    if given.get("q_positions") is not None:
        found["q_positions"] = broadcast(2, axis.at(axis.dim // 2), given["q_positions"])
    return found


@token_rule(cascade.merge.default)
def _merge(node: fx.Node, axis: Axis, sizes: Sizes) -> Places | Declined:
    """Of o [.., D] and lse [..]: an axis has the same dim in both."""
    given = bound(node)
    rank = rank_of(given["lse"][0])
    if axis.dim == rank:
        return mixed(node, "the last dim holds features")
    parts = (axis,) * len(given["o"])
    found: dict[str, Place | tuple[Place, ...]] = {"o": parts, "lse": parts}
    if given.get("sinks") is not None:
        found["sinks"] = broadcast(rank, axis, given["sinks"])
    return found

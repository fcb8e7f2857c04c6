"""One call or more of each op that has a token rule, and which of its dims may hold tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import torch_cascade.kernels.ops
import torch_cascade.passes.token_ranks  # noqa: F401  (both register: ops, rules)

aten = torch.ops.aten
prims = torch.ops.prims
cascade = torch.ops.cascade

ALL = "all"


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        op: the op.
        make: makes (args, kwargs) of a dtype.
        dims: dims of the (first) result that may hold tokens; ALL for every one.
        batch: dims that may hold the batch; those of `dims` if None.
        apart: pairs (token dim, batch dim) that come from different operands: declined.
    """

    op: Any
    make: Callable[[torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]]
    dims: Any = ALL
    batch: Any = None
    apart: frozenset[tuple[int, int]] = field(default=frozenset())

    def __str__(self) -> str:
        return f"{self.op}"


def numbers(*shape: int) -> Callable[[torch.dtype], Tensor]:
    """Random numbers that are the same in every dtype."""
    seed = torch.Generator().manual_seed(sum(shape) + 7 * len(shape))
    made = torch.randn(shape, generator=seed)
    return lambda dtype: made.to(dtype)


def integers(high: int, *shape: int) -> Callable[[torch.dtype], Tensor]:
    seed = torch.Generator().manual_seed(high + sum(shape))
    made = torch.randint(0, high, shape, generator=seed)
    return lambda dtype: made


def bools(*shape: int) -> Callable[[torch.dtype], Tensor]:
    number = numbers(*shape)(torch.float32)
    made = (number > 0) | (number == number.amax(-1, keepdim=True))
    return lambda dtype: made


def case(
    op: Any, *args: Any, dims: Any = ALL, batch: Any = None, apart: Any = (), **kwargs: Any
) -> Case:
    """A case whose tensors are given by what makes them."""

    def filled(arg: Any, dtype: torch.dtype) -> Any:
        if isinstance(arg, (list, tuple)):
            return [filled(a, dtype) for a in arg]
        return arg(dtype) if callable(arg) else arg

    def make(dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {name: filled(arg, dtype) for name, arg in kwargs.items()}
        return tuple(filled(arg, dtype) for arg in args), given

    return Case(op, make, dims, batch, frozenset(apart))


def between(one: set[int], other: set[int]) -> set[tuple[int, int]]:
    """Pairs that have one dim in each set."""
    return {(a, b) for a in one for b in other} | {(b, a) for a in one for b in other}


x = numbers(3, 4, 6)

VIEWS = [
    case(aten.alias.default, x),
    case(aten.detach.default, x),
    case(aten.lift_fresh_copy.default, x),
    case(aten._to_copy.default, x, dtype=torch.float64),
    case(prims.device_put.default, x, torch.device("cpu")),
    case(aten.unsqueeze.default, x, 1, dims={0, 2, 3}),
    case(aten.unsqueeze.default, x, -1, dims={0, 1, 2}),
    case(aten.squeeze.default, numbers(3, 1, 6)),
    case(aten.squeeze.dim, numbers(3, 1, 6), 1),
    case(aten.squeeze.dim, x, 1),
    case(aten.squeeze.dims, numbers(3, 1, 6, 1), [-1, 1]),
    case(aten.expand.default, numbers(3, 1, 6), [2, 3, 4, -1]),
    case(aten.view.default, x, [12, 6], dims={1}),  # dim 0 holds 3 or 4, not 12
    case(aten.view.default, x, [3, 2, 2, 6], apart={(1, 2)}),  # batch behind tokens in a dim
    case(aten.view.default, x, [3, 1, 4, 2, -1], dims={0, 2, 3, 4}, apart={(3, 4)}),
    case(aten.view.default, numbers(12, 6), [3, 4, 6], apart={(0, 1)}),
    case(aten.reshape.default, x, [3, 24], dims={0}),
    case(aten._unsafe_view.default, x, [3, 24], dims={0}),
    case(aten.permute.default, x, [2, 0, -2]),
    case(aten.transpose.int, x, 0, -1),
    case(aten.t.default, numbers(4, 6)),
    case(aten.slice.Tensor, x, 2, 1, 5, dims={0, 1}),
    case(aten.slice.Tensor, x, -2, 0, 2**63 - 1),
    case(aten.slice.Tensor, x, 1, 0, 4, 2, dims={0, 2}),
    case(aten.select.int, x, 1, 2),
    case(aten.select.int, x, -1, -1),
    case(aten.flip.default, x, [1], dims={0, 2}),
    case(prims.rev.default, x, [1], dims={0, 2}),
    case(aten.constant_pad_nd.default, x, [1, 2, 0, 0], dims={0, 1}),
    case(aten.repeat.default, x, [1, 2, 1], dims={0, 2}),
    case(aten.repeat.default, x, [2, 1, 1, 1], dims={1, 2, 3}),
    case(aten.cat.default, [x, numbers(3, 4, 2)], -1, dims={0, 1}),
    case(aten.cat.default, [x, numbers(2, 4, 6)], dims={1, 2}),
    case(aten.stack.default, [x, x], 1, dims={0, 2, 3}),
    case(aten.unbind.int, x, 1),
    case(aten.split.Tensor, x, 4, -1, dims={0, 1}),
    case(aten.split_with_sizes.default, x, [1, 3], 1, dims={0, 2}),
]

LOOKUPS = [
    case(aten.embedding.default, numbers(9, 6), integers(9, 3, 4), apart=between({0, 1}, {2})),
    case(aten.index_select.default, x, 1, integers(4, 7), apart=between({1}, {0, 2})),
    case(aten.gather.default, x, 2, integers(6, 3, 4, 5), apart={(0, 2), (1, 2)}),
    case(aten.gather.default, x, 2, integers(6, 2, 4, 5), dims={1, 2}, apart={(1, 2)}),
    case(aten.scatter.value, x, 2, integers(6, 3, 4, 5), 2.5, dims={0, 1}),
    case(aten.scatter.value, x, 2, integers(6, 2, 4, 5), 2.5, dims={1}),
    case(aten.scatter.src, x, 2, integers(6, 3, 4, 1), numbers(3, 4, 2), dims={0, 1}),
    case(aten.scatter.src, x, 2, integers(6, 3, 4, 1), numbers(5, 4, 2), dims={1}),
    case(aten.scatter_add.default, x, 1, integers(4, 3, 5, 6), numbers(3, 5, 6), dims={0, 2}),
    case(aten.index.Tensor, numbers(9, 4, 6), [integers(9, 5, 7)], apart=between({0, 1}, {2, 3})),
    case(aten.index.Tensor, x, [None, integers(4, 7)], apart=between({1}, {0, 2})),
    case(
        aten.index.Tensor,
        x,
        [integers(3, 5, 1), None, integers(6, 7)],
        apart=between({0, 1}, {2}),
    ),
    case(aten.index.Tensor, numbers(3, 6), [integers(3, 5, 1), integers(6, 7)]),
]

_reduced = {
    aten.sum.dim_IntList: ([1],),
    aten.mean.dim: ([1],),
    aten.amax.default: ([1],),
    aten.amin.default: ([1],),
    aten.var.correction: ([1],),
    aten.var_mean.correction: ([1],),
    aten.any.dim: (1,),
    aten.any.dims: ([1],),
    aten.all.dim: (1,),
    aten.all.dims: ([1],),
    aten.prod.dim_int: (1,),
    aten.argmax.default: (1,),
    aten.argmin.default: (1,),
    aten.logsumexp.default: ([1],),
    aten.max.dim: (1,),
    aten.min.dim: (1,),
}
REDUCTIONS = [
    *(case(op, x, *dims) for op, dims in _reduced.items()),
    *(case(op, x, *dims, keepdim=True, dims={0, 2}) for op, dims in _reduced.items()),
    case(aten.sum.dim_IntList, x, [-1, 0]),
    case(aten.mean.dim, x, None, True, dims=set()),
    case(aten.cumsum.default, x, 1, dims={0, 2}),
    case(aten._softmax.default, x, -1, False, dims={0, 1}),
    case(aten._log_softmax.default, x, 1, False, dims={0, 2}),
    case(aten.sort.default, x, dims={0, 1}),
    case(aten.sort.default, x, 0, dims={1, 2}),
    case(aten.sort.stable, x, stable=True, dim=1, dims={0, 2}),
    case(aten.topk.default, x, 2, dims={0, 1}),
    case(aten.topk.default, x, 2, 1, dims={0, 2}),
]

_factors = between({0}, {1})
_batched = {(0, 1), (0, 2), (1, 2), (2, 1)}  # rows of both factors, but batch rows of one
PRODUCTS = [
    case(aten.mm.default, numbers(12, 6), numbers(6, 5), apart=_factors),
    case(aten.bmm.default, numbers(3, 4, 6), numbers(3, 6, 5), apart=_batched),
    case(aten.addmm.default, numbers(5), numbers(12, 6), numbers(6, 5), apart=_factors),
    case(aten.addmm.default, numbers(12, 5), numbers(12, 6), numbers(6, 5), apart=_factors),
    case(
        aten.baddbmm.default,
        numbers(1, 4, 1),
        numbers(3, 4, 6),
        numbers(3, 6, 5),
        apart=_batched,
    ),
    case(aten.linear.default, x, numbers(5, 6), numbers(5), apart=between({0, 1}, {2})),
]

_anywhere: dict[str, Any] = {"device": torch.device("cpu"), "requires_grad": False}
CONSTANTS = [
    case(aten.full.default, [3, 4], 2.5),
    case(aten.zeros.default, [3, 4]),
    case(aten.ones.default, [3, 4]),
    case(aten.full_like.default, x, 2.5),
    case(aten.zeros_like.default, x),
    case(aten.ones_like.default, x),
    case(prims.iota.default, 12, start=0, step=1, dtype=torch.int64, **_anywhere),
    case(prims.iota.default, 12, start=5, step=-2, dtype=torch.int32, **_anywhere),
    case(aten.arange.default, 12),
    case(aten.arange.start, 2, 9),
    case(aten.arange.start_step, 2, 19, 3),
    case(aten.arange.start_step, 2, 19, 3, dtype=torch.float32),
    case(aten.arange.start_step, 0.0, 3.0, 0.5, dims=set()),
]

_q, _kv = numbers(2, 6, 5, 8), numbers(2, 6, 7, 8)
_few = numbers(2, 3, 7, 8)
_o, _lse = numbers(2, 3, 5, 4), numbers(2, 3, 5)
_sides = between({0, 1}, {2, 3}) - {(2, 0), (2, 1), (3, 0), (3, 1)} | between({2}, {3})
_flat = (numbers(4, 5, 8), numbers(4, 7, 8), numbers(4, 7, 8))
_attends: dict[str, Any] = {"dims": {2}, "batch": {0}}
ATTENTION = [
    case(cascade.sdpa.default, _q, _kv, _kv, apart=_sides),
    case(cascade.sdpa.default, _q, _kv, _kv, None, True, scale=0.3, apart=_sides),
    case(cascade.sdpa.default, *_flat, None, True, apart={(0, 1), (0, 2), (1, 2), (2, 1)}),
    case(
        cascade.sdpa.default,
        *(_q, _few, _few, None, True),
        enable_gqa=True,
        dims={0, 2, 3},
        batch={0, 1, 2, 3},
        apart=_sides | {(0, 1), (3, 1)},
    ),
    case(cascade.sdpa.default, _q, _kv, _kv, bools(2, 1, 5, 7), apart=_sides),
    case(cascade.sdpa.default, _q, _kv, _kv, bools(5, 7), apart=_sides),
    case(cascade.sdpa.default, _q, _kv, _kv, numbers(1, 6, 1, 7), apart=_sides),
    case(cascade.attend.default, _q, _few, _few, scale=0.3, **_attends),
    case(cascade.attend.default, _q, _few, _few, bools(1, 1, 5, 7), **_attends),
    case(cascade.attend.default, numbers(4, 6, 5, 8), _few, _few, branches=2, **_attends),
    case(
        cascade.attend.default,
        *(_q, _few, _few),
        q_positions=integers(9, 2, 5),
        window=4,
        **_attends,
    ),
    case(
        cascade.attend.default,
        *(_q, _few, _few),
        q_positions=integers(9, 1, 5),
        softcap=2.0,
        **_attends,
    ),
    case(cascade.merge.default, [_o, _o], [_lse, _lse], dims={0, 1, 2}),
    case(cascade.merge.default, [_o], [_lse], sinks=numbers(3, 1), dims={0, 1, 2}),
]

_one = [
    aten.abs,
    aten.cos,
    aten.erf,
    aten.exp,
    aten.gelu,
    aten.log,
    aten.neg,
    aten.reciprocal,
    aten.relu,
    aten.rsqrt,
    aten.sigmoid,
    aten.silu,
    aten.sin,
    aten.sqrt,
    aten.tanh,
    aten.isnan,
    aten.logical_not,
    aten.clone,
]
_two = [
    aten.add,
    aten.sub,
    aten.mul,
    aten.div,
    aten.eq,
    aten.ne,
    aten.lt,
    aten.le,
    aten.gt,
    aten.ge,
]
_like_bits = [aten.bitwise_and, aten.bitwise_or]
_small = numbers(3, 4)
POINTWISE = [
    *(case(op.default, _small) for op in _one),
    *(case(op.Tensor, _small, numbers(3, 1)) for op in _two),
    *(case(op.Tensor, numbers(1, 4), _small) for op in _two),
    *(case(op.Tensor, bools(4), bools(3, 1)) for op in _like_bits),
    case(aten.mul.Tensor, numbers(4, 6), x),
    case(aten.mul.Tensor, x, numbers(1, 4, 1)),
    case(aten.mul.Tensor, _small, _small),
    case(aten.maximum.default, _small, numbers(4)),
    case(aten.minimum.default, _small, numbers(4)),
    case(aten.add.Tensor, _small, 3, alpha=2),
    case(aten.pow.Tensor_Scalar, _small, 2),
    case(aten.le.Scalar, _small, 0.5),
    case(aten.ge.Scalar, _small, 0.5),
    case(aten.eq.Scalar, _small, 0.5),
    case(aten.clamp.default, _small, -0.5),
    case(aten.where.self, bools(4, 1), x, numbers(1, 1, 1)),
    case(aten.masked_fill.Scalar, _small, bools(4), 0.0),
    case(aten.bitwise_not.default, bools(3, 4)),
    case(prims.convert_element_type.default, _small, torch.float16),
]

CASES = [*VIEWS, *LOOKUPS, *REDUCTIONS, *PRODUCTS, *CONSTANTS, *ATTENTION, *POINTWISE]
# These need ranks: tests/passes/test_token_ranks.py has them.
_functional = torch.ops._c10d_functional
OVER_RANKS = {_functional.all_reduce.default, _functional.wait_tensor.default}
TESTED = {each.op for each in CASES} | {operator.getitem} | OVER_RANKS

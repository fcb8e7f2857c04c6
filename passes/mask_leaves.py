"""Leaves of mask trees: known numbers, integer expressions, unknown floats; ops on known ones."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_cascade.compiler.graph import Size, tensor, value
from torch_cascade.passes.predicate import Tree
from torch_cascade.passes.prover import Range

# Sizes, and int64 data that arithmetic is done on, are assumed to be below this in magnitude: so
# many elements fit into no machine.
_LARGEST = 2**40


class Unknown(enum.Enum):
    """The one leaf for floating values that are not known when compiling."""

    FLOAT = "unknown"


@dataclass(frozen=True)
class Real:
    """A known floating value; 0.0 and -0.0 differ, as they do for a division."""

    value: float
    negative: bool


def constant(number: Any) -> Tree:
    """The leaf of a Python number: a bool, a sympy integer, a `Real`, unknown for all else."""
    if isinstance(number, bool):
        return number
    if isinstance(number, int):
        integer: Tree = sympy.Integer(number)
        return integer
    if isinstance(number, float) and not math.isnan(number):
        return Real(number, math.copysign(1, number) < 0)
    return Unknown.FLOAT


def is_constant(leaf: Any) -> bool:
    """True iff a leaf is a known number."""
    return isinstance(leaf, (bool, Real, sympy.Integer))


def plain(leaf: Any) -> bool | float | int:
    """The Python number of a constant leaf."""
    if isinstance(leaf, Real):
        return leaf.value
    return leaf if isinstance(leaf, bool) else int(leaf)


def _converts(leaf: Any) -> bool:
    """True iff a leaf as an integer is the same on every device (C leaves the rest undefined)."""
    return not isinstance(leaf, Real) or abs(leaf.value) < 2**31


def cast(leaf: Any, source: torch.dtype, target: torch.dtype) -> Tree | None:
    """A constant leaf of one dtype in another by torch's own conversion; None if undefined."""
    if is_integer(target) and not _converts(leaf):
        return None
    with unset_fake_temporarily():
        return constant(torch.full((), plain(leaf), dtype=source).to(target).item())


def number(given: Any, dtype: torch.dtype) -> Tree | None:
    """The leaf of a Python number in a tensor of some dtype; None for other objects."""
    source = {bool: torch.bool, int: torch.int64, float: torch.float64}.get(type(given))
    leaf = constant(given)
    return None if source is None or not is_constant(leaf) else cast(leaf, source, dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """True iff a dtype holds integers (bool does not)."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def dtype_range(dtype: torch.dtype) -> Range:
    """Bounds of integer data by its dtype; none for int64, on which the premise above holds."""
    if dtype == torch.int64:
        return Range()
    info = torch.iinfo(dtype)
    return Range(sympy.Integer(info.min), sympy.Integer(info.max))


def magnitude(expr: Size) -> int:
    """A bound of |expr| if every symbol, and every function of symbols, is below 2**40."""
    total = 0
    for term, factor in sympy.expand(expr).as_coefficients_dict().items():
        degree = 0 if term.is_number else sum(term.as_powers_dict().values())
        total += math.ceil(abs(factor)) * _LARGEST ** int(degree)
    return total


def evaluated(node: fx.Node, held: Mapping[fx.Node, Any]) -> Tree | None:
    """A pointwise op on known values, computed by the op itself: its own rounding and dtypes.

    Operands keep their number of dims, because dtype promotion depends on whether it is zero.

    Args:
        node: the call.
        held: a constant leaf for each of its operands.
    """

    def number(operand: fx.Node) -> Any:
        val, leaf = value(operand), plain(held[operand])
        if not isinstance(val, torch.Tensor):
            return leaf
        return torch.full([1] * val.dim(), leaf, dtype=val.dtype)

    if is_integer(tensor(node).dtype) and not all(map(_converts, held.values())):
        return None
    assert callable(node.target)
    with unset_fake_temporarily():
        args, kwargs = fx.map_arg((node.args, node.kwargs), number)
        try:
            result = node.target(*args, **kwargs)
        except RuntimeError:
            return None  # e.g. an integer division by zero on a path that is never taken
        if not isinstance(result, torch.Tensor) or result.dtype != tensor(node).dtype:
            return None
        return constant(result.item())

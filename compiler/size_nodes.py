"""Size arithmetic written as graph nodes: what sympy prints as `2*s0 + 1` becomes two calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

Call = Callable[..., fx.Node]
"""Inserts a call node: `call(target, *args)`."""


def _forward(target: Callable[..., Any]) -> Callable[..., SizeNode]:
    return lambda self, *other: self.apply(target, self, *other)


def _reverse(target: Callable[..., Any]) -> Callable[..., SizeNode]:
    return lambda self, other: self.apply(target, other, self)


class SizeNode:
    """A node that holds a size, under Python's operators: each inserts the node of its result.

    `torch.utils._sympy.interp.sympy_interp` evaluates an expression with these in place of numbers.
    """

    def __init__(self, node: fx.Node, call: Call) -> None:
        """Wrap `node`; results are inserted by `call`."""
        self.node = node
        self.call = call

    def apply(self, target: Callable[..., Any], *args: Any) -> SizeNode:
        """The result of a Python operator on sizes, as a node."""
        raw = [arg.node if isinstance(arg, SizeNode) else arg for arg in args]
        return SizeNode(self.call(target, *raw), self.call)

    __add__, __radd__ = _forward(operator.add), _reverse(operator.add)
    __sub__, __rsub__ = _forward(operator.sub), _reverse(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul), _reverse(operator.mul)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv), _reverse(operator.floordiv)
    __mod__, __rmod__ = _forward(operator.mod), _reverse(operator.mod)
    __pow__, __rpow__ = _forward(operator.pow), _reverse(operator.pow)
    __neg__ = _forward(operator.neg)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> SizeNode:
        """What torch has no Python operator for: `torch.sym_max`, `torch.sym_min`."""
        own = next(arg for arg in args if isinstance(arg, SizeNode))
        return own.apply(function, *args)

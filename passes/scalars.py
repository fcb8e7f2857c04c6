"""Scale factors and fill values: which tensors of a graph are one known number.

scores / torch.full([], 8.0)          the number 0.125
scores / sqrt(scalar_tensor(s3))      s3**-0.5 of a symbolic size
scores * convert(convert(arg))        a Python float that became an input under dynamic=True
scores * arg                          a tensor of the user: of unknown value
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._sympy import functions

from torch_cascade.compiler.graph import Sizes, shape
from torch_cascade.passes.labels import same_shape

aten = torch.ops.aten
prims = torch.ops.prims

ONE = sympy.Integer(1)
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

MULTIPLIES = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVIDES = frozenset(
    {aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar}
)

_PASSING = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.lift_fresh_copy.default,
        aten.unsqueeze.default,
        aten.view.default,
        prims.convert_element_type.default,
    }
)
_ARITHMETIC: dict[Any, Callable[..., sympy.Expr]] = {
    aten.sqrt.default: sympy.sqrt,
    aten.rsqrt.default: lambda x: 1 / sympy.sqrt(x),
    aten.reciprocal.default: lambda x: 1 / x,
    aten.neg.default: lambda x: -x,
    aten.mul.Tensor: lambda x, y: x * y,
    aten.div.Tensor: lambda x, y: x / y,
    aten.true_divide.Tensor: lambda x, y: x / y,
    aten.pow.Tensor_Scalar: lambda x, y: _power(x, y),
    aten.pow.Tensor_Tensor: lambda x, y: _power(x, y),
    aten.pow.Scalar: lambda x, y: _power(x, y),
}


def _power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """A power; with a rational exponent, so that x**-0.5 of a size equals 1 / sqrt(x)."""
    return base ** (sympy.Rational(float(exponent)) if exponent.is_Float else exponent)


_TYPED: dict[Any, Callable[..., sympy.Expr]] = {
    functions.FloatPow: _power,
    functions.FloatTrueDiv: lambda x, y: x / y,
    functions.IntTrueDiv: lambda x, y: x / y,
    functions.ToFloat: lambda x: x,
    functions.OpaqueUnaryFn_sqrt: sympy.sqrt,
}


@dataclass(frozen=True)
class Factor:
    """A product of scale factors.

    Attributes:
        number: what is known of it, a number or an expression in sizes.
        nodes: factors whose value is a Python number only known at run time, as 0-d tensors.
        opaque: True if a factor is a tensor of the user, or divides by an unknown number.
    """

    number: sympy.Expr = ONE
    nodes: tuple[fx.Node, ...] = ()
    opaque: bool = False

    def __mul__(self, other: Factor) -> Factor:
        number = _exact(self.number) * _exact(other.number)
        return Factor(number, self.nodes + other.nodes, self.opaque or other.opaque)

    def inverse(self) -> Factor:
        """One over it."""
        return Factor(1 / _exact(self.number), self.nodes, self.opaque or bool(self.nodes))

    @property
    def is_one(self) -> bool:
        """True iff it changes nothing."""
        return is_value(self.number, 1) and not self.nodes and not self.opaque

    @property
    def is_positive(self) -> bool:
        """True iff it is provably above zero."""
        return bool(self.number.is_positive) and not self.nodes and not self.opaque


def _exact(number: sympy.Expr) -> sympy.Expr:
    """The same number without floats, so that dividing by 49.0 and multiplying by it gives 1."""
    if not number.has(sympy.Float):
        return number
    return number.xreplace({x: sympy.Rational(x) for x in number.atoms(sympy.Float)})


def is_value(expr: sympy.Expr | None, value: float) -> bool:
    """True iff an expression is this number (sympy tells 1 and 1.0 apart)."""
    return expr is not None and bool(expr.is_number) and float(expr) == value


def constant(arg: Any) -> sympy.Expr | None:
    """The one value of all elements: a number, an expression in sizes, or None if unknown."""
    if isinstance(arg, (int, float)) and not isinstance(arg, bool):
        return _number(float(arg)) if isinstance(arg, float) else sympy.Integer(arg)
    if not isinstance(arg, fx.Node):
        return None
    val = arg.meta.get("val")
    if isinstance(val, (torch.SymInt, torch.SymFloat)):
        return None if _has_float_symbol(val) else _plain(val.node.expr)
    if not isinstance(val, torch.Tensor):
        return None
    value = _tensor_constant(arg)
    return None if value is None else _rounded(value, val.dtype)


def _has_float_symbol(val: torch.SymInt | torch.SymFloat) -> bool:
    return any(not symbol.is_integer for symbol in val.node.expr.free_symbols)


def _plain(expr: sympy.Expr) -> sympy.Expr:
    """An expression of sizes in sympy's own functions, without torch's typed ones."""
    for typed, function in _TYPED.items():
        expr = expr.replace(typed, function)
    return expr


def _number(value: float) -> sympy.Expr:
    if value in (float("inf"), float("-inf")):
        return sympy.oo if value > 0 else -sympy.oo
    return sympy.Float(value)


def _rounded(value: sympy.Expr, dtype: torch.dtype) -> sympy.Expr | None:
    """A number as a tensor of `dtype` holds it; None for a fraction in an integer."""
    if dtype not in FLOATS:
        return value if value.is_integer and dtype != torch.bool else None
    if not value.is_number or value.is_infinite:
        return value
    with unset_fake_temporarily():
        return _number(torch.tensor(float(value), dtype=dtype).double().item())


def _tensor_constant(node: fx.Node) -> sympy.Expr | None:
    if node.op == "get_attr":
        return _attribute(node)
    if node.target is aten.scalar_tensor.default:
        return constant(node.args[0])
    if node.target in (aten.full.default, aten.full_like.default):
        return constant(node.args[1])
    if node.target in _PASSING:
        return constant(node.args[0])
    function = _ARITHMETIC.get(node.target)
    values = [constant(a) for a in node.args] if function is not None else []
    if function is None or None in values:
        return None
    result = function(*values)
    return result if result.is_extended_real else None


def _attribute(node: fx.Node) -> sympy.Expr | None:
    """The value of a constant that the graph's module holds."""
    module = node.graph.owning_module
    held = getattr(module, str(node.target), None)
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor) or held.numel() != 1:
        return None
    with unset_fake_temporarily():
        return _number(float(held.item())) if held.dtype in FLOATS else None


def factor(arg: Any) -> Factor | None:
    """What a multiplication by `arg` scales by; None for a tensor of many elements."""
    value = constant(arg)
    if value is not None:
        return Factor(value)
    if not isinstance(arg, fx.Node):
        return None
    if isinstance(arg.meta["val"], (torch.SymInt, torch.SymFloat)):
        return Factor(nodes=(arg,))
    if not isinstance(arg.meta["val"], torch.Tensor) or any(s != 1 for s in shape(arg)):
        return None
    return Factor(nodes=(arg,)) if _from_numbers(arg) else Factor(opaque=True)


def _from_numbers(node: fx.Node) -> bool:
    """True iff a 0-d tensor is computed from Python numbers alone.

    A Python float that torch made symbolic is a float64 input; it enters through a conversion.
    """
    if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
        return True
    if node.target is prims.convert_element_type.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.op == "placeholder":
            val = source.meta["val"]
            return bool(val.ndim == 0 and val.dtype == torch.float64)
        return _from_numbers(source)
    if node.target is aten.scalar_tensor.default:
        return True
    inputs = node.all_input_nodes
    return node.target in _ARITHMETIC and bool(inputs) and all(map(_from_numbers, inputs))


def scaling(node: fx.Node, sizes: Sizes) -> tuple[fx.Node, Factor] | None:
    """The tensor that a mul or div scales by one number, and the number."""
    if node.target in MULTIPLIES:
        a, b = node.args[0], node.args[1]
        pairs = [(a, factor(b)), (b, factor(a))]
    elif node.target in DIVIDES:
        by = factor(node.args[1])
        pairs = [(node.args[0], None if by is None or is_value(by.number, 0) else by.inverse())]
    else:
        return None
    for scaled, by in pairs:
        if isinstance(scaled, fx.Node) and by is not None and same_shape(scaled, node, sizes):
            return scaled, by
    return None


def uncast(node: fx.Node) -> fx.Node:
    """The value below conversions between floating dtypes and copies."""
    while node.op == "call_function":
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return node
        copies = (aten.alias.default, aten.clone.default, aten.detach.default)
        if node.target not in copies and not is_float_cast(node):
            return node
        node = source
    return node


def is_float_cast(node: fx.Node) -> bool:
    """True iff a node converts between floating dtypes: it rounds and does nothing else."""
    if node.target is not prims.convert_element_type.default:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return {node.meta["val"].dtype, source.meta["val"].dtype} <= FLOATS

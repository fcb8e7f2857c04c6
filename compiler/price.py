"""The price of one way: formulas of its kernels, the numbers put in, and what they say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy

from torch_cascade.compiler import cost_terms as terms
from torch_cascade.compiler.cost_terms import Kernel
from torch_cascade.compiler.units import NUMBER, Unit, symbol, unit_of


@dataclass(frozen=True)
class Price:
    """One way and its time.

    Attributes:
        kernels: what runs, one after the other, as formulas.
        values: the numbers put in.
        seconds: the sum.
    """

    kernels: tuple[Kernel, ...]
    values: Mapping[sympy.Symbol, float]
    seconds: float

    def lines(self) -> list[str]:
        """Each kernel with its time and its formula."""
        return [
            f"{kernel.name}: {time_text(_evaluated(kernel.seconds, self.values))} = "
            f"{_spaced(kernel.formula)}"
            for kernel in self.kernels
        ]

    def numbers(self) -> dict[str, str]:
        """What every symbol of the formulas is, with its unit; for named ones also their own."""
        formula = sympy.Add(*(kernel.formula for kernel in self.kernels))
        named = terms.definitions(formula)
        used = formula.free_symbols.union(*(expr.free_symbols for expr in named.values()))
        said = {str(s): self._said(s, named) for s in sorted(used - {terms.ONE_FLOP}, key=str)}
        return said

    def __reduce__(self) -> tuple[Any, ...]:
        """With units and definitions: formulas hold symbols, and modules what these mean."""
        formulas = [kernel.formula for kernel in self.kernels]
        named = terms.definitions(sympy.Add(*formulas))
        parts = [*formulas, *(kernel.seconds for kernel in self.kernels), *named.values()]
        used = set(self.values).union(*(part.free_symbols for part in parts))
        units = {str(each): unit_of(each) for each in used}
        return _restored, (self.kernels, dict(self.values), self.seconds, named, units)

    def _said(self, symbol: sympy.Symbol, named: Mapping[sympy.Symbol, sympy.Expr]) -> str:
        if symbol not in named:
            return _with_unit(self.values[symbol], unit_of(symbol))
        value = _evaluated(terms.expanded(symbol), self.values)
        return f"{_spaced(named[symbol])} = {_with_unit(value, unit_of(symbol))}"

    @classmethod
    def of(cls, kernels: Sequence[Kernel], values: Mapping[sympy.Symbol, float]) -> Price:
        """Evaluate the formulas."""
        seconds = sum(_evaluated(kernel.seconds, values) for kernel in kernels)
        return cls(tuple(kernels), values, seconds)


def _restored(
    kernels: tuple[Kernel, ...],
    values: Mapping[sympy.Symbol, float],
    seconds: float,
    named: Mapping[sympy.Symbol, sympy.Expr],
    units: Mapping[str, Unit],
) -> Price:
    """A price from another process, which may have used symbols that this one has not."""
    for name, unit in units.items():
        symbol(name, unit)
    for made, expr in named.items():
        terms.named(str(made), expr)
    return Price(kernels, values, seconds)


def time_text(seconds: float) -> str:
    """Three figures in the unit that suits them.

    Example:
        >>> time_text(3.46e-3), time_text(2.5e-6)
        ('3.46 ms', '2.5 us')
    """
    return f"{1e6 * seconds:.3g} us" if seconds < 9.995e-4 else f"{1e3 * seconds:.3g} ms"


def _spaced(expr: sympy.Expr) -> str:
    """An expression whose lines can be broken anywhere."""
    return re.sub(r"(?<!\*)([*/])(?!\*)", r" \1 ", str(expr))


def _with_unit(value: float, unit: Unit) -> str:
    number = f"{value:.4g}"
    return number if unit == NUMBER else f"{number} {unit}"


@cache
def _compiled(expr: sympy.Expr) -> tuple[tuple[sympy.Symbol, ...], Callable[..., float]]:
    symbols = tuple(sorted(expr.free_symbols, key=str))
    functions = [{"Max": max, "Min": min, "ceiling": math.ceil}]
    return symbols, sympy.lambdify(symbols, expr, modules=functions)


def _evaluated(expr: sympy.Expr, values: Mapping[sympy.Symbol, float]) -> float:
    symbols, function = _compiled(expr)
    return float(function(*(values[symbol] for symbol in symbols)))

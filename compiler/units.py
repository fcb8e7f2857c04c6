"""Symbols with units, and the check that an expression of them makes sense.

Every symbol of the cost model has a unit, and `unit_of` finds that of an expression: sums and
maxima need equal units, products multiply them. Seconds plus bytes is an error, not a number.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import sympy


class Unit(NamedTuple):
    """Exponents of the base units.

    Example:
        >>> str(Unit(byte=1) / Unit(second=1))
        'byte/s'
    """

    second: int = 0
    byte: int = 0
    flop: int = 0

    def __mul__(self, other: object) -> Unit:
        if not isinstance(other, Unit):
            return NotImplemented
        return Unit(*(a + b for a, b in zip(self, other, strict=True)))

    def __truediv__(self, other: Unit) -> Unit:
        return Unit(*(a - b for a, b in zip(self, other, strict=True)))

    def __pow__(self, exponent: int) -> Unit:
        return Unit(*(a * exponent for a in self))

    def __str__(self) -> str:
        """As people write it: `byte/s`, `flop`, `1`."""
        names = ("s", "byte", "flop")
        above = [n if e == 1 else f"{n}^{e}" for n, e in zip(names, self, strict=True) if e > 0]
        below = [n if e == -1 else f"{n}^{-e}" for n, e in zip(names, self, strict=True) if e < 0]
        return "/".join(["*".join(above) or "1", *below])


NUMBER = Unit()
SECOND = Unit(second=1)
BYTE = Unit(byte=1)
FLOP = Unit(flop=1)
BYTE_RATE = BYTE / SECOND
FLOP_RATE = FLOP / SECOND

_UNITS: dict[sympy.Symbol, Unit] = {}


class UnitError(ValueError):
    """An expression that adds or compares different units, or takes a unit where none may be."""


def symbol(name: str, unit: Unit = NUMBER) -> sympy.Symbol:
    """The symbol of that name, positive, with its unit.

    Raises:
        UnitError: it was made with another unit before.
    """
    made = sympy.Symbol(name, positive=True)
    if _UNITS.setdefault(made, unit) != unit:
        raise UnitError(f"{name}: expected unit {_UNITS[made]}, got {unit}")
    return made


def unit_of(expr: sympy.Expr) -> Unit:
    """The unit of an expression.

    Raises:
        UnitError: it has none.

    Example:
        >>> size, rate = symbol("example_size", BYTE), symbol("example_rate", BYTE_RATE)
        >>> str(unit_of(3 * size / rate))
        's'
        >>> unit_of(size + rate)
        Traceback (most recent call last):
        ...
        torch_cascade.compiler.units.UnitError: example_rate + example_size: byte/s and byte
    """
    if expr.is_number:
        return NUMBER
    if expr.is_Symbol:
        if expr not in _UNITS:
            raise UnitError(f"{expr}: a symbol without a unit")
        return _UNITS[expr]
    units = [unit_of(part) for part in expr.args]
    if expr.is_Mul:
        return reduce(Unit.__mul__, units)
    if expr.is_Pow:
        return _power(expr, units[0])
    if isinstance(expr, (sympy.Add, sympy.Max, sympy.Min)):
        return _common(expr, units)
    if isinstance(expr, (sympy.ceiling, sympy.floor)):
        return _common(expr, [*units, NUMBER])
    raise UnitError(f"{expr}: no rule for {type(expr).__name__}")


def _power(expr: sympy.Expr, base: Unit) -> Unit:
    exponent = expr.args[1]
    if base == NUMBER and unit_of(exponent) == NUMBER:
        return NUMBER
    if not exponent.is_Integer:
        raise UnitError(f"{expr}: exponent {exponent} of {base}")
    return base ** int(exponent)


def _common(expr: sympy.Expr, units: list[Unit]) -> Unit:
    """The unit that all have; a number 0 (as in `Max(0, x)`) has any."""
    different = [unit for unit in units if unit != units[0]]
    if different:
        raise UnitError(f"{expr}: {units[0]} and {different[0]}")
    return units[0]

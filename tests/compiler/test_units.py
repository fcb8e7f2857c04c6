"""Units of expressions."""

import pytest
import sympy

from torch_cascade.compiler.units import (
    BYTE,
    BYTE_RATE,
    NUMBER,
    SECOND,
    Unit,
    UnitError,
    symbol,
    unit_of,
)

SIZE, RATE, TIME, COUNT = (
    symbol("test_size", BYTE),
    symbol("test_rate", BYTE_RATE),
    symbol("test_time", SECOND),
    symbol("test_count"),
)


@pytest.mark.parametrize(
    ("expr", "unit"),
    [
        (SIZE / RATE, SECOND),
        (TIME + COUNT * SIZE / RATE, SECOND),
        (sympy.Max(TIME, SIZE / RATE), SECOND),
        (sympy.ceiling(COUNT / 3) * SIZE, BYTE),
        (sympy.Integer(3), NUMBER),
        (COUNT ** sympy.Rational(1, 2), NUMBER),
        (SIZE**2 / (SIZE * TIME), BYTE / SECOND),
        (sympy.Max(COUNT, 1), NUMBER),
    ],
)
def test_the_unit_of_an_expression(expr, unit):
    assert unit_of(expr) == unit


@pytest.mark.parametrize(
    ("expr", "said"),
    [
        (SIZE + RATE, "byte/s and byte|byte and byte/s"),
        (sympy.Max(TIME, SIZE), "byte and s|s and byte"),
        (TIME + 1, "1 and s|s and 1"),
        (sympy.ceiling(SIZE), "byte and 1"),
        (SIZE ** sympy.Rational(1, 2), "exponent 1/2 of byte"),
        (2**SIZE, "exponent test_size"),
        (sympy.Symbol("nobody") * 2, "a symbol without a unit"),
        (sympy.sin(COUNT), "no rule for sin"),
    ],
)
def test_nonsense_is_an_error(expr, said):
    with pytest.raises(UnitError, match=said):
        unit_of(expr)


def test_a_symbol_has_one_unit():
    assert symbol("test_size", BYTE) is SIZE or symbol("test_size", BYTE) == SIZE
    with pytest.raises(UnitError, match="test_size: expected unit byte, got s"):
        symbol("test_size", SECOND)


def test_units_in_words():
    assert str(NUMBER) == "1"
    assert str(Unit(byte=2, second=-1)) == "byte^2/s"
    assert str(Unit(second=-2)) == "1/s^2"

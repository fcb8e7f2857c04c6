"""The options of a pass: from the fields of its frozen dataclass, with a parser for each."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args, get_origin

from torch_cascade.compiler import option_values as values

Parse = Callable[[object], object]


@dataclass(frozen=True)
class PassOption:
    """What a pass takes in braces.

    Attributes:
        name: as it is written in text.
        field: the field of the pass, or for passes of this package of `Options`.
        parse: gives its value, or raises ValueError with what it expected.
        aliases: other names for it.
        meaning: one sentence ("" for none: for passes of this package `Options` has it).
        default: as a user would write it.
    """

    name: str
    field: str
    parse: Parse
    aliases: tuple[str, ...] = ()
    meaning: str = ""
    default: str = ""


def field_options(
    fields: Sequence[dataclasses.Field[Any]], owner: type, told: str
) -> tuple[PassOption, ...]:
    """The options that the fields of a pass are.

    Raises:
        ValueError: a field without a default, or of a type that no text is read as.
    """
    hints = _hints(owner, told)
    found = []
    for field in fields:
        if field.default is dataclasses.MISSING:
            raise ValueError(f"{told}: expected a default for the field {field.name!r}")
        parse = field.metadata.get("parse") or _parser(hints[field.name])
        if parse is None or not field.init:
            raise ValueError(
                f"{told}: the field {field.name!r} is no option: expected bool, int, float, str, "
                f"Fraction, a Literal of strings, or metadata={{'parse': ...}}"
            )
        name, meaning = field.name.replace("_", "-"), field.metadata.get("meaning", "")
        default = values.written(field.default)
        found.append(PassOption(name, field.name, parse, (), meaning, default))
    return tuple(found)


def _hints(owner: type, told: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner)
    except NameError as error:
        raise ValueError(f"{told}: the type of a field cannot be looked up: {error}") from error


def _parser(hint: Any) -> Parse | None:
    """The parser of a type; None for a type that no text is read as."""
    words = get_args(hint)
    if get_origin(hint) is Literal and all(isinstance(word, str) for word in words):
        return _one_of(words)
    parsers: dict[Any, Parse] = {
        bool: values.boolean,
        int: _number(int, "a whole number"),
        float: _number(float, "a number"),
        Fraction: _number(Fraction, "a number such as 0.15 or 3/20"),
        str: str,
    }
    return parsers.get(hint)


def _one_of(words: tuple[str, ...]) -> Parse:
    def parse(value: object) -> object:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return value

    return parse


def _number(kind: Callable[[str], object], expected: str) -> Parse:
    def parse(value: object) -> object:
        try:
            return kind(str(value))
        except (ValueError, ZeroDivisionError):
            raise ValueError(expected) from None

    return parse

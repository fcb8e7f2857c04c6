"""What the options take: each parser gives the value of an option, or says what it expected."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeAlias

SELECTORS = ("v", "k", "kv", "heads", "random", "attention", "change", "question")
"""Names that the option `selector` accepts (`torch_cascade.runtime.selection` has them)."""

CheckLayers = tuple[tuple[int, Fraction | None], ...]
Decide: TypeAlias = Literal["auto", "always", "never"] | Callable[[Any], bool]

_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False}


def verify(value: object) -> bool | Literal["numeric"]:
    """A switch, or the word for more."""
    if isinstance(value, str) and value.strip().lower() == "numeric":
        return "numeric"
    try:
        return boolean(value)
    except ValueError as error:
        raise ValueError(f"{error}, or numeric") from None


def boolean(value: object) -> bool:
    """A switch."""
    word = str(value).strip().lower()
    if not isinstance(value, (int, str)) or word not in _WORDS:
        raise ValueError("one of 0, 1, true, false, yes, no, on, off")
    return _WORDS[word]


def choice(*words: str) -> Callable[[object], str]:
    """The parser of an option that takes one of some words."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return value.strip().lower()

    return parse


def decide(value: object) -> object:
    """A word, or a callable from `torch_cascade.compiler.decide.Facts` to a bool."""
    return value if callable(value) else choice("auto", "always", "never")(value)


def calibration(value: object) -> str:
    """A word, or the path of a file."""
    if isinstance(value, str) and value.strip().lower() in ("auto", "none"):
        return value.strip().lower()
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("auto, none, or the path of a file")
    return os.fspath(Path(os.fspath(value)).expanduser())


def folder(value: object) -> Path | None:
    """A path; None for unset."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("the path of a folder")
    return Path(os.fspath(value)).expanduser()


def count(value: object) -> int:
    """A number of tokens."""
    text = str(value).strip()
    if isinstance(value, bool) or not isinstance(value, (int, str)) or not text.isdecimal():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def levels(value: object) -> int | None:
    """A number of levels; None for any number."""
    text = str(value).strip()
    whole = isinstance(value, (int, str)) and not isinstance(value, bool) and text.isdecimal()
    if value is not None and (not whole or int(text) < 2):
        raise ValueError("a whole number, 2 or more: a shared prefix and the branches' own keys")
    return None if value is None else int(text)


def ratio(value: object) -> Fraction:
    """A share of the cached tokens, exact: a float is what it prints as, so 0.15 is 3/20."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str, Fraction)):
            raise ValueError
        parsed = Fraction(str(value).strip())
    except (ValueError, ZeroDivisionError):
        raise ValueError("a number from 0 to 1, such as 0.15 or 3/20") from None
    if not 0 <= parsed <= 1:
        raise ValueError("a number from 0 to 1, such as 0.15 or 3/20")
    return parsed


def check_layers(value: object) -> CheckLayers:
    """Layers with the share of tokens that is kept there; None: that of `recompute_ratio`."""
    expected = (
        "layers with ratios that do not rise, such as {1: 0.5, 2: 0.15}, '1:0.5,2:0.15', or one "
        "layer such as 1; -1 (full reuse) only alone, with ratio 0"
    )
    try:
        pairs = tuple(sorted(_pairs(value)))
    except ValueError:
        raise ValueError(expected) from None
    layers = [layer for layer, _ in pairs]
    ratios = [given for _, given in pairs if given is not None]
    all_said = len(ratios) == len(pairs) or len(pairs) == 1
    falls = all_said and ratios == sorted(ratios, reverse=True)
    reuse = layers == [-1] and not any(ratios)
    if not reuse and (not layers or min(layers) < 0 or len(set(layers)) < len(layers) or not falls):
        raise ValueError(expected)
    return ((-1, Fraction(0)),) if reuse else pairs


def _pairs(value: object) -> list[tuple[int, Fraction | None]]:
    if isinstance(value, Mapping):
        return [(_layer(layer), ratio(given)) for layer, given in value.items()]
    if isinstance(value, int) and not isinstance(value, bool):
        return [(value, None)]
    if not isinstance(value, str):
        raise ValueError
    parts = [part.partition(":") for part in value.split(",")]
    return [(_layer(layer), ratio(given) if colon else None) for layer, colon, given in parts]


def _layer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    return int(value)


def selector(value: object) -> object:
    """A name, or a callable from `torch_cascade.runtime.selection.Facts` to scores."""
    if callable(value):
        return value
    if not isinstance(value, str) or value.strip().lower() not in SELECTORS:
        raise ValueError(f"one of {', '.join(SELECTORS)}, or a callable from Facts to scores")
    return value.strip().lower()


def written(value: object) -> str:
    """The value of an option as a user would write it."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, Fraction):
        return _ratio_written(value)
    if isinstance(value, tuple):
        return ",".join(_item_written(item) for item in value) or "none"
    if callable(value):
        return str(getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__))
    return "" if value is None else str(value)


def _item_written(item: object) -> str:
    if not isinstance(item, tuple):
        return str(item)
    layer, given = item
    return str(layer) if given is None else f"{layer}:{_ratio_written(given)}"


def _ratio_written(value: Fraction) -> str:
    decimal = f"{float(value):g}"
    return decimal if Fraction(decimal) == value else str(value)

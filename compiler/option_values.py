"""Values that options of the cost model take, and how they enter cache keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

Decide: TypeAlias = Literal["auto", "always", "never"] | Callable[[Any], bool]
Calibration: TypeAlias = Literal["auto", "none"] | str

_DECIDE = ("auto", "always", "never")
_CALIBRATION = ("auto", "none")


def decide_value(value: object) -> object:
    """The option `decide`: a word, or a callable that is given the facts and returns a bool.

    Raises:
        ValueError: what was expected, for something else.
    """
    if callable(value):
        return value
    if not isinstance(value, str) or value.strip().lower() not in _DECIDE:
        raise ValueError(f"one of {', '.join(_DECIDE)}")
    return value.strip().lower()


def calibration_value(value: object) -> str:
    """The option `calibration`: a word, or the path of a file.

    Raises:
        ValueError: what was expected, for something else.
    """
    if isinstance(value, str) and value.strip().lower() in _CALIBRATION:
        return value.strip().lower()
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("auto, none, or the path of a file")
    return os.fspath(Path(os.fspath(value)).expanduser())


def keyed(value: object) -> object:
    """A value as it goes into a cache key: a callable by its method `uuid`, None without one."""
    return getattr(value, "uuid", lambda: None)() if callable(value) else value

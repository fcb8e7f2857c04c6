"""Options and modes that are Inductor's own: checked as `torch.compile` checks them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_origin


def suggest(name: str, valid: Iterable[str], more: Iterable[str] = ()) -> str:
    """The end of an error about a name: the nearest valid names, then all of `valid`."""
    near = difflib.get_close_matches(name, [*valid, *more], n=3)
    did_you_mean = f"; did you mean {' or '.join(near)}?" if near else ";"
    return f"{did_you_mean} valid names are {', '.join(valid)}"


def one_mode(option: object, argument: str | None) -> str | None:
    """The mode, given as an option, as an argument, or as both alike."""
    if option is not None and not isinstance(option, str):
        raise ValueError(f"option 'mode': expected a name, got {option!r}")
    if option and argument and option != argument:
        raise ValueError(
            f"option 'mode' is {option!r} but torch.compile was called with mode={argument!r}"
        )
    return option or argument


def mode_patches(mode: str | None) -> dict[str, Any]:
    """Inductor's patches for a mode of `torch.compile`.

    Raises:
        ValueError: there is no such mode.
    """
    if not mode:
        return {}
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode not in modes:
        raise ValueError(f"mode: expected one of {', '.join(modes)}, got {mode!r}")
    return dict(modes[mode])


def inductor_patches(given: Mapping[str, object], ours: Iterable[str]) -> dict[str, Any]:
    """Inductor's options by name, checked as `torch.compile` does for its own backend.

    Raises:
        ValueError: an unknown name, or a value of another type.
    """
    if not given:
        return {}
    from torch._inductor import config

    known = config.get_config_copy()
    patches = {}
    for name, value in given.items():
        attribute = str(name).replace("-", "_")
        if attribute not in known:
            suggestion = suggest(str(name), [*ours, "mode"], known)
            raise ValueError(
                f"unknown option {name!r}{suggestion}, and those of torch._inductor.list_options()"
            )
        _check_type(name, value, config.get_type(attribute))  # type: ignore[attr-defined]
        patches[attribute] = value
    return patches


def inductor_namesake(name: str) -> dict[str, Any]:
    """The patch that switches on Inductor's own option of a name; torch 2.11 has fewer of them."""
    from torch._inductor import config

    return {name: True} if name in config.get_config_copy() else {}


def _check_type(name: str, value: object, expected: object) -> None:
    """Plain classes only, as in torch: unions and parametrised types are let through."""
    if isinstance(expected, type) and get_origin(expected) is None:
        if not isinstance(value, expected):
            raise ValueError(f"option {name!r}: expected {expected.__name__}, got {value!r}")

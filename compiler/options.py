"""Every switch of this package, and the only place that reads environment variables.

A field of `Options` is one option: its name is the key in `torch.compile(..., options={...})`, the
variable is `TORCH_CASCADE_` and that name in capitals, and its meaning stands beside it. An option
given explicitly beats its variable, which beats the default.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch_cascade.compiler.inductor_options import (
    inductor_namesake,
    inductor_patches,
    mode_patches,
    suggest,
)
from torch_cascade.compiler.option_values import (
    Calibration,
    Decide,
    calibration_value,
    decide_value,
    keyed,
)

PREFIX = "TORCH_CASCADE_"
KNOWN_PASSES = ("cascade",)
"""Names that the option `passes` accepts, in the order in which the passes run."""

Guards: TypeAlias = Literal["auto", "never"]

_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False}


def _boolean(value: object) -> bool:
    word = str(value).strip().lower()
    if not isinstance(value, (int, str)) or word not in _WORDS:
        raise ValueError("one of 0, 1, true, false, yes, no, on, off")
    return _WORDS[word]


def _choice(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return value.strip().lower()

    return parse


def _pass_names(value: object) -> tuple[str, ...]:
    names = [n.strip() for n in value.split(",")] if isinstance(value, str) else value
    if names == ["none"]:
        return ()
    if not isinstance(names, (list, tuple)) or any(name not in KNOWN_PASSES for name in names):
        valid = ", ".join(KNOWN_PASSES)
        raise ValueError(f"passes of this version ({valid}), separated by commas, or none")
    return tuple(name for name in KNOWN_PASSES if name in names)


def _folder(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("the path of a folder")
    return Path(os.fspath(value)).expanduser()


def _about(
    parse: Callable[[object], object], meaning: str, *, in_code: bool = False
) -> dict[str, object]:
    """What a field of `Options` carries; `in_code` says that it can change the generated code."""
    return {"parse": parse, "meaning": meaning, "in_code": in_code}


@dataclass(frozen=True)
class Setting:
    """One row of the table of options.

    Attributes:
        name: key in `options={...}`.
        variable: environment variable that sets it.
        default: the default, as a user would write it ("" for unset).
        meaning: one sentence.
    """

    name: str
    variable: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Options:
    """The resolved switches of one compilation; see `settings` for what each means."""

    disable: bool = field(default=False, metadata=_about(_boolean, "`1`: exactly plain Inductor"))
    passes: tuple[str, ...] = field(
        default=KNOWN_PASSES,
        metadata=_about(
            _pass_names, "the passes to run, separated by commas, or `none`", in_code=True
        ),
    )
    decide: Decide = field(
        default="auto",
        metadata=_about(
            decide_value,
            "`auto`: rewrite where the cost model says it pays; `always`: every legal rewrite; "
            "`never`: analyse and report only; in code also a callable that is given the "
            "numbers (`compiler.decide.Facts`) and returns a bool",
            in_code=True,
        ),
    )
    calibration: Calibration = field(
        default="auto",
        metadata=_about(
            calibration_value,
            "figures for the cost model: `auto`: what `python -m torch_cascade calibrate` measured "
            "on this machine, if it did; `none`: the table of devices; or the path of a file",
        ),
    )
    guards: Guards = field(
        default="auto",
        metadata=_about(
            _choice(*get_args(Guards)),
            "`auto`: a decision on symbolic sizes becomes a guard; "
            "`never`: decide on the first sizes",
            in_code=True,
        ),
    )
    batch_invariant: bool = field(
        default=False,
        metadata=_about(
            _boolean,
            "`1`: a rewritten attention gives a branch the same bits however many branches stand "
            "beside it, on a GPU only (on a CPU it promises nothing and warns); also Inductor's "
            "option of that name, where torch has it",
            in_code=True,
        ),
    )
    strict: bool = field(
        default=False,
        metadata=_about(_boolean, "`1`: an error where nothing was rewritten or a pass failed"),
    )
    verify: bool = field(
        default=False,
        metadata=_about(_boolean, "`1`: check the graph's invariants after every pass"),
    )
    dump: Path | None = field(
        default=None,
        metadata=_about(_folder, "folder for before and after graphs and the report"),
    )

    @classmethod
    def resolve(
        cls, options: Mapping[str, object] | None = None, mode: str | None = None
    ) -> tuple[Options, dict[str, Any]]:
        """Sort what a user passed to `torch.compile` into our options and Inductor's.

        Args:
            options: names of this package, names of Inductor's own configuration, and "mode";
                left as it is.
            mode: the `mode` argument of `torch.compile`, if the call came with one.

        Returns:
            The options, and a new dict of Inductor config patches: those of the mode, overridden by
            those given by name.

        Raises:
            ValueError: an unknown name, or a value that its option does not take.

        Example:
            >>> resolved, patches = Options.resolve({"decide": "always", "max_autotune": True})
            >>> resolved.decide, patches
            ('always', {'max_autotune': True})
        """
        given = dict(options or {})
        mode = _one_mode(given.pop("mode", None), mode)
        ours = {f.name: f for f in dataclasses.fields(cls)}
        values = _from_environment(ours)
        for name in [name for name in given if name in ours]:
            values[name] = _parse(ours[name], f"option {name!r}", given.pop(name))
        patches = mode_patches(mode) | inductor_patches(given, ours)
        if values.get("batch_invariant"):
            patches |= inductor_namesake("batch_invariant")
        return cls(**values), patches

    def fingerprint(self) -> str:
        """Stable text of every option that can change generated code, for cache keys.

        Example:
            >>> Options(decide="never").fingerprint()
            "passes=('cascade',);decide='never';guards='auto';batch_invariant=False"

        A callable stands for itself by what its method `uuid` returns, like a graph pass of
        Inductor; without one there is no key, see `has_fingerprint`.
        """
        fields = [f for f in dataclasses.fields(self) if f.metadata["in_code"]]
        return ";".join(f"{f.name}={keyed(getattr(self, f.name))!r}" for f in fields)

    @property
    def has_fingerprint(self) -> bool:
        """False if a callable among the options has no method `uuid`: nothing can be cached."""
        return not callable(self.decide) or keyed(self.decide) is not None


def cache_folder() -> Path:
    """The folder of this package among a user's caches; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch_cascade"


def written(options: Options) -> dict[str, str]:
    """Every option by name, its value as a user would write it.

    Example:
        >>> written(Options(passes=(), strict=True))["passes"]
        'none'
    """
    fields = dataclasses.fields(options)
    return {f.name: _written(getattr(options, f.name)) for f in fields}


def settings() -> tuple[Setting, ...]:
    """The table of options, in the order of their declaration.

    Example:
        >>> settings()[0].variable
        'TORCH_CASCADE_DISABLE'
    """
    return tuple(
        Setting(f.name, _variable(f.name), _written(f.default), f.metadata["meaning"])
        for f in dataclasses.fields(Options)
    )


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return str(value or "")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _parse(option: dataclasses.Field[Any], origin: str, value: object) -> object:
    try:
        return option.metadata["parse"](value)
    except ValueError as error:
        raise ValueError(f"{origin}: expected {error}, got {value!r}") from None


def _from_environment(ours: Mapping[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    """Values of the variables that are set; an empty one counts as unset."""
    names = {_variable(name): name for name in ours}
    values = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or not text:
            continue
        if variable not in names:
            raise ValueError(f"unknown variable {variable}{suggest(variable, names)}")
        values[names[variable]] = _parse(ours[names[variable]], f"variable {variable}", text)
    return values


def _one_mode(option: object, argument: str | None) -> str | None:
    if option is not None and not isinstance(option, str):
        raise ValueError(f"option 'mode': expected a name, got {option!r}")
    if option and argument and option != argument:
        raise ValueError(
            f"option 'mode' is {option!r} but torch.compile was called with mode={argument!r}"
        )
    return option or argument

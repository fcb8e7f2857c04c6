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
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch_cascade.compiler import option_values as values
from torch_cascade.compiler.inductor_options import (
    inductor_namesake,
    inductor_patches,
    mode_patches,
    one_mode,
    suggest,
)
from torch_cascade.compiler.option_values import CheckLayers, Decide, boolean, choice, folder
from torch_cascade.compiler.pass_list import check_agreement, parse_passes, same_meaning
from torch_cascade.compiler.pass_registry import DEFAULT
from torch_cascade.compiler.pass_text import PassSpec, PassTextError

PREFIX = "TORCH_CASCADE_"
Guards: TypeAlias = Literal["auto", "never"]
Verify: TypeAlias = bool | Literal["numeric"]


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

    disable: bool = field(default=False, metadata=_about(boolean, "`1`: exactly plain Inductor"))
    passes: tuple[PassSpec, ...] = field(
        default=tuple(map(PassSpec, DEFAULT)),
        metadata=_about(
            parse_passes,
            "the passes to run, in order, with options of their own in braces, or `none`",
            in_code=True,
        ),
    )
    decide: Decide = field(
        default="auto",
        metadata=_about(
            values.decide,
            "`auto`: rewrite where the cost model says it pays; `always`: every legal rewrite; "
            "`never`: analyse and report only; in code also a callable that is given the "
            "numbers (`compiler.decide.Facts`) and returns a bool",
            in_code=True,
        ),
    )
    calibration: str = field(
        default="auto",
        metadata=_about(
            values.calibration,
            "figures for the cost model: `auto`: what `python -m torch_cascade calibrate` measured "
            "on this machine, if it did; `none`: the table of devices; or the path of a file",
        ),
    )
    guards: Guards = field(
        default="auto",
        metadata=_about(
            choice(*get_args(Guards)),
            "`auto`: a decision on symbolic sizes becomes a guard; "
            "`never`: decide on the first sizes",
            in_code=True,
        ),
    )
    batch_invariant: bool = field(
        default=False,
        metadata=_about(
            boolean,
            "`1`: a rewritten attention gives a branch the same bits however many branches stand "
            "beside it, on a GPU only (on a CPU it promises nothing and warns); also Inductor's "
            "option of that name, where torch has it",
            in_code=True,
        ),
    )
    levels: int | None = field(
        default=None,
        metadata=_about(
            values.levels,
            "the most levels of a cascade, the branches' own keys counted (unset: all there are)",
            in_code=True,
        ),
    )
    recompute_ratio: Fraction = field(
        default=Fraction("0.15"),
        metadata=_about(
            values.ratio,
            "share of the cached tokens that is computed again, rounded up to a token; `0`: all "
            "are reused, `1`: none",
            in_code=True,
        ),
    )
    check_layers: CheckLayers = field(
        default=((1, None),),
        metadata=_about(
            values.check_layers,
            "the layers where these tokens are chosen, computed in full up to the first; "
            "`1:0.5,2:0.15` keeps fewer at each, and says so instead of `recompute_ratio`",
            in_code=True,
        ),
    )
    selector: Any = field(
        default="v",
        metadata=_about(
            values.selector,
            "how they are chosen: by deviation of `v`, `k` or `kv`, chunk `heads`, at `random`, "
            "by the question's `attention`, `change`, or a look ahead (`question`); or a callable",
            in_code=True,
        ),
    )
    min_tokens: int = field(
        default=256,
        metadata=_about(
            values.count, "with fewer cached tokens everything is computed", in_code=True
        ),
    )
    strict: bool = field(
        default=False,
        metadata=_about(
            boolean,
            "`1`: an error where nothing was rewritten, a pass failed, or a result is wrong",
        ),
    )
    verify: Verify = field(
        default=False,
        metadata=_about(
            values.verify,
            "`1`: check the graph after every pass; `numeric`: and in the first call every "
            "rewritten attention, by its error against float64",
        ),
    )
    dump: Path | None = field(
        default=None,
        metadata=_about(folder, "folder for graphs, programs that run them, and reports"),
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
        mode = one_mode(given.pop("mode", None), mode)
        ours = {f.name: f for f in dataclasses.fields(cls)}
        chosen, in_code = _from_environment(ours), dict[str, Any]()
        for name in [name for name in given if name in ours]:
            in_code[name] = _parse(ours[name], f"option {name!r}", given.pop(name))
        check_agreement(in_code, "option {}")
        chosen |= in_code
        patches = mode_patches(mode) | inductor_patches(given, ours)
        if chosen.get("batch_invariant"):
            patches |= inductor_namesake("batch_invariant")
        return cls(**chosen), patches

    def fingerprint(self) -> str:
        """Stable text of every option that can change generated code, for cache keys.

        Example:
            >>> Options(decide="never").fingerprint()  # doctest: +ELLIPSIS
            "passes=cascade,blend,linears;decide='never';guards='auto';batch_invariant=False;..."

        Of a callable only the name is in it; what it does is in `Pipeline.uuid`.
        """
        fields = [f for f in dataclasses.fields(self) if f.metadata["in_code"]]
        return ";".join(f"{f.name}={_told(getattr(self, f.name))}" for f in fields)

    def of_pass(self, name: str) -> Options:
        """These options as one pass sees them: what was said in its braces goes first.

        Example:
            >>> chosen = Options.resolve({"passes": "cascade{decide=always},blend"})[0]
            >>> chosen.of_pass("cascade").decide, chosen.of_pass("blend").decide
            ('always', 'auto')
        """
        said = {s.name: s for s in self.passes}.get(name)
        return self if said is None else dataclasses.replace(self, **same_meaning(said))

    def stages(self) -> tuple[tuple[int, Fraction], ...]:
        """(layer, ratio) where tokens are chosen, in order; ((-1, 0),) for full reuse.

        Example:
            >>> Options(recompute_ratio=Fraction(0)).stages()
            ((-1, Fraction(0, 1)),)
        """
        ratios = [(c, self.recompute_ratio if r is None else r) for c, r in self.check_layers]
        return tuple(ratios) if ratios[0][1] else ((-1, Fraction(0)),)


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
    return {f.name: values.written(getattr(options, f.name)) for f in fields}


def settings() -> tuple[Setting, ...]:
    """The table of options, in the order of their declaration.

    Example:
        >>> settings()[0].variable
        'TORCH_CASCADE_DISABLE'
    """
    return tuple(
        Setting(f.name, _variable(f.name), values.written(f.default), f.metadata["meaning"])
        for f in dataclasses.fields(Options)
    )


def _told(value: object) -> str:
    specs = isinstance(value, tuple) and all(isinstance(item, PassSpec) for item in value)
    return values.written(value) if specs or callable(value) else repr(value)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _parse(option: dataclasses.Field[Any], origin: str, value: object) -> object:
    try:
        return option.metadata["parse"](value)
    except PassTextError as error:
        raise ValueError(f"{origin}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{origin}: expected {error}, got {value!r}") from None


def _from_environment(ours: Mapping[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    """Values of the variables that are set; an empty one counts as unset."""
    names = {_variable(name): name for name in ours}
    found = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or not text:
            continue
        if variable not in names:
            raise ValueError(f"unknown variable {variable}{suggest(variable, names)}")
        found[names[variable]] = _parse(ours[names[variable]], f"variable {variable}", text)
    check_agreement(found, "the variable of {}")
    return found

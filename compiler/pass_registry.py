"""Which passes there are: this package's, and those that others register or install.

A pass of others is a frozen dataclass that derives from `compiler.pass_base.Pass`. It is known by
`register_pass`, or by an entry point of the group `torch_cascade.passes` whose name is the pass's:

    [project.entry-points."torch_cascade.passes"]
    swap-heads = "my_package.passes:SwapHeads"

An entry point is loaded when the option `passes` names it, never before. No pass of others runs
unless it is named there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from typing import TYPE_CHECKING, Any

from torch_cascade.compiler import option_values as values
from torch_cascade.compiler.inductor_options import suggest
from torch_cascade.compiler.pass_options import PassOption, field_options

if TYPE_CHECKING:
    from torch_cascade.compiler.pass_base import Pass

GROUP = "torch_cascade.passes"
LOWER = "lower"
"""The pass that replaces our ops; a pass may ask to run after it, and before `cleanup`."""

_ALWAYS = (LOWER, "cleanup")
_TAKEN = (*_ALWAYS, "none", "before", "capture", "total")  # names with another meaning in reports


@dataclass(frozen=True)
class KnownPass:
    """A pass that the option `passes` may name.

    Attributes:
        name: of the pass.
        options: what it takes in braces.
        after, before: names of passes between which it must stand.
        about: what it does, in a line.
        why: why it must stand there ("" for "registered so").
        type: its class; None for a pass of this package, whose options are fields of `Options`.
        origin: who it comes from.
    """

    name: str
    options: tuple[PassOption, ...] = ()
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    about: str = ""
    why: str = ""
    type: type[Pass] | None = None
    origin: str = "torch_cascade"

    @property
    def runs_after_lower(self) -> bool:
        """True iff it sees what our ops have become, instead of the ops."""
        return LOWER in self.after

    def make(self, options: Mapping[str, object]) -> Pass:
        """The pass of others with the options that were said, by their names in text."""
        assert self.type is not None, f"{self.name} is made by the pipeline"
        given = {o.field: options[o.name] for o in self.options if o.name in options}
        return self.type(**given)


_WORDS = ("auto", "never")
_DECIDE = PassOption("decide", "decide", values.decide)
_GUARDS = PassOption("guards", "guards", values.choice(*_WORDS))

BUILT_IN = {
    known.name: known
    for known in (
        KnownPass(
            "cascade",
            (PassOption("levels", "levels", values.levels), _DECIDE, _GUARDS),
            about="attention over a shared prefix: once a request, and once a branch's own keys",
        ),
        KnownPass(
            "blend",
            (
                PassOption("ratio", "recompute_ratio", values.ratio, ("recompute-ratio",)),
                PassOption("check-layers", "check_layers", values.check_layers, ("check-layer",)),
                PassOption("selector", "selector", values.selector),
                PassOption("min-tokens", "min_tokens", values.count),
                _DECIDE,
                _GUARDS,
            ),
            after=("cascade",),
            about="cached keys and values are reused, and the tokens that need it recomputed",
            why="it computes attention for some of the tokens only, behind scattered masks, in "
            "which cascade would have to prove its sharing",
        ),
        KnownPass(
            "linears",
            after=("cascade", "blend"),
            about="linear layers of a decoding step that read the same rows: one launch, on a GPU",
            why="it joins them only where attention was rewritten",
        ),
    )
}
DEFAULT = tuple(BUILT_IN)

_registered: dict[str, KnownPass] = {}


def register_pass(
    pass_type: type[Pass], *, before: Iterable[str] = (), after: Iterable[str] = ()
) -> type[Pass]:
    """Make a pass known by its name, for `options={"passes": "cascade,my-pass{width=3}"}`.

    Args:
        pass_type: a frozen dataclass that derives from `torch_cascade.Pass`. Its fields are its
            options; each needs a default, and a type that a text can be (bool, int, float, str,
            Fraction, a Literal of strings) or `metadata={"parse": ...}`. `metadata={"meaning":
            ...}` is shown by `python -m torch_cascade passes`.
        before: names of passes that must come later where both are named, beside those of the
            class's own `before`.
        after: likewise, of passes that must come earlier; after "lower" it sees the code that our
            ops became.

    Returns:
        `pass_type`, so that it can be used as a decorator.

    Raises:
        ValueError: it is no such pass, or its name is taken.
    """
    known = _checked(pass_type, tuple(before), tuple(after), "register_pass")
    old = _registered.get(known.name)
    if old is not None and _place(old.type) != _place(pass_type):
        raise ValueError(
            f"register_pass: the name {known.name!r} is taken by {'.'.join(_place(old.type))}"
        )
    _registered[known.name] = known
    return pass_type


def known_pass(name: str) -> KnownPass | None:
    """The pass of a name: this package's, a registered or an installed one; None for none.

    Raises:
        ValueError: an installed one cannot be loaded, or is no pass.
    """
    found = BUILT_IN.get(name) or _registered.get(name)
    return found if found is not None else _installed(name)


def names() -> tuple[str, ...]:
    """Every name that `known_pass` may find, this package's first."""
    return tuple(dict.fromkeys((*BUILT_IN, *_registered, *sorted(_entry_points()))))


def _entry_points() -> dict[str, list[metadata.EntryPoint]]:
    found: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _installed(name: str) -> KnownPass | None:
    points = _entry_points().get(name, [])
    if not points:
        return None
    origins = [point.dist.name if point.dist else "unknown" for point in points]
    told = f"pass {name!r} of {' and '.join(origins)}"
    if len(points) > 1:
        raise ValueError(f"{told}: one name for several; uninstall all but one")
    told += f" (entry point {points[0].value})"
    try:
        loaded = points[0].load()
    except Exception as error:
        raise ValueError(f"{told}: cannot be loaded: {type(error).__name__}: {error}") from error
    known = _checked(loaded, (), (), told, origins[0])
    if known.name != name:
        raise ValueError(f"{told}: expected a pass of that name, its `name` is {known.name!r}")
    _registered[name] = known
    return known


def _checked(
    found: Any, before: tuple[str, ...], after: tuple[str, ...], told: str, origin: str = ""
) -> KnownPass:
    """A pass of others as it is known, if it keeps to what a pass is."""
    from torch_cascade.compiler.pass_base import Pass

    if not (inspect.isclass(found) and issubclass(found, Pass)):
        raise ValueError(f"{told}: expected a class derived from torch_cascade.Pass, got {found!r}")
    told = f"{told}: {found.__name__}"
    parameters = vars(found).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise ValueError(f"{told}: expected a frozen dataclass, @dataclass(frozen=True)")
    if inspect.isabstract(found):
        raise ValueError(f"{told}: expected a method `apply(self, graph, context)`, it has none")
    name = getattr(found, "name", None)
    if not isinstance(name, str) or not name.replace("-", "a").isalnum() or not name.islower():
        raise ValueError(f"{told}: expected `name: ClassVar[str]` such as 'my-pass', got {name!r}")
    if name in BUILT_IN or name in _TAKEN:
        raise ValueError(f"{told}: the name {name!r} is taken by this package")
    before, after = (*found.before, *before), (*found.after, *after)
    _check_places(name, before, after, told)
    about = (inspect.getdoc(found) or "").partition("\n")[0]
    options = field_options(fields(found), found, told)
    origin = origin or found.__module__
    return KnownPass(name, options, after, before, about, type=found, origin=origin)


def _check_places(name: str, before: tuple[str, ...], after: tuple[str, ...], told: str) -> None:
    valid = [other for other in (*names(), LOWER) if other != name]
    for place in (*before, *after):
        if place not in valid:
            raise ValueError(
                f"{told}: unknown pass {place!r} in before or after{suggest(place, valid)}"
            )
    both = sorted({*before} & {*after})
    if both:
        raise ValueError(f"{told}: it cannot stand before and after {', '.join(both)}")
    if LOWER in after and before:
        raise ValueError(f"{told}: after {LOWER} it cannot stand before {', '.join(before)}")


def _place(found: type[Pass] | None) -> tuple[str, str]:
    return (found.__module__, found.__qualname__) if found else ("", "")

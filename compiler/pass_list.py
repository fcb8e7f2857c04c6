"""The value of the option `passes`: names looked up, options parsed, the order checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_cascade.compiler.inductor_options import suggest
from torch_cascade.compiler.option_values import written
from torch_cascade.compiler.pass_options import PassOption
from torch_cascade.compiler.pass_registry import LOWER, KnownPass, known_pass, names
from torch_cascade.compiler.pass_text import Item, PassSpec, PassTextError, Word, read

_EXPECTED = "passes such as cascade{levels=2},blend, a list of them, or none"


def parse_passes(value: object) -> tuple[PassSpec, ...]:
    """Passes in the order in which they run, from a text, or from a list of texts and values.

    Raises:
        PassTextError: a text that is wrong, pointing at the place.
        ValueError: another value, or an order that is not allowed.

    Example:
        >>> [str(spec) for spec in parse_passes("cascade{decide=always}, blend{check_layer=2}")]
        ['cascade{decide=always}', 'blend{check-layers=2}']
    """
    if isinstance(value, str) and value.strip():
        found = _specs(value)
    elif isinstance(value, (list, tuple)) and all(isinstance(v, (str, PassSpec)) for v in value):
        found = tuple(spec for item in value for spec in _specs(str(item)))
    else:
        raise ValueError(_EXPECTED)
    _check_order([known_of(spec) for spec in found])
    return found


def known_of(spec: PassSpec) -> KnownPass:
    """What is known of a pass that was parsed."""
    known = known_pass(spec.name)
    if known is None:
        raise ValueError(f"the pass {spec.name!r} is not registered any more")
    return known


def same_meaning(spec: PassSpec) -> dict[str, Any]:
    """What was said in the braces of a pass of this package, by names of `Options`."""
    known = known_of(spec)
    fields = {option.name: option.field for option in known.options}
    return {} if known.type else {fields[name]: value for name, value in spec.options}


def check_agreement(found: Mapping[str, Any], origin: str) -> None:
    """In one place an option and the braces of a pass may not say two things.

    Between places the braces go first: they are about one pass, the option about all.

    Raises:
        ValueError: they do.
    """
    for spec in found.get("passes", ()):
        for name, value in same_meaning(spec).items():
            if name in found and found[name] != value:
                one, other = origin.format(repr("passes")), origin.format(repr(name))
                told = written(found[name])
                raise ValueError(f"{one} says {spec} and {other} says {told}: say one of them")


def _specs(text: str) -> tuple[PassSpec, ...]:
    return tuple(_spec(item, text) for item in read(text))


def _spec(item: Item, text: str) -> PassSpec:
    known = _found(item.name, text)
    said: dict[str, object] = {}
    for name, value in item.options:
        option = _option(known, name, text)
        if option.name in said:
            raise PassTextError(f"option {option.name!r} is said twice", text, name.at)
        try:
            said[option.name] = option.parse(value.text)
        except ValueError as error:
            what = f"option {option.name!r} of pass {known.name!r}: expected {error}"
            raise PassTextError(f"{what}, got {value.text!r}", text, value.at) from None
    return PassSpec(
        known.name, tuple((o.name, said[o.name]) for o in known.options if o.name in said)
    )


def _found(name: Word, text: str) -> KnownPass:
    try:
        known = known_pass(name.text)
    except ValueError as error:
        raise PassTextError(str(error), text, name.at) from error
    if known is None:
        what = f"unknown pass {name.text!r}{suggest(name.text, names())}"
        raise PassTextError(what, text, name.at)
    return known


def _option(known: KnownPass, name: Word, text: str) -> PassOption:
    by_name = {alias: o for o in known.options for alias in (o.name, *o.aliases)}
    if name.text not in by_name:
        valid = [option.name for option in known.options]
        said = suggest(name.text, valid) if valid else ": it takes none"
        what = f"unknown option {name.text!r} of pass {known.name!r}{said}"
        raise PassTextError(what, text, name.at)
    return by_name[name.text]


def _check_order(passes: Sequence[KnownPass]) -> None:
    """Each pass once, and between those that it asks to stand between."""
    for place, this in enumerate(passes):
        for earlier in passes[:place]:
            if earlier.name == this.name:
                raise ValueError(f"each pass once, {this.name!r} is there twice")
            if this.name in earlier.after or earlier.runs_after_lower > this.runs_after_lower:
                raise ValueError(_misplaced(earlier, "after", this))
            if earlier.name in this.before:
                raise ValueError(_misplaced(this, "before", earlier))


def _misplaced(this: KnownPass, where: str, other: KnownPass) -> str:
    why = this.why or f"it was registered so by {this.origin}"
    if this.runs_after_lower and other.name not in this.after:
        why = f"it was registered to run after {LOWER}, which follows all others"
    return f"{this.name} {where} {other.name}: {why}"

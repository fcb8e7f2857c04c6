"""The command `python -m torch_cascade passes`: which passes there are, and what they take."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from torch_cascade.compiler.options import settings
from torch_cascade.compiler.pass_options import PassOption
from torch_cascade.compiler.pass_registry import KnownPass, known_pass, names

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--json", action="store_true", help="print an object for tools instead")


def run(arguments: argparse.Namespace) -> int:
    """Print every pass that the option `passes` may name, with its options.

    Returns:
        The exit status: 0.
    """
    listed = [_listed(name) for name in names()]
    print(json.dumps({"passes": listed}, indent=1) if arguments.json else _text(listed))
    return 0


def _listed(name: str) -> dict[str, Any]:
    """One pass for tools; with "error" instead of its options where it cannot be used."""
    try:
        known = known_pass(name)
    except ValueError as error:
        return {"name": name, "error": str(error)}
    assert known is not None, name
    return {
        "name": name,
        "about": known.about,
        "origin": known.origin,
        "after": list(known.after),
        "before": list(known.before),
        "options": [_option(option, known) for option in known.options],
    }


def _option(option: PassOption, known: KnownPass) -> dict[str, str]:
    default, meaning = option.default, option.meaning
    if known.type is None:
        (setting,) = (s for s in settings() if s.name == option.field)
        default, meaning = setting.default, setting.meaning
    return {"name": option.name, "default": default, "meaning": meaning}


def _text(listed: list[dict[str, Any]]) -> str:
    blocks = ["What the option passes (variable TORCH_CASCADE_PASSES) may name, options in braces:"]
    for found in listed:
        if "error" in found:
            blocks.append(_wrapped(f"{found['name']}  cannot be used: {found['error']}", 0))
            continue
        places = [
            f"{where} {', '.join(found[where])}" for where in ("after", "before") if found[where]
        ]
        told = "; ".join([found["origin"], *places])
        lines = [_wrapped(f"{found['name']}  {found['about']} ({told})", 0)]
        for option in found["options"]:
            lines.append(
                _wrapped(f"{option['name']}={option['default'] or '...'}  {option['meaning']}", 4)
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _wrapped(text: str, indent: int) -> str:
    first, rest = " " * indent, " " * (indent + 4)
    text = " ".join(text.split())
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False
    )

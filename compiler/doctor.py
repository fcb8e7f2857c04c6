"""The command `python -m torch_cascade doctor`: what works here, and what to install."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from torch_cascade.compiler.checks import Check, all_checks
from torch_cascade.compiler.trial import trials

_MARKS = {"ok": "ok", "absent": "--", "bad": "NO"}
_COLOURS = {"ok": "green", "absent": "yellow", "bad": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--json", action="store_true", help="print an object for tools instead")
    about = "also compile a small attention on every device, and compare it with eager"
    parser.add_argument("--compile", action="store_true", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Make every check and print it.

    Returns:
        The exit status: 0 if the backend can work here, 1 if something keeps it from that.
    """
    checks = list(all_checks())
    if arguments.compile:
        checks += trials()
    works = all(check.state != "bad" for check in checks)
    if arguments.json:
        listed = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"works": works, "checks": listed}, indent=1))
    else:
        _print(checks)
        print(_verdict(checks))
    return 0 if works else 1


def _verdict(checks: Sequence[Check]) -> str:
    bad = [check.name for check in checks if check.state == "bad"]
    if bad:
        return f"torch_cascade cannot work here before this is put right: {', '.join(bad)}"
    return "torch_cascade works here"


def _print(checks: Sequence[Check]) -> None:
    """A table where `rich` is installed, else lines."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for check in checks:
            print(f"{_MARKS[check.state]}  {check.name:18} {check.found}")
            if check.advice:
                print(f"    {'':18} -> {check.advice}")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        mark = Text(_MARKS[check.state], style=_COLOURS[check.state])
        advice = f"\n-> {check.advice}" if check.advice else ""
        table.add_row(mark, Text(check.name), Text(check.found + advice, overflow="fold"))
    Console(highlight=False).print(table)

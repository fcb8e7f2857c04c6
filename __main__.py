"""The command line: `python -m torch_cascade demo`, `calibrate`, `doctor`, `explain`, `passes`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from torch_cascade.compiler import calibrate, doctor, explain_script, passes_command
from torch_cascade.demo import cli as demo

_COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "demo": (demo, "decode branches of one prompt with cascade and with stock engines, compare"),
    "calibrate": (calibrate, "measure this machine for the cost model, in less than two minutes"),
    "doctor": (doctor, "say what works on this machine, and what to install"),
    "explain": (explain_script, "run a script, then say what the backend did and why not"),
    "passes": (passes_command, "list the passes that can be named, with their options"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (default: of the process) name; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_cascade")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, about) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=about, description=about))
    parsed = parser.parse_args(arguments)
    status: int = _COMMANDS[parsed.command][0].run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())

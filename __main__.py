"""The command line: `python -m torch_cascade demo`, `python -m torch_cascade calibrate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch_cascade.compiler import calibrate
from torch_cascade.demo import cli as demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (default: of the process) name; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_cascade")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "decode branches of one prompt with cascade and with stock engines, and compare"
    demo.add_arguments(commands.add_parser("demo", help=about, description=about))
    about = "measure this machine for the cost model, in less than two minutes"
    calibrate.add_arguments(commands.add_parser("calibrate", help=about, description=about))
    parsed = parser.parse_args(arguments)
    return demo.run(parsed) if parsed.command == "demo" else calibrate.run(parsed)


if __name__ == "__main__":
    sys.exit(main())

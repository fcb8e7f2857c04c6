"""The command line: `python -m torch_cascade demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch_cascade.demo import cli as demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (default: of the process) name; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_cascade")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "decode branches of one prompt with cascade and with stock engines, and compare"
    demo.add_arguments(commands.add_parser("demo", help=about, description=about))
    return demo.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

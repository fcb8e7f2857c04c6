"""One attention over a shared prefix: ours and others, against the floor.

Example: `python -m torch_cascade.benchmarks.attention --rows 4,4,2000,5,5 --engines kernel`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from torch_cascade.benchmarks import command, contest, peers, plots, record, rows, tables
from torch_cascade.benchmarks.record import Line

OURS = tuple(peer.name for peer in peers.PEERS if peer.ours)
RIVALS = tuple(peer.name for peer in peers.PEERS if not peer.ours)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command.parser("attention", __doc__, repeat=30)
    made.add_argument("--engines", metavar="A,B", help=f"some of {', '.join(peers.NAMES)}")
    made.add_argument("--no-plot", action="store_true", help="draw nothing beside the JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0, 1 where an engine of ours is wrong, 2 for usage."""
    made = parser()
    options = made.parse_args(arguments)
    rows.choose_engines(made, options, peers.NAMES, peers.NAMES)
    device = command.cuda_device()
    if device is None:
        print(command.NO_DEVICE, file=sys.stderr)
        return 2
    return _run(options, device)


def _run(options: argparse.Namespace, device: torch.device) -> int:
    from rich.console import Console

    made = command.empty_record("attention", options, device)
    path = options.json or record.default_path("attention", device)
    console = Console(width=max(160, Console().width))
    engines = [peer for peer in peers.PEERS if peer.name in options.engines]

    def measure(row: rows.Row) -> Line:
        return contest.measure_row(engines, row, made, options, device)

    command.fill(made, path, options, measure, tables.summary, console)
    tables.report(made, options.engines, OURS, RIVALS, console)
    if not options.no_plot and any(r.time for line in made.lines for r in line.results.values()):
        plots.write(made, options.engines, path.with_suffix(".png"))
    console.print(f"written: {path}", highlight=False)
    return command.status(made, OURS)


if __name__ == "__main__":
    sys.exit(main())

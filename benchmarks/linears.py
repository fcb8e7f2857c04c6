"""Products of a few rows with several weights: our kernel and cuBLAS, against the floor.

Example: `python -m torch_cascade.benchmarks.linears --rows 16,4096,4096+1024+1024 --sweep`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_cascade.benchmarks import (
    command,
    contest,
    linears_contest,
    linears_work,
    peers,
    record,
    rows,
    tables,
    tune,
)
from torch_cascade.benchmarks.linears_contest import DEFAULT, NAMES, PEERS
from torch_cascade.benchmarks.linears_work import Inputs, Row
from torch_cascade.benchmarks.record import Line, Record
from torch_cascade.kernels.launch_config import DeviceLimits
from torch_cascade.kernels.linears_config import linears_config

if TYPE_CHECKING:
    from rich.console import Console

SIZES = command.Sizes(
    "M,K,N[+N+N]",
    "rows, features, columns of each weight",
    linears_work.parse_row,
    linears_work.DEFAULT_ROWS,
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
OURS = tuple(peer.name for peer in PEERS if peer.ours)
RIVALS = tuple(peer.name for peer in PEERS if not peer.ours)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command.parser("linears", __doc__, repeat=30, sizes=SIZES)
    made.add_argument(
        "--engines",
        metavar="A,B",
        help=f"some of {', '.join(NAMES)} (default: {', '.join(DEFAULT)})",
    )
    made.add_argument("--bias", action="store_true", help="every weight has one")
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    made.add_argument(
        "--sweep", action="store_true", help="configurations of our kernel, with what follows"
    )
    tune.add_options(made)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 0, 1 where ours is wrong or fails, 2 for usage."""
    made = parser()
    options = made.parse_args(arguments)
    if options.sweep and options.engines is not None:
        made.error("argument --engines: not with --sweep")
    if options.only is not None and not options.sweep:
        made.error("argument --only: not without --sweep")
    rows.choose_engines(made, options, NAMES, DEFAULT)
    device = command.cuda_device()
    if device is None:
        print(command.NO_DEVICE, file=sys.stderr)
        return 2
    return _run(options, device)


def _run(options: argparse.Namespace, device: torch.device) -> int:
    from rich.console import Console

    title = "linears-sweep" if options.sweep else "linears"
    made = command.empty_record(title, options, device, SIZES, DTYPES[options.dtype])
    made.settings |= {"bias": options.bias}
    path = options.json or record.default_path(title, device)
    console = Console(width=max(160, Console().width))
    run = _sweep if options.sweep else _compete
    status = run(made, path, options, device, console)
    console.print(f"written: {path}", highlight=False)
    return status


def _compete(
    made: Record, path: Path, options: argparse.Namespace, device: torch.device, console: Console
) -> int:
    engines = [peer for peer in PEERS if peer.name in options.engines]

    def measure(row: Row) -> Line:
        return measure_row(engines, row, made, options, device)

    command.fill(made, path, options, measure, tables.summary, console)
    tables.report(made, options.engines, OURS, RIVALS, console)
    return command.status(made, OURS)


def _sweep(
    made: Record, path: Path, options: argparse.Namespace, device: torch.device, console: Console
) -> int:
    from torch_cascade.kernels.triton_launch import device_limits

    limits = device_limits(device)
    made.settings |= {"only": options.only, "limits": limits._asdict()}

    def measure(row: Row) -> Line:
        return sweep_row(row, made, options, limits, device)

    command.fill(made, path, options, measure, tune.summary, console)
    tune.report(made, options.show, console)
    return tune.status(made)


def measure_row(
    engines: Sequence[peers.Peer[Inputs]],
    row: Row,
    made: Record,
    options: argparse.Namespace,
    device: torch.device,
) -> Line:
    """Check every engine at these sizes, then time those that are right, in turn."""
    dtype = DTYPES[options.dtype]
    given = linears_work.draw(row, options.bias, device, dtype, options.seed)
    results, prepared = contest.prepare(engines, [linears_contest.Case(given)], device)
    floor = linears_work.floor(row, options.bias, dtype.itemsize, made.ceilings)
    return contest.line(row, floor, contest.timed(results, prepared, options, device))


def field(row: Row, element: int, limits: DeviceLimits, only: str | None = None) -> tune.Field:
    """The configuration that a launch takes, and the candidates whose names contain `only`."""
    chosen = linears_config(row.rows, row.features, row.columns, limits.processors)
    memory = limits.shared_memory
    room = functools.partial(linears_contest.fits, element=element, shared_memory=memory)
    return tune.Field.among(
        chosen, linears_contest.candidates(row), linears_contest.name, room, only
    )


def sweep_row(
    row: Row,
    made: Record,
    options: argparse.Namespace,
    limits: DeviceLimits,
    device: torch.device,
) -> Line:
    """Compile, check and time all configurations at these sizes."""
    dtype = DTYPES[options.dtype]
    compared = field(row, dtype.itemsize, limits, options.only)
    engines = [
        peers.Peer(each, functools.partial(linears_contest.kernel, config=config), ours=True)
        for each, config in compared.configs.items()
    ]
    if options.jobs > 1:
        given = linears_work.draw(row, options.bias, device, dtype, options.seed)
        tune.compile_all([engine.make(given) for engine in engines], options.jobs, device)
        del given  # the same are drawn again for the check
    return tune.judged(measure_row(engines, row, made, options, device), compared)


if __name__ == "__main__":
    sys.exit(main())

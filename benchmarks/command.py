"""What the programs that go through rows of sizes share: options, device, line after line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_cascade.benchmarks import record, rows, timing
from torch_cascade.benchmarks.contest import DTYPE
from torch_cascade.benchmarks.record import Line, Record

if TYPE_CHECKING:
    from rich.console import Console

NO_DEVICE = "this benchmark times CUDA graphs: it needs a CUDA device"


@dataclass(frozen=True)
class Sizes:
    """What a row of a program is.

    Attributes:
        columns: its sizes by their letters, as they are written.
        meaning: of each.
        parse: a row from text.
        default: rows if nobody says otherwise; their text can be parsed.
    """

    columns: str
    meaning: str
    parse: Callable[[str], Any]
    default: Sequence[Any]


ATTENTION = Sizes(
    "B,T,L,S,X",
    "requests, branches, prefix, queries a branch, suffix keys a branch",
    rows.parse_row,
    rows.DEFAULT_ROWS,
)


def parser(
    name: str, described: str | None, repeat: int, sizes: Sizes = ATTENTION
) -> argparse.ArgumentParser:
    """The options that all have; `repeat` is the default of `--repeat`."""
    made = argparse.ArgumentParser(name, description=(described or "").partition("\n")[0])
    made.add_argument(
        "--rows",
        type=sizes.parse,
        nargs="+",
        default=sizes.default,
        metavar=sizes.columns,
        help=sizes.meaning,
    )
    made.add_argument(
        "--repeat", type=at_least_one, default=repeat, help=f"timings of each (default: {repeat})"
    )
    made.add_argument("--flush", choices=timing.FLUSHES, default="read", help="how L2 is emptied")
    made.add_argument("--seconds", type=float, help="start no new row after so many")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    return made


def at_least_one(text: str) -> int:
    """A whole number above zero.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def cuda_device() -> torch.device | None:
    """The current CUDA device, if there is one."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def empty_record(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    sizes: Sizes = ATTENTION,
    dtype: torch.dtype = DTYPE,
) -> Record:
    """A record without lines; the machine's ceilings are measured."""
    from torch_cascade.benchmarks import ceilings

    measured = ceilings.measure(device, dtype)
    settings = _settings(options, dtype)
    if sizes is ATTENTION:
        settings["heads"] = vars(rows.Heads())
    return Record(name, "us", sizes.columns, settings, measured, record.describe(device))


def _settings(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "repeat": options.repeat,
        "flush": options.flush,
        "flush_bytes": timing.FLUSH_BYTES,
        "seed": options.seed,
        "dtype": str(dtype),
        "interleaved": True,
    }


def fill(
    made: Record,
    path: Path,
    options: argparse.Namespace,
    measure: Callable[[Any], Line],
    said: Callable[[Line], str],
    console: Console,
) -> None:
    """Measure row after row; the file is written and a line is said after each."""
    began = time.monotonic()
    with torch.no_grad():
        for row in options.rows:
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                console.print(f"out of time: {row} and what follows were not measured")
                return
            made.lines.append(measure(row))
            made.write(path)
            console.print(f"{row}: {said(made.lines[-1])}", markup=False, highlight=False)


def status(made: Record, names: Sequence[str]) -> int:
    """The exit status: 1 where one of the engines that are named is wrong or failed."""
    found = [r for line in made.lines for name, r in line.results.items() if name in names]
    return 1 if any(r.status in (record.WRONG, record.FAILED) for r in found) else 0

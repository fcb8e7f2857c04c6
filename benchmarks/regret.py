"""Does the cost model decide right? Every strategy over a grid of shapes, and what rules lose.

Example: `python -m torch_cascade.benchmarks.regret --limit-seconds 280 --json regret.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_cascade.benchmarks import (
    command,
    grid,
    record,
    regret_measure,
    regret_report,
    strategies,
)
from torch_cascade.benchmarks.grid import Shape
from torch_cascade.benchmarks.record import Line, Record
from torch_cascade.compiler.calibration import device_for
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.device_table import cpu_device, gpu_device

if TYPE_CHECKING:
    from rich.console import Console

CHUNK = 24  # shapes whose kernels are compiled side by side


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = (__doc__ or "").partition("\n")[0]
    made = argparse.ArgumentParser("regret", description=about)
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    made.add_argument("--limit-seconds", type=float, help="start no new shape after so many")
    made.add_argument("--repeat", type=command.at_least_one, default=15, help="timings of each")
    made.add_argument(
        "--jobs", type=command.at_least_one, default=12, help="kernels compiled at once"
    )
    made.add_argument("--shapes", type=command.at_least_one, help="only the first so many")
    made.add_argument(
        "--cross-check", type=int, default=3, help="shapes that are compiled as well (GPU)"
    )
    made.add_argument(
        "--calibration", default="none", help="figures for our rule: none (the table), auto, FILE"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    made.add_argument("--resume", action="store_true", help="keep what the file already holds")
    made.add_argument("--again", type=Path, metavar="FILE", help="only judge a file's times again")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 0, 1 where a strategy is wrong."""
    options = parser().parse_args(arguments)
    if options.again is not None:
        return _judge_again(options.again)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = command.cuda_device() if kind == "cuda" else torch.device("cpu")
    if device is None:
        print(command.NO_DEVICE, file=sys.stderr)
        return 2
    return _run(options, device)


def _run(options: argparse.Namespace, device: torch.device) -> int:
    from rich.console import Console

    console = Console(width=max(120, Console().width))
    path = options.json or record.default_path("regret", device)
    made = _record(options, device, path)
    shapes = grid.grid(device.type)[: options.shapes]
    measured = {line.label for line in made.lines}
    left = [shape for shape in shapes if str(shape) not in measured]
    console.print(f"{len(measured)} shapes measured before, {len(left)} to go", highlight=False)
    with torch.no_grad():
        _measure(made, path, left, options, device, console)
    _report(made, path, device_for(device, options.calibration), console)
    return command.status(made, list(regret_measure.CHECKED))


def _judge_again(path: Path) -> int:
    """What today's rules make of times that were measured before, anywhere; it stays in the file.

    Figures are those of the table for the device that the file names.
    """
    from rich.console import Console

    content = json.loads(path.read_text())
    lines = [record.line_of(each) for each in content["lines"]]
    on_gpu = any(strategies.COPY in line.results for line in lines)
    device = gpu_device(content["device"]) if on_gpu else cpu_device("", threads=1)
    found = regret_report.regrets(lines, device)
    content["settings"] |= {"regret": regret_report.summary(found), "figures": str(device)}
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    Console(width=max(120, Console().width)).print(regret_report.table(found))
    if importlib.util.find_spec("matplotlib"):
        regret_report.draw_map(lines, device).savefig(path.with_suffix(".png"), dpi=100)
    return 0


def _report(made: Record, path: Path, device: Device, console: Console) -> None:
    """The table and the map; both again from a file with `--resume --shapes 1`."""
    found = regret_report.regrets(made.lines, device)
    made.settings |= {"regret": regret_report.summary(found), "figures": str(device)}
    made.write(path)
    console.print(regret_report.table(found))
    if importlib.util.find_spec("matplotlib"):
        regret_report.write_map(made, device, path.with_suffix(".png"))
    console.print(f"written: {path}", highlight=False)


def _record(options: argparse.Namespace, device: torch.device, path: Path) -> Record:
    settings = {"repeat": options.repeat, "seed": grid.SEED, "flush": "read"}
    kept = _kept(path) if options.resume else []
    ceilings = regret_measure.ceilings_of(device)
    made = Record("regret", "us", grid.COLUMNS, settings, ceilings, record.describe(device))
    made.lines = kept
    return made


def _kept(path: Path) -> list[Line]:
    """The lines that a file holds; none where there is no file."""
    if not path.exists():
        return []
    return [record.line_of(each) for each in json.loads(path.read_text())["lines"]]


def _measure(
    made: Record,
    path: Path,
    shapes: Sequence[Shape],
    options: argparse.Namespace,
    device: torch.device,
    console: Console,
) -> None:
    began = time.monotonic()
    measure = regret_measure.Measurement(made.ceilings, options, device)
    size = CHUNK if device.type == "cuda" else 1
    crossed = options.cross_check if device.type == "cuda" else 0
    for chunk in _chunks(shapes, size):
        spent = time.monotonic() - began
        if options.limit_seconds is not None and spent > options.limit_seconds:
            console.print("out of time: the rest was not measured (--resume goes on)")
            return
        for line in measure.lines(chunk, cross_check=min(crossed, len(chunk))):
            made.lines.append(line)
            console.print(said(line), markup=False, highlight=False)
        crossed -= min(crossed, len(chunk))
        made.write(path)


def said(line: Line) -> str:
    """One line's times."""
    texts = []
    for name, result in line.results.items():
        time_ = result.time
        texts.append(f"{name} {result.status if time_ is None else f'{time_.median:.1f}'}")
    return f"{line.label}: {'; '.join(texts)}"


def _chunks(shapes: Sequence[Shape], size: int) -> Iterator[Sequence[Shape]]:
    for start in range(0, len(shapes), size):
        yield shapes[start : start + size]


if __name__ == "__main__":
    sys.exit(main())

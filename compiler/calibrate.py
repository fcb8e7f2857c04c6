"""The command `python -m torch_cascade calibrate`: measure this machine for the cost model."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from torch_cascade.compiler import calibration
from torch_cascade.compiler.calibration import CalibrationError
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.device_table import from_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--show", action="store_true", help="print what is in use, measure nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the user's cache")


def run(arguments: argparse.Namespace) -> int:
    """Measure and write, or show.

    Returns:
        The exit status: 0, or 2 after one line that says what is wrong.
    """
    try:
        device = _device(arguments.device)
        path = arguments.output or calibration.default_path(device)
        if not arguments.show:
            figures = _measured(device)
            date = datetime.now(timezone.utc).isoformat("T", "seconds")
            calibration.write(path, device, figures, date)
        _show(device, path)
    except (CalibrationError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _device(name: str | None) -> torch.device:
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {name}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: torch finds no CUDA device")
    return device


def _measured(device: torch.device) -> dict[str, float]:
    """Every step in turn; what is measured now is said on the way."""
    module: Any = importlib.import_module(
        f"torch_cascade.compiler.measure_{'cpu' if device.type == 'cpu' else 'gpu'}"
    )
    steps = module.steps()
    found: dict[str, float] = {}
    for (_, measure), _shown in zip(steps, _progress([name for name, _ in steps]), strict=True):
        found |= measure()
    return found


def _progress(names: list[str]) -> Iterator[str]:
    """The names one by one, in a bar where `rich` is installed, else as lines."""
    try:
        from rich.progress import Progress
    except ImportError:
        for index, name in enumerate(names, 1):
            print(f"{index}/{len(names)} {name}", flush=True)
            yield name
        return
    with Progress() as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            bar.update(task, description=name)
            yield name
            bar.advance(task)


def _show(device: torch.device, path: Path) -> None:
    table = from_table(device)
    measured = calibration.read(path, device) if path.exists() else {}
    print(f"{calibration.machine(device)['name']}: {_about(table, path, bool(measured))}")
    for line in _lines(table, measured):
        print(line)


def _about(table: Device, path: Path, measured: bool) -> str:
    if measured:
        return f"calibrated, {path}"
    known = "a device that the table does not have" if table.is_generic else f"{table.name}"
    return f"not calibrated, figures of {known} (python -m torch_cascade calibrate)"


def _lines(table: Device, measured: dict[str, float]) -> Iterator[str]:
    """One line a figure: measured, of the table, and the table's source."""
    yield f"{'figure':16} {'measured':>11} {'table':>11}  unit"
    for name, meaning in table.meanings().items():
        own = f"{measured[name]:11.4g}" if name in measured else f"{'-':>11}"
        figure = table.figures[name]
        yield f"{name:16} {own} {figure.value:11.4g}  {meaning.unit}: {meaning.text}"
        yield f"{'':16} {'':11} {'':11}  table: {figure.source}"

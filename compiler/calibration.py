"""What `python -m torch_cascade calibrate` measured: one small JSON file a device, and its reading.

    {"schema": 2, "machine": {"kind": "cpu", "name": "...", "threads": 2}, "torch": "2.13.0",
     "date": "...", "figures": {"read": 1.2e10, ...}}

A file of another machine, of another schema, or with numbers that cannot be is refused with the
reason. Writing is `compiler/calibrate.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torch_cascade.compiler.device import CPU_FIGURES, GPU_FIGURES, Device
from torch_cascade.compiler.device_table import from_table, model_name
from torch_cascade.compiler.options import cache_folder

SCHEMA = 2
_OPTION = "option 'calibration' (variable TORCH_CASCADE_CALIBRATION)"
# Figures that are facts of a device and not measured.
NOT_MEASURED = frozenset({"processors", "cache", "shared"})


class CalibrationError(ValueError):
    """A calibration file that cannot be used, with the file and the reason."""


def machine(device: torch.device) -> dict[str, Any]:
    """What a calibration is valid for: the device's name, and how many threads compute."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return {"kind": device.type, "name": model_name(device), "threads": threads}


def default_path(device: torch.device) -> Path:
    """Where the calibration of a device is kept.

    Example:
        >>> default_path(torch.device("cpu")).parent.name
        'torch_cascade'
    """
    about = machine(device)
    slug = re.sub(r"[^a-z0-9]+", "-", about["name"].lower()).strip("-")
    threads = f"-{about['threads']}-threads" if about["threads"] else ""
    return cache_folder() / f"calibration-{about['kind']}-{slug}{threads}.json"


def device_for(device: torch.device, choice: str = "auto") -> Device:
    """The figures of a device: calibrated where there is a calibration, else of the table.

    Args:
        device: as of a tensor.
        choice: "auto": the file in the user's cache folder, if there is one (if it is bad, a
            warning says so once); "none": the table; or the path of a file.

    Raises:
        CalibrationError: the file that was asked for cannot be used.
    """
    index = torch.cuda.current_device() if device.type == "cuda" and _has_cuda() else 0
    place = torch.device("cpu") if device.type == "cpu" else torch.device("cuda", index)
    threads = torch.get_num_threads() if place.type == "cpu" else 0
    if choice == "none":
        return _table(place, threads)
    path = default_path(place) if choice == "auto" else Path(choice)
    if choice == "auto" and not path.exists():
        return _table(place, threads)
    stamp = path.stat().st_mtime_ns if path.exists() else 0
    return _calibrated(place, threads, path, stamp, must=choice != "auto")


def _has_cuda() -> bool:
    return torch.cuda.is_available()


@cache
def _table(device: torch.device, threads: int) -> Device:
    return from_table(device)


@cache
def _calibrated(device: torch.device, threads: int, path: Path, stamp: int, must: bool) -> Device:
    """One object for a file as it is: `stamp` changes when it is written again."""
    try:
        values = read(path, device)
    except CalibrationError as error:
        if must:
            raise CalibrationError(f"{_OPTION}: {error}") from None
        warnings.warn(f"{error}; the table of devices is used", UserWarning, stacklevel=2)
        return _table(device, threads)
    measured = _table(device, threads).with_values(values, f"measured: {path.name}")
    return measured.as_measured(model_name(device))


def key(choice: str = "auto") -> str:
    """Text that changes with every figure that decisions on this machine may use.

    Raises:
        CalibrationError: the file that was asked for cannot be used.
    """
    places = [torch.device("cpu"), *([torch.device("cuda")] if _has_cuda() else [])]
    if choice not in ("auto", "none"):
        places = [torch.device(_kind(Path(choice)))]
    devices = [device_for(place, choice) for place in places]
    return repr([(d.name, {name: f.value for name, f in d.figures.items()}) for d in devices])


def _kind(path: Path) -> str:
    """The type of the device that a file is about, given as the option."""
    try:
        return str(_machine_of(path)["kind"])
    except CalibrationError as error:
        raise CalibrationError(f"{_OPTION}: {error}") from None


def write(path: Path, device: torch.device, figures: Mapping[str, float], date: str) -> None:
    """Write a calibration, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "schema": SCHEMA,
        "machine": machine(device),
        "torch": torch.__version__,
        "date": date,
        "figures": dict(figures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(draft, path)


def read(path: Path, device: torch.device) -> dict[str, float]:
    """The figures in a calibration of this device.

    Raises:
        CalibrationError: there is no such file, or it cannot be used here.
    """
    content = _content(path)
    _must(path, "schema", SCHEMA, content.get("schema"))
    about = _machine_of(path)
    for name, expected in machine(device).items():
        _must(path, f"machine.{name}", expected, about.get(name))
    known = CPU_FIGURES if device.type == "cpu" else GPU_FIGURES
    figures = content.get("figures")
    if not isinstance(figures, dict) or not figures:
        raise CalibrationError(f"{path}: figures: expected an object of numbers, got {figures!r}")
    for name, value in figures.items():
        if name not in known:
            expected = f"some of {', '.join(known)}"
            raise CalibrationError(f"{path}: figures: expected {expected}, got {name!r}")
        _must_be_positive(path, name, value)
    return {name: float(value) for name, value in figures.items()}


def _must_be_positive(path: Path, name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        said = f"expected a number above 0, got {value!r}"
        raise CalibrationError(f"{path}: figures.{name}: {said}")


def _machine_of(path: Path) -> dict[str, Any]:
    about = _content(path).get("machine")
    if not isinstance(about, dict) or about.get("kind") not in ("cpu", "cuda"):
        raise CalibrationError(f"{path}: machine: expected kind cpu or cuda, got {about!r}")
    return about


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path}: expected a calibration, got {error}") from None
    if not isinstance(content, dict):
        raise CalibrationError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def _must(path: Path, what: str, expected: object, actual: object) -> None:
    if actual != expected:
        raise CalibrationError(f"{path}: {what}: expected {expected!r}, got {actual!r}")

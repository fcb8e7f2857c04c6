"""What a run leaves behind: one JSON file, written again after each line of the table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from torch_cascade.benchmarks.rows import Ceilings, Floor
from torch_cascade.benchmarks.spread import Spread

OK = "ok"
WRONG = "wrong"
MISSING = "missing"
OUT_OF_MEMORY = "out of memory"
FAILED = "failed"
STATUSES = (OK, WRONG, MISSING, OUT_OF_MEMORY, FAILED)

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "fa3-fwd", "torch-cascade")


@dataclass(frozen=True)
class Result:
    """One engine at one line.

    Attributes:
        status: one of STATUSES; only `ok` has a time.
        reason: what is wrong, where something is.
        time: in the unit of the benchmark.
        details: whatever else was measured, by name.
    """

    status: str
    reason: str | None = None
    time: Spread | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One line of the table: sizes, floor and goal in the benchmark's unit, engines by name."""

    label: str
    floor: float
    goal: float
    work: Floor
    results: dict[str, Result]
    details: dict[str, Any] = field(default_factory=dict)


def line_of(content: dict[str, Any]) -> Line:
    """A line as a file holds it."""
    results = {
        name: Result(**{**each, "time": each["time"] and Spread(**each["time"])})
        for name, each in content["results"].items()
    }
    return Line(**{**content, "work": Floor(**content["work"]), "results": results})


@dataclass
class Record:
    """Everything that a run measured.

    Attributes:
        benchmark: the program.
        unit: of times, `us` or `ms`.
        columns: names of the sizes in a line's label.
        settings: options of the run.
        ceilings: of the machine.
        lines: so far.
        device: the machine, in words.
    """

    benchmark: str
    unit: str
    columns: str
    settings: dict[str, Any]
    ceilings: Ceilings
    device: str
    lines: list[Line] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat("T", "seconds"))

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        content = asdict(self) | {"versions": versions(), "command": command(sys.argv)}
        return {"schema": 1} | content

    def write(self, path: Path) -> None:
        """Write the file whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(self.to_json(), indent=1, default=str) + "\n")
        os.replace(draft, path)


def command(arguments: Sequence[str]) -> str:
    """A command line without folders of the machine that it ran on."""
    named = (Path(a).name if Path(a).is_absolute() else a for a in arguments)
    return shlex.join(named)


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type != "cuda":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    memory = properties.total_memory / 2**30
    return f"{properties.name}, {memory:.0f} GiB, {properties.multi_processor_count} SMs"


def versions() -> dict[str, str]:
    """Versions of what matters, of the packages that are installed."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}


def default_path(benchmark: str, device: torch.device) -> Path:
    """Where results go if nobody says otherwise: benchmark, device and date."""
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    slug = "-".join(name.lower().split())
    today = datetime.now(timezone.utc).date().isoformat()
    return RESULTS / f"{benchmark}-{slug}-{today}.json"


def is_out_of_memory(error: BaseException) -> bool:
    """True also where a compiler wrapped the exception."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError) or "out of memory" in str(seen).lower():
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def fastest(results: dict[str, Result], among: Sequence[str]) -> str | None:
    """The engine of `among` with the least median, None where none was timed."""
    timed = {n: r.time.median for n in among if (r := results.get(n)) and r.time is not None}
    return min(timed, key=lambda name: timed[name]) if timed else None

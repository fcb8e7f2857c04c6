"""Fits figures of the device table to a measured grid: what kernels reach of the peaks.

Example: `python -m torch_cascade.benchmarks.regret_fit regret.json --device H200`. It prints the
figures and the regret before and after; the table is then changed by hand, with its source.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_cascade.benchmarks import record, regret_report, strategies
from torch_cascade.benchmarks.grid import Shape
from torch_cascade.benchmarks.record import Line
from torch_cascade.benchmarks.rules import facts_of
from torch_cascade.compiler.calibration import NOT_MEASURED
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.device_table import GPUS, cpu_device

# Where both ways take about the same time a decision hangs on the model: such shapes count more.
_NEAR = 0.15


@dataclass(frozen=True)
class Sample:
    """A shape and the seconds of both ways."""

    shape: Shape
    plain: float
    cascade: float


def samples(lines: Sequence[Line], device: Device) -> list[Sample]:
    """What there is to fit to."""
    return [
        Sample(shape, 1e-6 * times[strategies.NAIVE], 1e-6 * times[strategies.LEVELS])
        for _, shape, times in regret_report.usable(lines, device)
    ]


def loss(found: Sequence[Sample], device: Device, offset: float) -> float:
    """Mean error of the logarithms of both times, and of their ratio near the frontier.

    Args:
        found: what was measured.
        device: the figures.
        offset: seconds that every call takes beside its kernels.
    """
    total = 0.0
    for each in found:
        facts = facts_of(each.shape, device)
        plain = math.log((facts.plain.seconds + offset) / each.plain)
        cascade = math.log((facts.cascade.seconds + offset) / each.cascade)
        weight = 1 / (_NEAR + abs(math.log(each.plain / each.cascade)))
        parts = (plain, cascade, plain - cascade)
        plain, cascade, ratio = (min(1.0, abs(part)) for part in parts)
        total += plain + cascade + weight * ratio
    return total / len(found)


def fit(
    found: Sequence[Sample], device: Device, names: Sequence[str], steps: int, offset: float = 0.0
) -> tuple[dict[str, float], float]:
    """Figures and an offset with a smaller loss: random steps of one at a time, kept if better."""
    draw = random.Random(0)
    values = {name: device[name] for name in names}
    best = loss(found, device, offset)
    for step in range(steps):
        width = 0.3 if step < steps / 2 else 0.08
        name = draw.choice([*names, *(["offset"] if offset else [])])
        factor = math.exp(draw.gauss(0, width))
        tried = {**values, name: values[name] * factor} if name != "offset" else dict(values)
        moved = offset * factor if name == "offset" else offset
        score = loss(found, device.with_values(tried, "fitted"), moved)
        if score < best:
            best, values, offset = score, tried, moved
    return values, offset


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and print."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("regret_fit", description=about)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", *GPUS])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--offset", type=float, default=0.0, help="seconds, fitted if not 0")
    parser.add_argument("--figures", nargs="+", help="default: all that a calibration measures")
    options = parser.parse_args(arguments)
    device = cpu_device("", 1) if options.device == "cpu" else GPUS[options.device]
    lines = [record.line_of(each) for each in json.loads(options.file.read_text())["lines"]]
    found = samples(lines, device)
    other = {"matmul.float32", "matmul.float16", "matmul.bfloat16", *NOT_MEASURED}
    names = options.figures or [name for name in device.figures if name not in other]
    print(f"before: {_said(lines, device)}, loss {loss(found, device, options.offset):.3f}")
    values, offset = fit(found, device, names, options.steps, options.offset)
    fitted = device.with_values(values, "fitted")
    print(f"after: {_said(lines, fitted)}, loss {loss(found, fitted, offset):.3f}")
    for name, value in values.items():
        print(f"{name}: {device[name]:.4g} -> {value:.4g}")
    return 0


def _said(lines: Sequence[Line], device: Device) -> str:
    found = next(r for r in regret_report.regrets(lines, device) if r.rule == "model")
    worst, label = found.worst
    return f"mean {100 * found.mean:.2f} %, worst {100 * worst:.1f} % at {label}"


if __name__ == "__main__":
    sys.exit(main())

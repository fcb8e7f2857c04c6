"""What rules lose on a measured grid: a table, and a map of decisions over prefix and topk."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from torch_cascade.benchmarks import grid, strategies
from torch_cascade.benchmarks.grid import Shape
from torch_cascade.benchmarks.record import Line, Record
from torch_cascade.benchmarks.rows import Heads
from torch_cascade.benchmarks.rules import RULES
from torch_cascade.compiler.device import Device

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Regret:
    """How much longer than the best strategy a rule's choices take, over all shapes.

    Attributes:
        rule: its name.
        losses: fractions, with the shape's label, largest first.
        cascades: how many shapes it computes as a cascade.
    """

    rule: str
    losses: tuple[tuple[float, str], ...]
    cascades: int

    @property
    def mean(self) -> float:
        """Mean fraction lost."""
        return statistics.fmean(loss for loss, _ in self.losses)

    @property
    def p95(self) -> float:
        """What 95 of 100 shapes do not exceed."""
        return self.losses[len(self.losses) // 20][0]

    @property
    def worst(self) -> tuple[float, str]:
        """The largest fraction, and its shape."""
        return self.losses[0]


def shape_of(line: Line) -> Shape:
    """The sizes of a line."""
    sizes = {k: v for k, v in line.details.items() if k != "heads"}
    return Shape(**sizes, heads=Heads(**line.details["heads"]))


def times_of(line: Line, device: Device) -> dict[str, float]:
    """Microseconds of each strategy that was timed; of a CPU the least, as it is never alone."""
    figure = "least" if device.kind == "cpu" else "median"
    timed = {name: line.results.get(name) for name in strategies.STRATEGIES}
    return {n: getattr(r.time, figure) for n, r in timed.items() if r is not None and r.time}


def usable(lines: Sequence[Line], device: Device) -> Iterator[tuple[Line, Shape, dict[str, float]]]:
    """The lines with a choice to make: something is shared, and both ways were timed."""
    for line in lines:
        shape, times = shape_of(line), times_of(line, device)
        both = strategies.NAIVE in times and strategies.LEVELS in times
        if both and strategies.is_shared(shape):
            yield line, shape, times


def regrets(lines: Sequence[Line], device: Device) -> list[Regret]:
    """The regret of every rule."""
    made = []
    for name, rule in RULES.items():
        losses, cascades = [], 0
        for line, shape, times in usable(lines, device):
            chosen = rule(shape, device)
            cascades += chosen != strategies.NAIVE
            # Where joins were not measured, all levels stand for them.
            taken = times.get(chosen, times[strategies.LEVELS])
            losses.append((taken / min(times.values()) - 1, line.label))
        if losses:
            made.append(Regret(name, tuple(sorted(losses, reverse=True)), cascades))
    return made


def table(found: Sequence[Regret]) -> Table:
    """One row a rule."""
    drawn = Table(box=box.SIMPLE_HEAD)
    for heading in ("rule", "mean", "p95", "worst", f"worst at {grid.COLUMNS}", "cascades"):
        drawn.add_column(heading, justify="left" if "at" in heading else "right", no_wrap=True)
    for each in found:
        worst, label = each.worst
        cells = (_percent(each.mean), _percent(each.p95), _percent(worst))
        drawn.add_row(each.rule, *cells, label, f"{each.cascades} of {len(each.losses)}")
    return drawn


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def summary(found: Sequence[Regret]) -> dict[str, Any]:
    """The table for the JSON file."""
    return {
        each.rule: {
            "mean": each.mean,
            "p95": each.p95,
            "worst": each.worst[0],
            "worst_at": each.worst[1],
            "cascades": each.cascades,
            "shapes": len(each.losses),
        }
        for each in found
    }


def write_map(record: Record, device: Device, path: Path) -> None:
    """Draw and save.

    Raises:
        ImportError: matplotlib is not installed.
    """
    draw_map(record.lines, device).savefig(path, dpi=150)


def draw_map(lines: Sequence[Line], device: Device) -> Figure:
    """Prefix over topk, one panel a number of requests: what is faster, and what we choose."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for axes, requests in zip(panels, (1, 4), strict=True):
        wanted = set(grid.plane(device.kind, requests))
        points = [p for p in usable(lines, device) if p[1] in wanted]
        _panel(axes, points, device)
        axes.set_title(f"{requests} request(s), 16 suffix keys, one new token", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle(f"naive time over cascade time, {device}")
    return figure


def _panel(
    axes: Any, points: Sequence[tuple[Line, Shape, dict[str, float]]], device: Device
) -> None:
    """Coloured by measured ratio; a ring where we cascade, a cross where we do not."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("topk (branches of a request)")
    axes.set_ylabel("prefix, keys")
    for _, shape, times in points:
        ratio = times[strategies.NAIVE] / times[strategies.LEVELS]
        place = (shape.branches, shape.prefix)
        colour = "tab:green" if ratio > 1 else "tab:red"
        marker = "x" if RULES["model"](shape, device) == strategies.NAIVE else "o"
        axes.plot(*place, marker, color=colour, markersize=11, markerfacecolor="none")
        axes.annotate(f"{ratio:.1f}", place, xytext=(8, 5), textcoords="offset points", fontsize=7)
    axes.plot([], [], "o", color="gray", markerfacecolor="none", label="we cascade")
    axes.plot([], [], "x", color="gray", label="we do not")
    axes.plot([], [], "s", color="tab:green", label="the cascade is faster")
    axes.plot([], [], "s", color="tab:red", label="the naive graph is faster")

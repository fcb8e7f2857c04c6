"""A record as a picture: every engine's distance from the floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_cascade.benchmarks.record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(record: Record, engines: Sequence[str], path: Path) -> None:
    """Draw and save; the file's suffix says the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing in the record was timed.
    """
    figure = draw(record, engines)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw(record: Record, engines: Sequence[str]) -> Figure:
    """Times over the floor, one group a line of the record, on a logarithmic axis.

    Args:
        record: what was measured; lines without any time are left out.
        engines: in the order of the legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    lines = [x for x in record.lines if any(r.time is not None for r in x.results.values())]
    if not lines:
        raise ValueError("the record holds no time: nothing to draw")
    figure = Figure(figsize=(9, 1.5 + 0.5 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, name in enumerate(engines):
        points = [
            (result.time.median / line.floor, place)
            for place, line in enumerate(lines)
            if (result := line.results.get(name)) and result.time is not None
        ]
        if points:
            marker = "osD^v<>PX*"[index % 10]
            axes.plot(*zip(*points, strict=True), marker, label=name, alpha=0.8)
    goals = [line.goal / line.floor for line in lines]
    axes.plot(goals, range(len(lines)), "k|", markersize=14, label="goal")
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"times the floor (floor in {record.unit} beside the sizes)")
    axes.set_yticks(range(len(lines)), [f"{x.label}: {x.floor:.3g}" for x in lines])
    axes.set_ylabel(record.columns)
    axes.invert_yaxis()
    axes.set_title(f"{record.benchmark}, {record.device}", fontsize=10)
    axes.grid(axis="x", which="both", alpha=0.2)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure

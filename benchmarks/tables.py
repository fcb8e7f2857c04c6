"""A record as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from torch_cascade.benchmarks.record import OK, WRONG, Line, Record, Result, fastest

if TYPE_CHECKING:
    from rich.console import Console

SHORT = {"out of memory": "no memory", "missing": "-"}


def table(record: Record, engines: Sequence[str], ours: Sequence[str]) -> Table:
    """Lines of the record as rows, engines as columns: time, and times the floor.

    Args:
        record: what was measured.
        engines: columns, in this order.
        ours: those whose goal it is; green where they reach it.
    """
    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column(record.columns, no_wrap=True)
    for name in ("floor", "goal", *engines):
        drawn.add_column(name, justify="right")
    for line in record.lines:
        cells = [cell(line, line.results.get(name), name in ours) for name in engines]
        drawn.add_row(line.label, number(line.floor), number(line.goal), *cells)
    return drawn


def report(
    record: Record,
    engines: Sequence[str],
    ours: Sequence[str],
    rivals: Sequence[str],
    console: Console,
) -> None:
    """Print the table of engines, and what is to be said of ours and of what went wrong."""
    console.print(title(record), markup=False, highlight=False)
    console.print(table(record, engines, ours))
    for text in (*scores(record, ours, rivals, "other engines"), *complaints(record)):
        console.print(text, markup=False, highlight=False)


def summary(line: Line) -> str:
    """The engines' times in one line."""
    timed = {n: r.time.median for n, r in line.results.items() if r.time is not None}
    return ", ".join(f"{name} {number(us)}" for name, us in timed.items())


def title(record: Record) -> str:
    """Device, ceilings and unit in one line."""
    ceilings = record.ceilings
    return (
        f"{record.benchmark} on {record.device}: {record.unit} (times the floor); "
        f"read {ceilings.read / 1e12:.2f} TB/s, matmul {ceilings.matmul / 1e12:.0f} TFLOP/s"
    )


def cell(line: Line, result: Result | None, ours: bool) -> str:
    """Time, ratio to the floor and peak memory where it was measured; or what happened instead.

    `*`: no CUDA graph could be captured, so launches are in the time.
    """
    if result is None:
        return ""
    if result.status != OK or result.time is None:
        said = SHORT.get(result.status, result.status)
        return f"[bold red]{said}[/]" if result.status == WRONG else said
    median = result.time.median
    mark = "" if result.details.get("captured", True) else "*"
    text = f"{number(median)}{mark} ({number(median / line.floor)})"
    if peak := result.details.get("peak_bytes"):
        text += f" {peak / 1e9:.0f} GB"
    if not ours:
        return text
    return f"[{'green' if median <= line.goal else 'yellow'}]{text}[/]"


def number(value: float) -> str:
    """Three figures, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def complaints(record: Record) -> list[str]:
    """One line for each engine that was not timed at some sizes, and why."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for line in record.lines:
        for name, result in line.results.items():
            if result.status != OK:
                key = (name, result.status, result.reason or "")
                said.setdefault(key, []).append(line.label)
            elif not result.details.get("captured", True):
                refusal = str(result.details.get("capture_refusal"))
                said.setdefault((name, "no graph (*)", refusal), []).append(line.label)
    return [
        f"{name}: {status} at {' '.join(labels)}{': ' + reason if reason else ''}"
        for (name, status, reason), labels in said.items()
    ]


def scores(record: Record, ours: Sequence[str], rivals: Sequence[str], called: str) -> list[str]:
    """One line for each engine of ours: where it reaches the goal, where it beats its rivals.

    Args:
        record: what was measured.
        ours: engines to speak of.
        rivals: engines to compare with, at each line with the fastest that was timed.
        called: what the rivals are, in the plural.
    """
    said = []
    for name in ours:
        timed = {
            x.label: (x, r.time.median) for x in record.lines if (r := _ok(x, name)) and r.time
        }
        if not timed:
            continue
        reached = sum(median <= line.goal for line, median in timed.values())
        text = f"{name}: goal reached at {reached} of {len(timed)}"
        factors = [
            (best.median / median, label)
            for label, (line, median) in timed.items()
            if (rival := fastest(line.results, rivals)) and (best := line.results[rival].time)
        ]
        if factors:
            won = sum(factor > 1 for factor, _ in factors)
            least, most = (f"{number(x)} x at {label}" for x, label in (min(factors), max(factors)))
            text += f"; faster than all {called} at {won} of {len(factors)}"
            text += f" (least {least}, most {most})"
        said.append(text)
    return said


def _ok(line: Line, name: str) -> Result | None:
    result = line.results.get(name)
    return result if result is not None and result.status == OK else None

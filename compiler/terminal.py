"""A report for a terminal, with `rich` where it is installed: 80 columns are enough.

It is made from the report's JSON. Elsewhere, and where the output is no terminal, `show` prints the
report's plain text.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any

from torch_cascade.compiler.blend_text import runs
from torch_cascade.compiler.lines import binary, linears_line
from torch_cascade.compiler.page_diff import changes
from torch_cascade.compiler.page_sites import alike_sites, numeric_text, order_of_reasons
from torch_cascade.compiler.price import time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_cascade.compiler.summary import Report

Content = dict[str, Any]


def show(report: Report, *, diff: bool = False, file: IO[str] | None = None) -> None:
    """Print a report.

    Args:
        report: of one compilation or several.
        diff: also what the passes changed in the graphs, with context.
        file: default: standard output.
    """
    out = sys.stdout if file is None else file
    if not out.isatty() or importlib.util.find_spec("rich") is None:
        print(report, file=out)
        if diff and report.diff():
            print(f"\n{report.diff()}", file=out)
        return
    from rich.console import Console

    console = Console(file=out, highlight=False)
    for part in renderables(report, diff=diff):
        console.print(part, soft_wrap=False)


def renderables(report: Report, *, diff: bool = False) -> Iterator[RenderableType]:
    """The report in parts that `rich` prints."""
    import json

    from rich.rule import Rule
    from rich.text import Text

    content = json.loads(report.to_json())
    yield Text(str(report).split("\n\n")[0], style="bold")
    for graph in content["graphs"]:
        if len(content["graphs"]) > 1:
            yield Rule(f"graph {graph['id']}", style="dim")
        if graph["cached"]:
            yield Text(f"The artefact came from Inductor's cache; {graph['origin']}", style="dim")
        yield from _graph(graph)
        if diff and graph["before"] != graph["after"]:
            yield Text("\nWhat changed in the graph", style="bold")
            yield from _diff(graph["before"], graph["after"])


def _graph(graph: Content) -> Iterator[RenderableType]:
    if graph["blend"] is not None:
        yield from _blend(graph["blend"])
    done = [site for site in graph["sites"] if site["rewritten"]]
    for site, count in alike_sites(done):
        yield from _site(site, count)
    left = [site for site in graph["sites"] if not site["rewritten"]]
    for _, group in groupby(sorted(left, key=order_of_reasons), key=order_of_reasons):
        yield from _declined(list(group))
    if graph["linears"] is not None:
        yield _head(linears_line(graph["linears"]), good=True)


def _declined(sites: Sequence[Content]) -> Iterator[RenderableType]:
    from rich.text import Text

    declined = sites[0]["declined"]
    said = Text("\nNot rewritten: ", style="bold")
    said.append(declined["reason"], style="bold red").append(f" ({len(sites)})")
    yield said
    yield _indented(Text(declined["meaning"]), 2)
    if declined["hint"]:
        yield _indented(Text("What you can do: ", style="cyan").append(declined["hint"]), 2)
    for site, count in alike_sites(sites):
        yield from _site(site, count)


def _site(site: Content, count: int) -> Iterator[RenderableType]:
    """A line with the source location, then what was found and decided."""
    from rich.text import Text

    yield _head(site["where"] or f"node {site['node']}", site["rewritten"], count)
    if site["shapes"]:
        yield _indented(Text(f"{site['form']}: {site['shapes']}", style="dim"))
    if site["scores"]:
        yield _indented(Text(f"scores: {site['scores']}"))
    if site["segments"]:
        yield _indented(_segments(site["segments"]))
    if site["decision"] is not None:
        yield from _decision(site["decision"])
    if numeric_text(site):
        yield _indented(Text(numeric_text(site)))
    if site["decision"] is None and site["declined"] is not None and site["declined"]["detail"]:
        yield _indented(Text(site["declined"]["detail"]))


def _head(where: str, good: bool, count: int = 1) -> RenderableType:
    """The mark, the place in bold and the code: "+ 30 x model.py:12  attention(...)"."""
    from rich.text import Text

    place, _, code = where.partition(": ")
    style = "green" if good else "red"
    said = Text("\n+ " if good else "\n- ", style=f"bold {style}")
    said.append(f"{count} x " if count > 1 else "", style="bold").append(place, style="bold")
    return said.append(f"  {code}" if code else "", style="dim")


def _segments(segments: Sequence[Content]) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("keys", "base", "rows", "branches", "mask"):
        table.add_column(name, overflow="fold")
    for segment in segments:
        style = "yellow" if segment["branches"] != "1" else "green"
        table.add_row(*segment.values(), style=style)
    return table


def _decision(decision: Content) -> Iterator[RenderableType]:
    from rich.text import Text

    verb, style = ("applied", "green") if decision["apply"] else ("not applied", "red")
    said = Text(verb, style=f"bold {style}").append(f": {decision['why']}", style="default")
    if decision["naive_bytes"] is not None:
        plain, cascade = decision["naive_bytes"], decision["cascade_bytes"]
        said.append(f"; reads {binary(cascade)} instead of {binary(plain)}", style="default")
    yield _indented(said)
    if decision["guard"]:
        yield _indented(Text(f"guard: {decision['guard']}", style="magenta"))
    if decision["costs"] is not None:
        yield from _costs(decision["costs"])


def _costs(costs: Content) -> Iterator[RenderableType]:
    """Break-even, the time of each way as the sum of its kernels, and the numbers put in."""
    from rich.text import Text

    turns = costs["break_even"]
    ends = [f"a prefix of {turns['prefix']} keys"] if turns.get("prefix") is not None else []
    ends += [f"{turns['branches']} branches"] if turns.get("branches") is not None else []
    yield _indented(Text(f"breaks even at {' or '.join(ends) or 'no size'}; {costs['device']}"))
    for name, seconds in costs["seconds"].items():
        yield _indented(Text(f"{name} ", style="bold").append(time_text(seconds), style="cyan"))
        for line in costs["formulas"][name]:
            yield _indented(Text(line), 6)
    numbers = (f"{symbol} = {number}" for symbol, number in costs["numbers"].items())
    yield _indented(Text(f"with {', '.join(numbers)}", style="dim"))


def _blend(blend: Content) -> Iterator[RenderableType]:
    from rich.text import Text

    yield _head(blend["where"] or f"node {blend['node']}", blend["declined"] is None)
    used, layers = blend["reused"], len(blend["layers"])
    yield _indented(Text(f"cached keys and values: {used} of {layers} layers reuse them"))
    if blend["declined"] is None:
        yield _indented(Text("; ".join(runs(tuple(blend["layers"])))))
    for stage in blend["stages"] if blend["declined"] is None else []:
        where = "before all" if stage["layer"] < 0 else f"from layer {stage['layer']} on"
        share = f"{stage['ratio']} of the cached, chosen by {blend['selector']}"
        yield _indented(Text(f"{where}: {stage['rows']} of {blend['tokens']} tokens; {share}"))
    if blend["decision"] is not None:
        yield from _decision(blend["decision"])
    if blend["declined"] is not None:
        said = Text(blend["declined"]["reason"], style="bold red")
        yield _indented(said.append(f": {blend['declined']['meaning']}", style="default"))
        yield _indented(Text("What you can do: ", style="cyan").append(blend["declined"]["hint"]))


def _diff(before: str, after: str) -> Iterator[RenderableType]:
    """Every kind of change once, with context, as `diff` marks it."""
    from rich.text import Text

    for rows, count in changes(before, after):
        yield Text(f"@@ alike in {count} places" if count > 1 else "@@", style="cyan")
        for changed, left, right in rows:
            if not changed:
                yield Text(f"  {left}", style="dim")
            if changed and left:
                yield Text(f"- {left}", style="red")
            if changed and right:
                yield Text(f"+ {right}", style="green")


def _indented(content: RenderableType, by: int = 4) -> RenderableType:
    from rich.padding import Padding

    return Padding(content, (0, 0, 0, by))

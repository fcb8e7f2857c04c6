"""Lines that sections of a report share."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from torch_cascade.compiler.decide import Decision, Facts
from torch_cascade.compiler.price import time_text
from torch_cascade.compiler.report import EXPLANATIONS, Declined

WIDTH = 100


def decision_lines(decision: Decision) -> Iterator[str]:
    """What was decided, on what grounds, and the guard that it left."""
    verb = "applied" if decision.apply else "not applied"
    yield f"{verb}: {decision.why}{_times_of(decision.facts)}{_bytes_of(decision)}"
    if decision.guard:
        yield f"guard: {decision.guard}"
    if decision.facts is not None:
        yield _turning(decision.break_even or {})
        yield from _formulas(decision.facts)


def _times_of(facts: Facts | None) -> str:
    if facts is None:
        return ""
    times = (f"{name} {time_text(way.seconds)}" for name, way in facts.ways().items())
    return f": {', '.join(times)}, {facts.margin:.2g} x, on {facts.device}"


def _turning(break_even: Mapping[str, int | None]) -> str:
    """Where the decision turns, if the other sizes stay."""
    prefix, branches = break_even.get("prefix"), break_even.get("branches")
    turns = [f"a prefix of {prefix} keys"] if prefix is not None else []
    turns += [f"{branches} branches"] if branches is not None else []
    said = " or ".join(turns) or "no length of the prefix and no number of branches"
    return f"breaks even at {said}"


def _formulas(facts: Facts) -> Iterator[str]:
    """Each way as the sum of its kernels, and the numbers that were put in."""
    numbers: dict[str, str] = {}
    for name, way in facts.ways().items():
        numbers |= way.numbers()
        yield from (f"{name}, {line}" for line in way.lines())
    yield "with " + ", ".join(f"{symbol} = {number}" for symbol, number in numbers.items())


def _bytes_of(decision: Decision) -> str:
    naive, cascade = decision.naive, decision.cascade
    if naive is None or cascade is None:
        return ""
    ratio = f", {naive / cascade:.1f} x" if cascade else ""
    return f" (naive {binary(naive)}, cascade {binary(cascade)}{ratio})"


def binary(count: int) -> str:
    """Bytes in the unit that leaves at most four digits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def refusal_lines(declined: Declined) -> Iterator[str]:
    """What was found; a hint only where it says more than the reason does."""
    if declined.detail:
        yield declined.detail
    if declined.hint and declined.hint != EXPLANATIONS[declined.reason].remedy:
        yield f"hint: {declined.hint}"


def wrapped(line: str, lead: str = "") -> str:
    """At most 100 columns, unless a name is longer."""
    return textwrap.fill(
        line,
        WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * (len(lead) + 2 * bool(lead)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def linears_line(linears: Mapping[str, int]) -> str:
    """What became of linear layers, by the names of `compiler.record.LinearsRecord`."""
    joined, launches, kept = (linears[name] for name in ("joined", "launches", "kept"))
    return f"linear layers: {joined} in {launches} launches, {kept} left to Inductor"

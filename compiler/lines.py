"""Lines that sections of a report share."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from torch_cascade.compiler.cost import Decision
from torch_cascade.compiler.report import EXPLANATIONS, Declined

WIDTH = 100


def decision_lines(decision: Decision) -> Iterator[str]:
    """What was decided, and the guard that it left."""
    verb = "applied" if decision.apply else "not applied"
    yield f"{verb}: {decision.why}{_bytes_of(decision)}"
    if decision.guard:
        yield f"guard: {decision.guard}"


def _bytes_of(decision: Decision) -> str:
    naive, cascade = decision.naive, decision.cascade
    if naive is None or cascade is None:
        return ""
    ratio = f", {naive / cascade:.1f} x" if cascade else ""
    return f" (naive {_binary(naive)}, cascade {_binary(cascade)}{ratio})"


def _binary(count: int) -> str:
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

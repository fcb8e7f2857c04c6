"""The records of a compilation in torch's structured trace, where `tlparse` shows them.

With `TORCH_TRACE=folder` torch writes what it compiles to a log that `tlparse` turns into pages.
Beside torch's own artefacts each compilation then has:

    cascade_graph_before    the functional graph before the passes that rewrite it
    cascade_graph_after     after them
    cascade_graph_lowered   after all passes
    cascade_report          the report of this graph as text
    cascade_report_json     the same as JSON (`compiler.summary`)

Nothing is made if nobody listens: torch asks for a payload only then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from torch_cascade.compiler.graph import show
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.summary import Report


def trace_graph(state: str, graph: fx.Graph) -> None:
    """Trace a graph that is "before" the passes, "after" one that rewrites it, or "lowered"."""
    if state:
        _emit(f"cascade_graph_{state}", "string", lambda: show(graph, renamed=False))


def trace_report(record: Compilation) -> None:
    """Trace the report of a compilation that has ended."""
    report = Report((record,))
    _emit("cascade_report", "string", lambda: str(report))
    _emit("cascade_report_json", "json", report.to_json)


def _emit(name: str, encoding: str, payload: Callable[[], str]) -> None:
    emit = _trace_structured()
    if emit is not None:
        emit("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def _trace_structured() -> Any:
    """Torch's function; it stands in a private module, so None where it is gone."""
    from torch._logging import _internal

    return getattr(_internal, "trace_structured", None)

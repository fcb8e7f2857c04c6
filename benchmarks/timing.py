"""Timing on a CUDA device: cold L2, graph replay, engines in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLUSHES = ("read", "write", "none")
FLUSH_BYTES = 512 * 2**20
WARM_UP = 3

Events = tuple[torch.cuda.Event, torch.cuda.Event]
Output = Tensor | Sequence[Tensor]


class Flush:
    """Empties L2 of what an engine reads, and keeps the device busy while a replay is queued.

    After a read L2 holds clean lines; after a write they are dirty and have to be written back
    during what is timed, which costs some microseconds that no engine is to blame for.
    """

    def __init__(self, kind: str, device: torch.device, size: int = FLUSH_BYTES) -> None:
        """Allocate what is read or written: `kind` is one of FLUSHES, `size` in bytes."""
        self.kind = kind
        self._buffer = torch.ones(0 if kind == "none" else size // 4, device=device)
        self._sum = torch.empty((), device=device)

    def __call__(self) -> None:
        """Read or write the buffer once."""
        if self.kind == "read":
            torch.sum(self._buffer, dim=0, out=self._sum)
        elif self.kind == "write":
            self._buffer.fill_(1.0)


@dataclass(frozen=True)
class Prepared:
    """Something ready to be timed.

    Attributes:
        run: replays the graph, or calls the function where no graph could be captured.
        output: what the replay writes; None where there is no graph.
        refusal: why there is no graph, else None.
        keeps: what has to stay allocated: a graph knows the addresses of its inputs only.
    """

    run: Callable[[], object]
    output: Output | None
    refusal: str | None = None
    keeps: object = None


def prepare(call: Callable[[], Output]) -> Prepared:
    """Warm a function up and capture it as a CUDA graph.

    A function that cannot be captured (it waits for the device, say) is timed as it is called;
    `refusal` then says why, and tables mark it.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            output = call()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        torch.cuda.synchronize()
        return Prepared(call, None, first_line(error))
    return Prepared(graph.replay, output, keeps=call)


def interleaved(
    prepared: Mapping[str, Prepared], flush: Flush, repeat: int
) -> dict[str, list[float]]:
    """Time each once in every round; rounds start with another one each time.

    Returns:
        Microseconds by name, `repeat` of them each.
    """
    names = list(prepared)
    events: dict[str, list[Events]] = {name: [] for name in names}
    for name in names * WARM_UP:
        prepared[name].run()
    torch.cuda.synchronize()
    collecting = gc.isenabled()
    gc.disable()  # a collection between two records would be timed
    try:
        for turn in range(repeat):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                flush()
                events[name].append(between_events(prepared[name].run))
            torch.cuda.synchronize()
    finally:
        if collecting:
            gc.enable()
    return {
        name: [begin.elapsed_time(end) * 1e3 for begin, end in pairs]
        for name, pairs in events.items()
    }


def between_events(run: Callable[[], object]) -> Events:
    """Call between two timing events; `elapsed_time` of them is in milliseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    return begin, end


def first_line(error: BaseException) -> str:
    """An exception's type and the first line that it says, with the cause that it announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[: 2 if lines and lines[0].endswith(":") else 1]
    return ": ".join([type(error).__name__, " ".join(said)]) if said else type(error).__name__

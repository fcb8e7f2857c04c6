"""One attention over a shared prefix: ours and others, against the floor.

Example: `python -m torch_cascade.benchmarks.attention --rows 4,4,2000,5,5 --engines kernel`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_cascade.benchmarks import (
    check,
    inputs,
    memory,
    peers,
    plots,
    record,
    rows,
    tables,
    timing,
)
from torch_cascade.benchmarks.inputs import Inputs
from torch_cascade.benchmarks.record import Line, Record, Result
from torch_cascade.benchmarks.spread import Spread

OURS = tuple(peer.name for peer in peers.PEERS if peer.ours)
RIVALS = tuple(peer.name for peer in peers.PEERS if not peer.ours)
DTYPE = torch.bfloat16


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("attention", description=(__doc__ or "").partition("\n")[0])
    made.add_argument(
        "--rows",
        type=rows.parse_row,
        nargs="+",
        default=rows.DEFAULT_ROWS,
        metavar="B,T,L,S,X",
        help="requests, branches, prefix, queries a branch, suffix keys a branch",
    )
    made.add_argument("--engines", metavar="A,B", help=f"some of {', '.join(peers.NAMES)}")
    made.add_argument("--repeat", type=int, default=30, help="timings of each (default: 30)")
    made.add_argument("--flush", choices=timing.FLUSHES, default="read", help="how L2 is emptied")
    made.add_argument("--seconds", type=float, help="start no new row after so many")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    made.add_argument("--no-plot", action="store_true", help="draw nothing beside the JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0, 1 where an engine of ours is wrong, 2 for usage."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        options.engines = rows.choose(peers.NAMES, options.engines, peers.NAMES)
    except argparse.ArgumentTypeError as error:
        made.error(f"argument --engines: {error}")
    if options.repeat < 1:
        made.error(f"argument --repeat: must be at least 1, got {options.repeat}")
    device = cuda_device()
    if device is None:
        print("this benchmark times CUDA graphs: it needs a CUDA device", file=sys.stderr)
        return 2
    return _run(options, device)


def cuda_device() -> torch.device | None:
    """The current CUDA device, if there is one."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _run(options: argparse.Namespace, device: torch.device) -> int:
    from rich.console import Console

    from torch_cascade.benchmarks import ceilings

    made = Record(
        "attention",
        "us",
        "B,T,L,S,X",
        _settings(options),
        ceilings.measure(device, DTYPE),
        record.describe(device),
    )
    path = options.json or record.default_path("attention", device)
    console = Console(width=max(160, Console().width))
    began = time.monotonic()
    with torch.no_grad():
        for row in options.rows:
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                console.print(f"out of time: {row} and what follows were not measured")
                break
            made.lines.append(measure_row(row, made, options, device))
            made.write(path)
            console.print(f"{row}: {_summary(made.lines[-1])}", highlight=False)
    console.print(tables.title(made), markup=False, highlight=False)
    console.print(tables.table(made, options.engines, OURS))
    for text in (*tables.scores(made, OURS, RIVALS, "other engines"), *tables.complaints(made)):
        console.print(text, markup=False, highlight=False)
    if not options.no_plot and any(r.time for line in made.lines for r in line.results.values()):
        plots.write(made, options.engines, path.with_suffix(".png"))
    console.print(f"written: {path}", highlight=False)
    ours = [r for line in made.lines for name, r in line.results.items() if name in OURS]
    return 1 if any(r.status in (record.WRONG, record.FAILED) for r in ours) else 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "repeat": options.repeat,
        "flush": options.flush,
        "flush_bytes": timing.FLUSH_BYTES,
        "seed": options.seed,
        "dtype": str(DTYPE),
        "heads": vars(rows.Heads()),
        "interleaved": True,
    }


def _summary(line: Line) -> str:
    timed = {n: r.time.median for n, r in line.results.items() if r.time is not None}
    return ", ".join(f"{name} {tables.number(us)}" for name, us in timed.items())


def measure_row(
    row: rows.Row, made: Record, options: argparse.Namespace, device: torch.device
) -> Line:
    """Check every engine at these sizes, then time those that are right, in turn."""
    heads = rows.Heads()
    floor = rows.floor(row, heads, made.ceilings)
    plain = inputs.draw(row, heads, device, DTYPE, options.seed)
    results, prepared = prepare(options.engines, plain, device)
    flush = timing.Flush(options.flush, device)
    times = timing.interleaved(prepared, flush, options.repeat) if prepared else {}
    for name, values in times.items():
        refusal = prepared[name].refusal
        details = {"captured": refusal is None, "capture_refusal": refusal}
        details |= results[name].details
        results[name] = Result(record.OK, time=Spread.of(values), details=details)
    prepared.clear()
    memory.forget_compiled()
    us = 1e6 * floor.seconds
    return Line(str(row), us, rows.goal_us(us), floor, results, details=vars(row))


def prepare(
    names: Sequence[str], plain: Inputs, device: torch.device
) -> tuple[dict[str, Result], dict[str, timing.Prepared]]:
    """Check engines on plain inputs and on needles, and get the right ones ready to be timed.

    Returns:
        A result for every engine, and those to time; their results lack only the time.
    """
    cases = [Case(plain), Case(inputs.with_needles(plain))]
    results: dict[str, Result] = {}
    prepared: dict[str, timing.Prepared] = {}
    for peer in (peer for peer in peers.PEERS if peer.name in names):
        if reason := peer.missing(device):
            results[peer.name] = Result(record.MISSING, reason)
            continue
        try:
            results[peer.name] = verdict(peer, cases)
            if results[peer.name].status == record.OK:
                prepared[peer.name] = timing.prepare(peer.make(plain))
                results[peer.name] = replayed(prepared[peer.name], cases[0], results[peer.name])
        except Exception as error:  # anything that others' packages raise
            status = record.OUT_OF_MEMORY if record.is_out_of_memory(error) else record.FAILED
            results[peer.name] = Result(status, timing.first_line(error))
            error.__traceback__ = None  # it would hold tensors
        if results[peer.name].status != record.OK:
            prepared.pop(peer.name, None)
        memory.release()
    return results, prepared


class Case:
    """Inputs with what the results are judged by: float64, and eager code in the same dtype."""

    def __init__(self, given: Inputs) -> None:
        """Compute both references."""
        self.inputs = given
        self.reference = inputs.reference(given)
        self.eager: Tensor = peers.naive(*given.tensors())

    def judge(self, result: Tensor) -> check.Verdict:
        """An engine's output."""
        return check.judge(result, self.eager, self.reference)


def verdict(peer: peers.Peer, cases: Sequence[Case]) -> Result:
    """Whether an engine computes all cases right."""
    verdicts = [case.judge(peer.make(case.inputs)()) for case in cases]
    details = {"verdicts": [vars(v) for v in verdicts]}
    wrong = [v.complaint() for v in verdicts if not v.right]
    if wrong:
        return Result(record.WRONG, wrong[0], details=details)
    return Result(record.OK, details=details)


def replayed(ready: timing.Prepared, case: Case, found: Result) -> Result:
    """`found`, unless what is going to be timed leaves something unwritten or wrong."""
    if ready.output is None:
        return found
    ready.output.fill_(float("nan"))
    ready.run()
    judged = case.judge(ready.output)
    if judged.right:
        return found
    return Result(record.WRONG, f"replayed graph: {judged.complaint()}", details=found.details)


if __name__ == "__main__":
    sys.exit(main())

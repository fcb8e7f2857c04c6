"""Engines at one row of sizes: checked, captured, and timed in turn."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from torch_cascade.benchmarks import check, inputs, memory, peers, record, rows, timing
from torch_cascade.benchmarks.inputs import Inputs
from torch_cascade.benchmarks.record import Line, Record, Result
from torch_cascade.benchmarks.spread import Spread

DTYPE = torch.bfloat16

Given = TypeVar("Given")


class Judge(Protocol[Given]):
    """Inputs, and what an engine's results for them are judged by."""

    inputs: Given

    def judge(self, result: Any) -> check.Verdict:
        """What an engine returned."""


def measure_row(
    engines: Sequence[peers.Peer[Inputs]],
    row: rows.Row,
    made: Record,
    options: argparse.Namespace,
    device: torch.device,
) -> Line:
    """Check every engine at these sizes, then time those that are right, in turn."""
    heads = rows.Heads()
    floor = rows.floor(row, heads, made.ceilings)
    plain = inputs.draw(row, heads, device, DTYPE, options.seed)
    results, prepared = prepare(engines, cases(plain), device)
    return line(row, floor, timed(results, prepared, options, device))


def timed(
    results: Mapping[str, Result],
    prepared: dict[str, timing.Prepared],
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Result]:
    """The results of `prepare` with times; what was prepared is let go."""
    flush = timing.Flush(options.flush, device)
    times = timing.interleaved(prepared, flush, options.repeat) if prepared else {}
    found = dict(results)
    for name, values in times.items():
        refusal = prepared[name].refusal
        details = {"captured": refusal is None, "capture_refusal": refusal}
        details |= results[name].details
        found[name] = Result(record.OK, time=Spread.of(values), details=details)
    prepared.clear()
    memory.forget_compiled()
    return found


def line(row: object, floor: rows.Floor, results: dict[str, Result]) -> Line:
    """The line of a row, a dataclass whose text is the label."""
    us = 1e6 * floor.seconds
    return Line(str(row), us, rows.goal_us(us), floor, results, details=vars(row))


def prepare(
    engines: Sequence[peers.Peer[Given]], cases: Sequence[Judge[Given]], device: torch.device
) -> tuple[dict[str, Result], dict[str, timing.Prepared]]:
    """Check engines on all cases, and get the right ones ready to be timed on the first.

    Returns:
        A result for every engine, and those to time; their results lack only the time.
    """
    results: dict[str, Result] = {}
    prepared: dict[str, timing.Prepared] = {}
    for peer in engines:
        if reason := peer.missing(device):
            results[peer.name] = Result(record.MISSING, reason)
            continue
        try:
            results[peer.name] = verdict(peer, cases)
            if results[peer.name].status == record.OK:
                prepared[peer.name] = timing.prepare(peer.make(cases[0].inputs))
                results[peer.name] = replayed(prepared[peer.name], cases[0], results[peer.name])
        except Exception as error:  # anything that others' packages raise
            status = record.OUT_OF_MEMORY if record.is_out_of_memory(error) else record.FAILED
            results[peer.name] = Result(status, timing.first_line(error))
            error.__traceback__ = None  # it would hold tensors
        if results[peer.name].status != record.OK:
            prepared.pop(peer.name, None)
        memory.release()
    return results, prepared


def cases(plain: Inputs) -> list[Case]:
    """Plain inputs, and the same with needles."""
    return [Case(plain), Case(inputs.with_needles(plain))]


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


def verdict(peer: peers.Peer[Given], cases: Sequence[Judge[Given]]) -> Result:
    """Whether an engine computes all cases right."""
    verdicts = [case.judge(peer.make(case.inputs)()) for case in cases]
    details = {"verdicts": [vars(v) for v in verdicts]}
    wrong = [v.complaint() for v in verdicts if not v.right]
    if wrong:
        return Result(record.WRONG, wrong[0], details=details)
    return Result(record.OK, details=details)


def replayed(ready: timing.Prepared, case: Judge[Any], found: Result) -> Result:
    """`found`, unless what is going to be timed leaves something unwritten or wrong."""
    if ready.output is None:
        return found
    for output in [ready.output] if isinstance(ready.output, Tensor) else ready.output:
        output.fill_(float("nan"))
    ready.run()
    judged = case.judge(ready.output)
    if judged.right:
        return found
    return Result(record.WRONG, f"replayed graph: {judged.complaint()}", details=found.details)

"""Measures every strategy of a shape: checked against sampled rows in float64, then in turn."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cascade.benchmarks import ceilings, check, memory, record, strategies, timing, tune
from torch_cascade.benchmarks.contest import DTYPE
from torch_cascade.benchmarks.grid import Shape
from torch_cascade.benchmarks.record import Line, Result
from torch_cascade.benchmarks.rows import Ceilings, Floor
from torch_cascade.benchmarks.spread import Spread
from torch_cascade.benchmarks.strategies import Call, Inputs

CHECKED = strategies.STRATEGIES
SAMPLED = 64  # query rows that are computed in float64
COMPILED = {"compiled naive": ("inductor", None), "compiled cascade": ("cascade", "always")}
CPU_FLUSH_BYTES = 64 * 2**20
_CPU_MATMUL = 1024


def ceilings_of(device: torch.device) -> Ceilings:
    """What the machine reaches."""
    if device.type == "cuda":
        return ceilings.measure(device, DTYPE)
    buffer, square = torch.ones(2**26), torch.randn(_CPU_MATMUL, _CPU_MATMUL)
    reading = min(_seconds(buffer.sum) for _ in range(5))
    product = min(_seconds(lambda: square @ square) for _ in range(5))
    return Ceilings(buffer.nbytes / reading, 2 * _CPU_MATMUL**3 / product)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Measurement:
    """Measures shapes.

    Attributes:
        ceilings: of the machine.
        options: of the command line.
        device: where.
    """

    ceilings: Ceilings
    options: argparse.Namespace
    device: torch.device

    def lines(self, shapes: Sequence[Shape], cross_check: int) -> Iterator[Line]:
        """One line a shape; the first `cross_check` are compiled, too."""
        dtype = DTYPE if self.device.type == "cuda" else torch.float32
        drawn = [strategies.draw(shape, self.device, dtype) for shape in shapes]
        calls = [self._calls(inputs, i < cross_check) for i, inputs in enumerate(drawn)]
        if self.device.type == "cuda" and self.options.jobs > 1:
            every = [call for each in calls for name, call in each.items() if name not in COMPILED]
            tune.compile_all(every, self.options.jobs, self.device)
        for inputs, each in zip(drawn, calls, strict=True):
            yield self._line(inputs, each)
        memory.forget_compiled()

    def _calls(self, inputs: Inputs, cross_check: bool) -> dict[str, Call]:
        if self.device.type == "cpu":
            return strategies.cpu_calls(inputs)
        calls = strategies.gpu_calls(inputs)
        if cross_check:
            for name, (backend, decide) in COMPILED.items():
                options = {"decide": decide, "strict": True} if decide else None
                calls[name] = strategies.compiled(inputs, backend, options)
        return calls

    def _line(self, inputs: Inputs, calls: Mapping[str, Call]) -> Line:
        results: dict[str, Result] = {}
        ready: dict[str, Call] = {}
        for name, call in calls.items():
            try:
                results[name] = checked(inputs, name, call, calls[strategies.NAIVE])
            except Exception as error:  # anything that a compiler raises
                status = record.OUT_OF_MEMORY if record.is_out_of_memory(error) else record.FAILED
                results[name] = Result(status, timing.first_line(error))
                error.__traceback__ = None  # it would hold tensors
            if results[name].status == record.OK:
                ready[name] = call
        for name, (values, captured) in self._times(ready).items():
            details = results[name].details | {"captured": captured}
            results[name] = Result(record.OK, time=Spread.of(values), details=details)
        shape = inputs.shape
        moved = shape.root + shape.requests * shape.prefix + shape.batch * shape.suffix
        floor = Floor.of(moved * shape.token, shape.flops, self.ceilings)
        us = 1e6 * floor.seconds
        return Line(str(shape), us, us, floor, results, vars(shape) | {"heads": vars(shape.heads)})

    def _times(self, calls: Mapping[str, Call]) -> dict[str, tuple[list[float], bool]]:
        """Microseconds of each, and whether a graph was replayed."""
        if self.device.type == "cpu":
            times = cpu_times(calls, self.options.repeat)
            return {name: (values, False) for name, values in times.items()}
        prepared = {name: timing.prepare(call) for name, call in calls.items()}
        flush = timing.Flush("read", self.device)
        found = timing.interleaved(prepared, flush, self.options.repeat) if prepared else {}
        return {name: (us, prepared[name].refusal is None) for name, us in found.items()}


def cpu_times(calls: Mapping[str, Call], repeat: int) -> dict[str, list[float]]:
    """Microseconds of each, in turn, after the caches were emptied by reading something else."""
    buffer = torch.ones(CPU_FLUSH_BYTES // 4)
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(repeat):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                buffer.sum()
                times[name].append(1e6 * _seconds(calls[name]))
    finally:
        if collecting:
            gc.enable()
    return times


def checked(inputs: Inputs, name: str, call: Call, eager: Call) -> Result:
    """Whether sampled rows of a strategy are right; the parts of one are taken as they are."""
    out = call()
    if name.startswith("part:"):
        return Result(record.OK)
    picked = sample(inputs)
    verdict = check.judge(picked(out), picked(eager()), reference(inputs, picked))
    details = {"verdict": vars(verdict)}
    if not verdict.right:
        return Result(record.WRONG, verdict.complaint(), details=details)
    return Result(record.OK, details=details)


@dataclass(frozen=True)
class Sample:
    """Some query rows of [N, Hq, S, D]: places of each."""

    n: Tensor
    h: Tensor
    m: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, D] of x."""
        return x[self.n, self.h, self.m]


def sample(inputs: Inputs) -> Sample:
    """Rows all over the batch, the last among them."""
    sizes = inputs.q.shape[:3]
    total = sizes.numel()
    places = torch.linspace(0, total - 1, min(SAMPLED, total), device=inputs.q.device).long()
    inner = sizes[1] * sizes[2]
    return Sample(places // inner, places // sizes[2] % sizes[1], places % sizes[2])


def reference(inputs: Inputs, picked: Sample) -> Tensor:
    """The attention of sampled rows in float64, one row at a time."""
    shape = inputs.shape
    group = shape.heads.query // shape.heads.kv
    rows = zip(picked.n.tolist(), picked.h.tolist(), picked.m.tolist(), strict=True)
    return torch.stack([_row(inputs, n, h, m, group) for n, h, m in rows])


def _row(inputs: Inputs, n: int, h: int, m: int, group: int) -> Tensor:
    at = ((inputs.root, 0), (inputs.prefix, n // inputs.shape.branches), (inputs.suffix, n))
    k, v = (torch.cat([kv[i][row, h // group] for kv, row in at]).double() for i in (0, 1))
    q = inputs.q[n, h, m].double()
    return torch.softmax(k @ q / q.shape[0] ** 0.5, 0) @ v

"""Running programs: compile with a backend, compare with eager and float64, judge the rewrites."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

from .capture import boxed
from .program_draw import programs, random_program
from .program_rules import expectation, valid
from .program_source import emit, reference_text, text
from .program_spec import Mask, Program, Segment, Sizes
from .program_values import arguments, widened
from .tolerance import assert_close_to_reference

__all__ = [
    "Fault",
    "Mask",
    "Outcome",
    "Program",
    "Segment",
    "Sizes",
    "arguments",
    "expectation",
    "plain",
    "programs",
    "random_program",
    "report",
    "run_program",
    "text",
    "valid",
]

Backend: TypeAlias = "str | Callable[..., Any]"


@dataclass(frozen=True)
class Outcome:
    """What the passes did with a program, over all compiles of all its calls."""

    sites: int
    rewritten: int
    declined: dict[str, int]


class Fault(AssertionError):
    """A program that went wrong; `kind` groups faults in tables and guides shrinking."""

    def __init__(self, kind: str, program: Program, detail: str) -> None:
        super().__init__(f"{kind}: {detail}\n\n{report(program)}")
        self.kind = kind
        self.program = program
        self.detail = detail

    def __reduce__(self) -> tuple[type[Fault], tuple[str, Program, str]]:
        return type(self), (self.kind, self.program, self.detail)


def run_program(program: Program, backend: Backend, expect: bool = True) -> Outcome:
    """Run all calls of a program through one compiled function and check every promise.

    Args:
        program: a valid program.
        backend: what `torch.compile` takes.
        expect: also judge the number of rewrites; off for backends that rewrite nothing.

    Raises:
        Fault: a wrong value, dtype, stride, mutation, or a rewrite owed or forbidden.
    """
    torch._dynamo.reset()
    counters["cascade"].clear()
    compiled = torch.compile(
        function(program), backend=backend, dynamic=program.dynamic, fullgraph=True
    )
    with torch.no_grad():
        for call in range(len(program.calls)):
            _check_call(program, compiled, call)
    outcome = _outcome()
    if expect:
        _check_rewrites(program, outcome)
    return outcome


def plain(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """The backend to compare with: Inductor up to code generation, with none of our passes."""
    return compile_fx(gm, inputs, inner_compile=boxed)


def function(program: Program, source: str | None = None) -> Callable[..., Any]:
    """The function of a program; its text is known to `linecache`, so traces show the lines."""
    source = source or text(program)
    name = f"<program {program.seed}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict[str, Any] = {}
    exec(compile(source, name, "exec"), scope)
    result: Callable[..., Any] = scope["fn"]
    return result


def report(program: Program) -> str:
    """A runnable script of the program (with plain random inputs) and the exact program."""
    lines = [text(program), "", "", "torch.manual_seed(0)", "calls = ["]
    for call in range(len(program.calls)):
        built = [_constructor(x) for x in arguments(program, call)]
        lines += ["    (", *(f"        {b}," for b in built), "    ),"]
    names = [i.name for i in emit(program, program.calls[0]).inputs]
    lines += [
        "]",
        f"# inputs: {', '.join(names)}",
        f"compiled = torch.compile(fn, backend='cascade', dynamic={program.dynamic})",
        "with torch.no_grad():",
        "    for call in calls:",
        "        print(fn(*call), compiled(*call))",
        "",
        f"# exact values: run_program({program!r}, backend)",
    ]
    return "\n".join(lines)


def _constructor(x: torch.Tensor | int) -> str:
    """Text that builds a tensor of the same shape, strides and dtype; small integers exactly."""
    if isinstance(x, int):
        return str(x)
    if x.dtype == torch.int64 and x.dim() == 1:
        return f"torch.tensor({x.tolist()}, dtype=torch.int64)"
    if x.dtype == torch.int64:
        return f"torch.tensor({x.tolist()})"
    reach = sum((s - 1) * stride for s, stride in zip(x.shape, x.stride(), strict=True))
    size = x.storage_offset() + 1 + reach if x.numel() else 1
    flat = f"torch.randn({size}).to({x.dtype})"
    if x.dtype == torch.bool:
        flat = f"(torch.rand({size}) < 0.7)"
    return f"{flat}.as_strided({tuple(x.shape)}, {x.stride()}, {x.storage_offset()})"


def _check_call(program: Program, compiled: Callable[..., Any], call: int) -> None:
    sizes = program.calls[call]
    inputs, compiled_inputs = arguments(program, call), arguments(program, call)
    expected = _tuple(function(program, text(program, sizes))(*inputs))
    reference = function(program, reference_text(program, sizes))
    exact = _tuple(reference(*widened(arguments(program, call))))
    try:
        actual = _tuple(compiled(*compiled_inputs))
    except Exception as error:
        raise Fault("error", program, f"call {call}: {type(error).__name__}: {error}") from error
    if len(actual) != len(expected):
        raise Fault("outputs", program, f"call {call}: {len(actual)} for {len(expected)} outputs")
    for index, triple in enumerate(zip(actual, expected, exact, strict=True)):
        try:
            _check_output(program, f"call {call}, output {index}", index, *triple)
        except Fault as fault:
            if not _inductors_own(fault, call, index, triple[0]):
                raise
    for index, (x, y) in enumerate(zip(compiled_inputs, inputs, strict=True)):
        if isinstance(x, torch.Tensor) and not torch.equal(x, y):
            raise Fault("mutation", program, f"call {call}: argument {index} differs after it")


def _inductors_own(fault: Fault, call: int, index: int, actual: torch.Tensor) -> bool:
    """Inductor without this package's passes answers the same.

    Its attention patterns are not always right; and where code generation is left out, which gives
    every output the strides it was traced with, the strides of what they put in its place show.
    """
    torch._dynamo.reset()
    program = fault.program
    theirs = torch.compile(function(program), backend=plain, dynamic=program.dynamic)
    output = _tuple(theirs(*arguments(program, call)))[index]
    if fault.kind == "strides":
        return _strides(output) == _strides(actual)
    return fault.kind in ("value", "nan") and torch.equal(output.nan_to_num(), actual.nan_to_num())


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides that matter: of dims with more than one element, in tensors that have any."""
    if x.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def _check_output(
    program: Program,
    where: str,
    index: int,
    actual: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
) -> None:
    if actual.dtype != eager.dtype or actual.shape != eager.shape:
        found = f"{actual.dtype} {tuple(actual.shape)}"
        raise Fault("form", program, f"{where}: {found} for {eager.dtype} {tuple(eager.shape)}")
    if _strides(actual) != _strides(eager):
        raise Fault("strides", program, f"{where}: {actual.stride()} for {eager.stride()}")
    if not torch.equal(actual.isnan(), eager.isnan()):
        raise Fault("nan", program, f"{where}: {actual.isnan().sum()} for {eager.isnan().sum()}")
    moved = index > 0 and program.outputs in ("cache", "expanded")
    if moved and not torch.equal(actual.nan_to_num(), eager.nan_to_num()):
        raise Fault("moved", program, f"{where}: data that is only moved changed")
    if eager.dtype == torch.float64:  # eager code is its own reference: any order is as good
        eager = exact * (1 + 16 * torch.finfo(torch.float64).eps)
    if program.layers > 1:  # the second attention enlarges the first one's errors as it likes
        eager = exact + 2 * (eager.double() - exact)
    try:
        assert_close_to_reference(actual, eager, exact)
    except AssertionError as error:
        raise Fault("value", program, f"{where}: {error}") from error


def _check_rewrites(program: Program, outcome: Outcome) -> None:
    if "pass-failed" in outcome.declined:
        raise Fault("pass failed", program, f"{outcome}")
    expected = expectation(program)
    if expected is True and outcome.rewritten == 0:
        raise Fault("not rewritten", program, f"owed, but {outcome}")
    if expected is False and outcome.rewritten:
        raise Fault("rewritten", program, f"nothing is shared, but {outcome}")


def _outcome() -> Outcome:
    found = counters["cascade"]
    declined = {
        k.removeprefix("declined."): n for k, n in found.items() if k.startswith("declined")
    }
    return Outcome(found["sites"], found["rewritten"], declined)


def _tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)

"""Random programs through the whole product; and the fuzzer itself, which must be able to fail.

`python -m support.fuzz --count 2000` (from `tests/`) runs the same generator at length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support import program_spec as spec
from support.backend import eager_cascade
from support.program_shrink import shrink
from support.programs import (
    Fault,
    Mask,
    Program,
    Segment,
    Sizes,
    expectation,
    plain,
    programs,
    random_program,
    report,
    run_program,
    valid,
)
from torch import fx

SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

PATTERN = Program(
    calls=(Sizes(requests=2, branches=3, kv_heads=2, queries=4, keys=(7, 5)),),
    segments=(Segment("request", "repeat_interleave"), Segment()),
)


@settings(SETTINGS, max_examples=40)
@given(programs(dynamic=(None, False)))
def test_random_programs(program: Program) -> None:
    run_program(program, eager_cascade(decide="always", verify=True))


@settings(SETTINGS, max_examples=4)
@given(programs(dynamic=(True,)))
def test_random_programs_of_symbolic_sizes(program: Program) -> None:
    run_program(program, eager_cascade(decide="always", verify=True))


@pytest.mark.parametrize("seed", [3, 13])
def test_random_programs_through_inductor(seed: int) -> None:
    program = random_program(seed)
    assert expectation(program) is not False
    run_program(program, "cascade", expect=False)


def test_the_generator_reaches_everything() -> None:
    """Each spelling of each dimension occurs; so do owed, forbidden and optional rewrites."""
    seen: Counter[tuple[str, Any]] = Counter()
    for seed in range(3000):
        program = random_program(seed)
        for name in ("heads", "form", "call", "scores", "scaling", "softmax", "q_layout", "cat"):
            seen[name, getattr(program, name)] += 1
        for name in ("cat_layout", "follow", "outputs", "dims", "dynamic", "dtype"):
            seen[name, getattr(program, name)] += 1
        for name in ("kind", "shape", "spelling", "additive", "fill"):
            seen[f"mask.{name}", getattr(program.mask, name)] += 1
        for segment in program.segments:
            seen["map", (segment.rows, segment.spelling)] += 1
            seen["storage", segment.storage] += 1
            seen["write", segment.write] += 1
        seen["expectation", expectation(program)] += 1
    missing = [key for key in _everything() if not seen[key]]
    assert not missing


def _everything() -> list[tuple[str, Any]]:
    dimensions: dict[str, tuple[Any, ...]] = {
        "heads": spec.HEADS,
        "form": ("sdpa", "eager"),
        "call": spec.CALLS,
        "scores": spec.SCORES,
        "scaling": spec.SCALES,
        "softmax": spec.SOFTMAXES,
        "q_layout": spec.Q_LAYOUTS,
        "cat": spec.CATS,
        "cat_layout": spec.CAT_LAYOUTS,
        "follow": spec.FOLLOWS,
        "outputs": spec.OUTPUTS,
        "dims": ("shape", "literal", "argument"),
        "dynamic": (None, False, True),
        "dtype": ("float32", "bfloat16", "float16", "float64"),
        "mask.kind": spec.MASKS,
        "mask.shape": spec.MASK_SHAPES,
        "mask.spelling": (*spec.CAUSALS, "row_positions", "pad", "left", "mask2d"),
        "mask.additive": (None, *spec.ADDITIVES, "given", "bias"),
        "mask.fill": ("inf", "finite"),
        "map": tuple((rows, s) for rows, spellings in spec.MAPS.items() for s in spellings),
        "storage": spec.STORAGES,
        "write": spec.WRITES,
        "expectation": (True, False, None),
    }
    return [(name, value) for name, values in dimensions.items() for value in values]


def test_a_report_runs_and_names_the_exact_program() -> None:
    """The text in a report is a script, and the program in it is the one that ran."""
    text = report(PATTERN)
    scope: dict[str, Any] = {}
    exec(text.split("compiled =")[0], scope)
    assert scope["fn"](*scope["calls"][0]).shape == (6, 2, 4, 8)
    shown = text.split("run_program(")[1].removesuffix(", backend)")
    names = {"Program": Program, "Sizes": Sizes, "Segment": Segment, "Mask": Mask}
    assert eval(shown, names) == PATTERN


Change = Callable[[torch.Tensor], torch.Tensor]
CHANGES: dict[str, Change] = {
    "value": lambda o: o * 1.001,
    "nan": lambda o: o.masked_fill(torch.arange(o.shape[0])[:, None, None, None] == 0, torch.nan),
    "form": lambda o: o.double(),
    "strides": lambda o: o.transpose(1, 2).contiguous().transpose(1, 2),
}


def _broken(change: Change) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A backend that runs the graph and spoils its first output."""

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            first, *rest = gm(*args)
            return (change(first), *rest)

        return run

    return backend


@pytest.mark.parametrize("kind", CHANGES)
def test_a_spoiled_output_is_a_fault(kind: str) -> None:
    with pytest.raises(Fault) as caught:
        run_program(PATTERN, _broken(CHANGES[kind]), expect=False)
    assert caught.value.kind == kind


def test_a_backend_that_rewrites_nothing_is_a_fault() -> None:
    with pytest.raises(Fault, match="owed"):
        run_program(PATTERN, plain)


def test_a_suffix_that_is_dropped_is_a_fault() -> None:
    """What a long random prefix hides: each key of the suffix counts for some query."""

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
            rows = [x.repeat_interleave(3, 0) for x in (k, v)]
            return (torch.nn.functional.scaled_dot_product_attention(q, *rows),)

        return run

    for length in (40, 4000):
        sizes = Sizes(requests=2, branches=3, kv_heads=2, queries=4, keys=(length, 5))
        with pytest.raises(Fault, match="value"):
            run_program(
                Program(calls=(sizes,), segments=PATTERN.segments, dtype="bfloat16"),
                backend,
                expect=False,
            )


def test_shrinking_keeps_the_cause_and_drops_the_rest() -> None:
    program = next(
        p
        for p in map(random_program, range(500))
        if p.mask.kind == "window" and len(p.segments) > 2 and p.heads != "same"
    )
    small = shrink(program, lambda p: p.mask.kind == "window", budget=500)
    assert valid(small)
    assert small.mask.kind == "window"
    assert len(small.segments) == 1 and small.heads == "same" and len(small.calls) == 1

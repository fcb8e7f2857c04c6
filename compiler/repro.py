"""Runs one dumped graph alone: before and after the passes, eager and compiled, against float64.

The `repro.py` of a dump calls `main`. Inputs are random (`compiler.random_inputs`); the reference
is the graph before the passes with every float in float64; what a result may be wrong by is what
the graph before is wrong by in eager mode (`compiler.tolerance`).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from torch_cascade.compiler.backend import cascade_backend
from torch_cascade.compiler.tolerance import fault, max_error


@dataclass(frozen=True)
class Case:
    """What a `repro.py` runs.

    Attributes:
        folder: where the files are.
        before, after, lowered: their names; "" for one that was not written.
        exact: the passes promise the same function. False for a blend, which recomputes some tokens
            only: the graph after is then compared with itself in float64.
        options: options of this package that the lowering depends on.
    """

    folder: Path
    before: str
    after: str
    lowered: str = ""
    exact: bool = True
    options: dict[str, object] | None = None


class InFloat64(TorchDispatchMode):
    """Runs ops on floats in float64, conversions and factories included, also in bodies.

    Random numbers are drawn in the dtype asked for: float64 would draw others from the same seed.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One op."""
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return tree_map(_widened, func(*args, **(kwargs or {})))
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def main(case: Case, arguments: Sequence[str] | None = None) -> int:
    """Run the graphs and print what was compared.

    Args:
        case: the graphs.
        arguments: of the command line; None for the process's own.

    Returns:
        0 if every result is as close to the reference as it must be, else 1.
    """
    parser = argparse.ArgumentParser(description="Run one dumped graph alone on random inputs.")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--eager", action="store_true", help="leave the compiled runs out")
    given = parser.parse_args(arguments)
    missing = _missing_device(case)
    if missing:
        print(missing)
        return 2
    faults = [said for said in _compared(case, given.seed, given.eager) if said]
    print(f"{len(faults)} of the results are wrong" if faults else "all results are right")
    return 1 if faults else 0


def load(path: Path) -> Any:
    """The module of a dumped graph."""
    name = f"dumped_{path.parent.name}_{path.stem.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"path: expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _missing_device(case: Case) -> str:
    """What to say where the graph's device is not there; "" where it is."""
    inputs = load(case.folder / case.before).INPUTS
    devices = {torch.device(x.device) for x in inputs if hasattr(x, "device")}
    lacking = sorted(str(d) for d in devices if d.type == "cuda" and not _has_gpu(d))
    return f"the graph is one for {', '.join(lacking)}, which is not there" if lacking else ""


def _has_gpu(device: torch.device) -> bool:
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


@torch.no_grad()
def _compared(case: Case, seed: int, eager_only: bool) -> Iterator[str]:
    """What is wrong with each run; "" where nothing is. A run is printed as it ends."""
    before, after = load(case.folder / case.before), load(case.folder / case.after)
    first = _Baseline.of("before", before, seed)
    second = first if case.exact else _Baseline.of("after", after, seed)
    runs: list[tuple[str, _Baseline, Callable[..., Any]]] = []
    if case.exact:
        runs.append(("after, eager", first, after.Graph()))
    if case.lowered:
        runs.append(("lowered, eager", second, load(case.folder / case.lowered).Graph()))
    if not eager_only:
        runs.append(("before, compiled", first, _compiled(before.Graph(), case)))
        runs.append(("after, compiled", second, _compiled(after.Graph(), case)))
    for name, baseline, run in runs:
        inputs = before.make_inputs(seed)
        torch.manual_seed(seed)  # of random numbers that the graph itself draws
        results = _flat(run(*inputs)) + [inputs[n] for n in baseline.written]
        said = baseline.fault(results)
        print(f"{name}: {said or f'right, error {baseline.error(results):.3e}'}")
        yield said


@dataclass(frozen=True)
class _Baseline:
    """What a graph computes in eager mode, and in float64.

    Attributes:
        eager: results, and the inputs that were written to.
        reference: the same in float64.
        written: the numbers of these inputs.
    """

    eager: list[Any]
    reference: list[Any]
    written: list[int]

    @classmethod
    def of(cls, name: str, module: Any, seed: int) -> _Baseline:
        """Run the graph of a dumped file twice."""
        inputs, graph = module.make_inputs(seed), module.Graph()
        versions = [getattr(x, "_version", None) for x in inputs]
        torch.manual_seed(seed)
        eager = _flat(graph(*inputs))
        after = [getattr(x, "_version", None) for x in inputs]
        written = [n for n, (x, y) in enumerate(zip(versions, after, strict=True)) if x != y]
        wide = [_widened(x) for x in module.make_inputs(seed)]
        torch.manual_seed(seed)
        with InFloat64():
            exact = _flat(graph(*wide))
        made = cls(
            eager + [inputs[n] for n in written], exact + [wide[n] for n in written], written
        )
        print(f"{name}, eager: error {made.error(made.eager):.3e} against float64")
        return made

    def error(self, results: Sequence[Any]) -> float:
        """The largest error of a result."""
        pairs = zip(results, self.reference, strict=True)
        return max((max_error(a, b) for a, b in pairs if _is_float(a)), default=0.0)

    def fault(self, results: Sequence[Any]) -> str:
        """What is wrong with results of the same graph; "" if nothing is."""
        if len(results) != len(self.eager):
            return f"{len(results)} results instead of {len(self.eager)}"
        trios = zip(results, self.eager, self.reference, strict=True)
        said = (f"result {n}: {text}" for n, trio in enumerate(trios) if (text := _fault(*trio)))
        return "; ".join(said)


def _fault(actual: Any, eager: Any, reference: Any) -> str:
    if not isinstance(actual, Tensor) or not isinstance(eager, Tensor):
        return "" if actual == eager else f"{actual} instead of {eager}"
    if actual.shape != eager.shape or actual.dtype != eager.dtype:
        return f"{actual.dtype} {[*actual.shape]} instead of {eager.dtype} {[*eager.shape]}"
    if _is_float(actual):
        return fault(actual, eager, reference)
    wrong = int(((actual != eager) & (actual != reference)).sum())
    return f"{wrong} elements are neither eager's nor those of float64" if wrong else ""


def _compiled(graph: nn.Module, case: Case) -> Callable[..., Any]:
    """Lowered and compiled by this backend; its passes have run already, or shall not."""
    options: dict[str, Any] = dict(case.options or {})
    options |= {"passes": "none", "strict": False, "disable": False, "dump": None}
    options |= {"fallback_random": True}  # draws what eager code draws
    backend: Any = cascade_backend  # not its name, which only an installed package has
    return torch.compile(graph, backend=backend, options=options, dynamic=False)


def _widened(x: Any) -> Any:
    """Floats, and dtypes of floats, as float64."""
    if isinstance(x, Tensor):
        return x.double() if x.dtype.is_floating_point else x
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else x
    return _wide_body(x) if isinstance(x, nn.Module) else x


def _wide_body(body: nn.Module) -> Callable[..., Any]:
    """The body of a higher-order op: the mode is off while that op runs."""

    def run(*args: Any) -> Any:
        with InFloat64():
            return body(*args)

    return run


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]

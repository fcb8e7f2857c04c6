"""Decoding steps of a whole model over shared prompts: ours and stock, against the floor.

Example: `python -m torch_cascade.benchmarks.generate --cases 1,16,4096 --engines cascade,static`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_cascade.benchmarks import cases, models, plots, record, rows, tables
from torch_cascade.benchmarks.decode import DEFAULT, NAMES, WAYS
from torch_cascade.benchmarks.measure import Measurement
from torch_cascade.benchmarks.record import Record

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OURS = tuple(way.name for way in WAYS if way.ours)
STOCK = tuple(way.name for way in WAYS if way.stock)
ORDERS = ("auto", "interleaved", "sequential")
PREFILLS = ("random", "prompt")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("generate", description=(__doc__ or "").partition("\n")[0])
    made.add_argument(
        "--cases",
        type=cases.parse_case,
        nargs="+",
        default=cases.DEFAULT_CASES,
        metavar="B,T,L",
        help="requests, branches of each, prompt tokens",
    )
    made.add_argument("--engines", metavar="A,B", help=f"some of {', '.join(NAMES)}")
    shapes = ", ".join(models.SHAPES)
    made.add_argument(
        "--model",
        default="llama-3-8b",
        help=f"random weights of {shapes}; {models.PACKAGED}; or a checkpoint's folder",
    )
    made.add_argument("--layers", type=int, help="keep only the first layers")
    made.add_argument("--prefill", choices=PREFILLS, help="default: random for random weights")
    made.add_argument("--steps", type=int, default=32, help="timed one by one (default: 32)")
    made.add_argument("--burst", type=int, default=16, help="timed together, not waited for")
    made.add_argument("--order", choices=ORDERS, default="auto", help="auto: by free memory")
    made.add_argument("--check-rows", type=int, default=2, help="0: check nothing (default: 2)")
    made.add_argument("--seconds", type=float, help="set no engine up after so many")
    made.add_argument("--seed", type=int, default=0)
    add_machine(made)
    made.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    made.add_argument("--no-plot", action="store_true", help="draw nothing beside the JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0, 1 where an engine of ours fails, 2 for usage."""
    made = parser()
    options = made.parse_args(arguments)
    _check(made, options)
    try:
        return _run(options)
    except models.UsageError as error:
        print(error, file=sys.stderr)
        return 2


def _check(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    rows.choose_engines(made, options, NAMES, DEFAULT)
    least = {"steps": 1, "burst": 0, "check_rows": 0, "layers": 1}
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            option = name.replace("_", "-")
            made.error(f"argument --{option}: must be at least {smallest}, got {value}")
    check_machine(made, options)


def add_machine(made: argparse.ArgumentParser) -> None:
    """The options that say where a model runs, and what that machine can do."""
    made.add_argument("--device", help="default: cuda if there is one, else cpu")
    made.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, float32 on a CPU")
    made.add_argument("--read", type=float, metavar="TB/S", help="do not measure this ceiling")
    made.add_argument("--matmul", type=float, metavar="TFLOP/S", help="nor this one")


def check_machine(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Settle the device; a usage error where its ceilings are neither given nor measurable."""
    if (options.read is None) != (options.matmul is None):
        made.error("arguments --read and --matmul: give both or none")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(options.device).type != "cuda" and options.read is None:
        made.error("without a CUDA device no ceiling can be measured: give --read and --matmul")


def ceilings_of(options: argparse.Namespace, dtype: torch.dtype) -> rows.Ceilings:
    """Given on the command line, or measured."""
    if options.read is not None:
        return rows.Ceilings(options.read * 1e12, options.matmul * 1e12)
    from torch_cascade.benchmarks import ceilings

    return ceilings.measure(torch.device(options.device), dtype)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    began = time.monotonic()
    device = torch.device(options.device)
    dtype = DTYPES[options.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    console = Console(width=max(160, Console().width))
    ceilings = ceilings_of(options, dtype)
    loaded = models.load(options.model, options.layers, dtype, device)
    options.prefill = options.prefill or ("random" if loaded.tokenizer is None else "prompt")
    made = Record("generate", "ms", "B,T,L", _settings(options), ceilings, record.describe(device))
    path = options.json or record.default_path("generate", device)
    say = lambda text: console.print(text, markup=False, highlight=False)  # noqa: E731
    deadline = None if options.seconds is None else began + options.seconds
    measurement = Measurement(loaded, ceilings, options, say, deadline)
    say(f"{loaded.name}, {options.model}: ready after {time.monotonic() - began:.0f} s")
    with torch.no_grad():
        for case in options.cases:
            if measurement.late():
                say(f"out of time: {case} and what follows were not measured")
                break
            made.lines.append(measurement.line(case))
            made.write(path)
    say(tables.title(made))
    console.print(tables.table(made, options.engines, OURS))
    for text in (*tables.scores(made, OURS, STOCK, "stock engines"), *tables.complaints(made)):
        say(text)
    if not options.no_plot and any(r.time for line in made.lines for r in line.results.values()):
        plots.write(made, options.engines, path.with_suffix(".png"))
    say(f"written: {path}")
    ours = [r for line in made.lines for name, r in line.results.items() if name in OURS]
    return 1 if any(r.status not in (record.OK, record.MISSING) for r in ours) else 0


def _settings(options: argparse.Namespace) -> dict[str, object]:
    known = ("model", "layers", "prefill", "steps", "burst", "order", "check_rows", "seed")
    return {name: getattr(options, name) for name in (*known, "dtype", "device")}


if __name__ == "__main__":
    sys.exit(main())

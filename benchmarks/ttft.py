"""Time to the first token of a prompt of cached chunks: in full, and blended.

Example: `python -m torch_cascade.benchmarks.ttft --model tiny --lengths 300 --chunk 64`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from torch_cascade.benchmarks import arms, command, generate, models, prefill, record, tables
from torch_cascade.benchmarks.prefill_contest import CHECK_LAYER, Contest
from torch_cascade.benchmarks.record import Record


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("ttft", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--model", default="llama-3-8b", help="as for `generate`")
    made.add_argument("--layers", type=command.at_least_one, help="keep only the first layers")
    made.add_argument(
        "--lengths", type=command.at_least_one, nargs="+", default=[8192], help="prompt tokens"
    )
    made.add_argument("--chunk", type=command.at_least_one, default=512, help="tokens of a chunk")
    made.add_argument(
        "--question", type=command.at_least_one, default=64, help="tokens that are not cached"
    )
    made.add_argument("--ratios", type=_ratio, nargs="+", default=[Fraction(3, 20)])
    made.add_argument("--arms", nargs="+", choices=arms.NAMES, default=["v"], metavar="ARM")
    made.add_argument(
        "--sources", nargs="+", choices=prefill.SOURCES, help="default: gpu; cpu without a GPU"
    )
    made.add_argument("--no-eager", action="store_true", help="leave the eager prefill out")
    made.add_argument("--mode", help="of torch.compile, for all engines")
    made.add_argument("--repeat", type=command.at_least_one, default=10)
    made.add_argument("--seconds", type=float, help="set no engine up after so many")
    made.add_argument("--seed", type=int, default=0)
    generate.add_machine(made)
    made.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    return made


def _ratio(text: str) -> Fraction:
    try:
        ratio = Fraction(text)
    except (ValueError, ZeroDivisionError):
        ratio = Fraction(-1)
    if not 0 <= ratio <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return ratio


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0, 1 where an engine fails, 2 for usage."""
    made = parser()
    options = made.parse_args(arguments)
    _check(made, options)
    try:
        return _run(options)
    except models.UsageError as error:
        print(error, file=sys.stderr)
        return 2


def _check(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    generate.check_machine(made, options)
    on_cpu = torch.device(options.device).type == "cpu"
    options.sources = options.sources or ["cpu" if on_cpu else "gpu"]
    if on_cpu and "gpu" in options.sources:
        made.error("argument --sources: gpu needs a CUDA device")
    if min(options.lengths) <= options.question:
        made.error(
            f"argument --lengths: must be above --question {options.question}, "
            f"got {min(options.lengths)}"
        )


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    device = torch.device(options.device)
    dtype = generate.DTYPES[options.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    console = Console(width=max(160, Console().width))
    ceilings = generate.ceilings_of(options, dtype)
    loaded = models.load(options.model, options.layers, dtype, device)
    models.check_length(loaded.model, max(options.lengths))
    engines = prefill.ways(options.ratios, options.sources, options.arms)
    engines = engines[1 if options.no_eager else 0 :]
    made = Record("ttft", "ms", "L", _settings(options), ceilings, record.describe(device))
    path = options.json or record.default_path("ttft", device)
    say = functools.partial(console.print, markup=False, highlight=False)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        contest = Contest(loaded.model, engines, options, ceilings, Path(folder), say)
        for length in options.lengths:
            made.lines.append(contest.line(length))
            made.write(path)
    names = [way.name for way in engines]
    ours = [way.name for way in engines if way.ratio is not None]
    say(tables.title(made))
    console.print(tables.table(made, names, ours))
    for text in (*_shares(made, ours), *tables.complaints(made)):
        say(text)
    say(f"written: {path}")
    return command.status(made, names)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    known = ("model", "layers", "chunk", "question", "mode", "repeat", "seed", "dtype", "device")
    settings = {name: getattr(options, name) for name in known}
    return settings | {"check_layer": CHECK_LAYER, "dynamic": len(options.lengths) > 1}


def _shares(made: Record, ours: Sequence[str]) -> list[str]:
    """What share of the full prefill each blend takes, at each length."""
    said = []
    for name in ours:
        parts = [
            f"{line.results[name].details['share_of_full']:.3f} at {line.label}"
            for line in made.lines
            if "share_of_full" in line.results[name].details
        ]
        if parts:
            said.append(f"{name}: {', '.join(parts)} of the full prefill")
    return said


if __name__ == "__main__":
    sys.exit(main())

"""What reusing cached chunks costs in quality, against computing everything.

Example: `python -m torch_cascade.benchmarks.quality --text debian-faq.en.txt.gz --windows 16`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from torch_cascade.benchmarks import arms, models, quality_record, record, windows
from torch_cascade.benchmarks.blended import CODES, Blender
from torch_cascade.benchmarks.quality_record import Quality

RATIOS = tuple(Fraction(x) for x in ("0.15", "0.3", "0.5"))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("quality", description=(__doc__ or "").partition("\n")[0])
    windows.add_options(made, count=24)
    made.add_argument("--arms", nargs="+", choices=arms.NAMES, default=arms.NAMES, metavar="ARM")
    made.add_argument("--ratios", nargs="+", type=ratio, default=RATIOS, metavar="R")
    made.add_argument("--kinds", nargs="+", choices=windows.KINDS, default=windows.KINDS)
    made.add_argument("--seed", type=int, default=0, help="of the choice of windows")
    made.add_argument("--code", choices=CODES, default=CODES[0])
    made.add_argument("--seconds", type=float, help="start no new arm after so many")
    made.add_argument("--device", help="default: cuda if there is one, else cpu")
    made.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    made.add_argument("--no-plot", action="store_true", help="draw nothing beside the JSON")
    return made


def ratio(text: str) -> Fraction:
    """A share above 0 and below 1.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text}")
    return share


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0, or 2 where the user can change something."""
    options = parser().parse_args(arguments)
    try:
        _run(options)
    except models.UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    console = Console(width=max(170, Console().width))
    say = lambda text: console.print(text, markup=False, highlight=False)  # noqa: E731
    loaded = models.load(options.model, None, torch.float32, device)
    cut = windows.Cut(options.chunks, options.tokens, options.fresh)
    models.check_length(loaded.model, cut.cached + cut.fresh)
    text = windows.read_tokens(options.text, models.tokenizer_of(loaded)).to(device)
    found = windows.cut_windows(text, cut, options.windows, options.seed)
    made = Quality(_settings(options), record.describe(device))
    path = options.json or record.default_path("quality", device)
    blender = Blender(loaded.model, options.code)
    chosen = arms.all_arms(options.arms, options.ratios, loaded.model.config.num_hidden_layers)
    try:
        for arm in chosen:
            arms.check_budget(arm, cut.cached, cut.fresh)
    except ValueError as error:
        raise models.UsageError(f"--ratios: {error}") from error
    measure = _Measure(blender, {kind: found[kind] for kind in options.kinds})
    _measure_all(measure, chosen, made, path, options.seconds, say)
    for kind in options.kinds:
        console.print(quality_record.table(made, kind))
    if not options.no_plot:
        quality_record.plot(made, path.with_suffix(".svg"))
    say(f"written: {path}")


def _measure_all(
    measure: _Measure,
    chosen: Sequence[arms.Arm],
    made: Quality,
    path: Path,
    seconds: float | None,
    say: Callable[[str], None],
) -> None:
    """Arm after arm; the file is written and a line is said after each."""
    began = time.monotonic()
    for arm in chosen:
        if seconds is not None and time.monotonic() - began > seconds:
            say(f"out of time: {arm} and what follows were not measured")
            return
        made.lines += measure(arm)
        made.write(path)
        for line in made.lines[-len(measure.windows) :]:
            figures = ", ".join(f"{name} {sum(x) / len(x):.4f}" for name, x in line.samples.items())
            say(f"{time.monotonic() - began:5.0f} s {line.kind} {line.label}: {figures}")


class _Measure:
    """Every window with one arm, against the same windows computed in full."""

    def __init__(self, blender: Blender, found: dict[str, list[windows.Window]]) -> None:
        self.blender, self.windows = blender, found
        self.full = {
            kind: [blender.eager(w.ids, len(w.fresh))[0] for w in those]
            for kind, those in found.items()
        }

    def __call__(self, arm: arms.Arm) -> list[quality_record.Line]:
        logits = self.blender.compiled(arm)
        lines = []
        for kind, those in self.windows.items():
            samples: dict[str, list[float]] = {}
            for window, full in zip(those, self.full[kind], strict=True):
                got = logits([window.parts], len(window.fresh))[0]
                for name, value in quality_record.compare(got, full, window.fresh).items():
                    samples.setdefault(name, []).append(value)
            lines.append(quality_record.Line(kind, arm.name, str(arm.ratio), arm.options, samples))
        return lines


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    known = ("model", "windows", "chunks", "tokens", "fresh", "seed", "code")
    return {name: getattr(options, name) for name in known} | {"text": options.text.name}


if __name__ == "__main__":
    sys.exit(main())

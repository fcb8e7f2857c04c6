"""Launch configurations of our fused kernel: the one that is chosen against many others.

Example: `python -m torch_cascade.benchmarks.tune --rows 4,4,2000,5,5 --only tail`.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich import box
from rich.table import Table

from torch_cascade.benchmarks import candidates, command, contest, inputs, peers, record, tables
from torch_cascade.benchmarks.record import Line, Record, Result
from torch_cascade.benchmarks.rows import Heads, Row
from torch_cascade.benchmarks.spread import Spread
from torch_cascade.kernels.launch_config import DeviceLimits

if TYPE_CHECKING:
    from rich.console import Console

Config = TypeVar("Config")

CHOSEN = "chosen"  # key of a line's details: the name of the configuration that is taken


@dataclass(frozen=True)
class Field:
    """The configurations that are compared at one row.

    Attributes:
        configs: dataclasses by name, the chosen one first.
        chosen: its name.
        left_out: names of those that do not fit shared memory; they are not compiled.
    """

    configs: dict[str, Any]
    chosen: str
    left_out: list[str]

    @classmethod
    def of(cls, row: Row, heads: Heads, limits: DeviceLimits, only: str | None = None) -> Field:
        """The chosen configuration, and the candidates whose names contain `only`."""
        chosen = candidates.chosen(row, heads, limits)
        others = candidates.enumerate_all(row, heads, limits)
        fits = functools.partial(candidates.fits, heads=heads, limits=limits)
        return cls.among(chosen, others, candidates.name, fits, only)

    @classmethod
    def among(
        cls,
        chosen: Config,
        others: Iterable[Config],
        name: Callable[[Config], str],
        fits: Callable[[Config], bool],
        only: str | None = None,
    ) -> Field:
        """The chosen configuration, and those of `others` that fit, with `only` in their names."""
        configs, left_out = {name(chosen): chosen}, []
        for config in others:
            called = name(config)
            if only is not None and only not in called:
                continue
            if fits(config):
                configs.setdefault(called, config)
            else:
                left_out.append(called)
        return cls(configs, name(chosen), left_out)

    def engines(self) -> list[peers.Peer[inputs.Inputs]]:
        """Our kernel once a configuration."""
        return [
            peers.Peer(name, functools.partial(peers.kernel, configs=[config]), ours=True)
            for name, config in self.configs.items()
        ]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command.parser("tune", __doc__, repeat=20)
    add_options(made)
    return made


def add_options(made: argparse.ArgumentParser) -> None:
    """The options of programs that compare configurations."""
    made.add_argument("--only", metavar="TEXT", help="candidates with this in their names")
    made.add_argument(
        "--show", type=command.at_least_one, default=5, help="candidates a row in the table"
    )
    made.add_argument(
        "--jobs", type=command.at_least_one, default=8, help="kernels compiled at once"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 0, 1 where a result is wrong or the choice fails, 2 for usage."""
    options = parser().parse_args(arguments)
    device = command.cuda_device()
    if device is None:
        print(command.NO_DEVICE, file=sys.stderr)
        return 2
    return _run(options, device)


def _run(options: argparse.Namespace, device: torch.device) -> int:
    from rich.console import Console

    from torch_cascade.kernels.triton_launch import device_limits

    limits = device_limits(device)
    made = command.empty_record("tune", options, device)
    made.settings |= {"only": options.only, "limits": limits._asdict()}
    path = options.json or record.default_path("tune", device)
    console = Console(width=max(160, Console().width))

    def measure(row: Row) -> Line:
        return measure_row(row, made, options, limits, device)

    command.fill(made, path, options, measure, summary, console)
    report(made, options.show, console)
    console.print(f"written: {path}", highlight=False)
    return status(made)


def report(made: Record, show: int, console: Console) -> None:
    """The table of configurations, and what is to be said of them."""
    console.print(tables.title(made), markup=False, highlight=False)
    console.print(table(made, show))
    for text in (*overall(made), *tables.complaints(made)):
        console.print(text, markup=False, highlight=False)


def measure_row(
    row: Row,
    made: Record,
    options: argparse.Namespace,
    limits: DeviceLimits,
    device: torch.device,
) -> Line:
    """Compile, check and time all configurations at these sizes."""
    field = Field.of(row, Heads(), limits, options.only)
    engines = field.engines()
    if options.jobs > 1:
        plain = inputs.draw(row, Heads(), device, contest.DTYPE, options.seed)
        compile_all([engine.make(plain) for engine in engines], options.jobs, device)
        del plain  # the same are drawn again for the check
    return judged(contest.measure_row(engines, row, made, options, device), field)


def compile_all(calls: Sequence[Callable[[], object]], jobs: int, device: torch.device) -> None:
    """Call all once, several at a time, so that their kernels are compiled side by side.

    What one raises is left alone: it raises it again when it is checked, and is reported there.
    """

    def enter() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(jobs, initializer=enter) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.exception()


def judged(line: Line, field: Field) -> Line:
    """The line with every configuration's numbers, the best, and what the choice costs."""
    results = {
        name: replace(result, details=result.details | {"config": asdict(field.configs[name])})
        for name, result in line.results.items()
    }
    best = record.fastest(results, list(results))
    details = line.details | {
        CHOSEN: field.chosen,
        "best": best,
        "regret_percent": regret(results, field.chosen),
        "left_out": field.left_out,
    }
    return replace(line, results=results, details=details)


def regret(results: dict[str, Result], chosen: str) -> float | None:
    """Percent that `chosen` takes longer than the fastest; None where it was not timed."""
    times = timed(results)
    return _over(times[chosen], times) if chosen in times else None


def timed(results: dict[str, Result]) -> dict[str, Spread]:
    """Times by name, fastest first."""
    found = {name: r.time for name, r in results.items() if r.time is not None}
    return dict(sorted(found.items(), key=lambda item: item[1].median))


def _over(time: Spread, times: dict[str, Spread]) -> float:
    return 100.0 * (time.median / min(t.median for t in times.values()) - 1.0)


def summary(line: Line) -> str:
    """The choice and the best in one line."""
    left_out = len(line.details["left_out"])
    said = f"{len(timed(line.results))} of {len(line.results)} timed, {left_out} left out"
    best, percent = line.details["best"], line.details["regret_percent"]
    if percent is None:
        return f"{said}; the choice {line.details[CHOSEN]} was not timed"
    if best == line.details[CHOSEN]:
        return f"{said}; the choice is the best: {best}"
    return f"{said}; the choice takes {percent:.1f} % longer than {best}"


def table(made: Record, show: int) -> Table:
    """The best `show` configurations of each row, and the chosen one wherever it stands."""
    drawn = Table(box=box.SIMPLE_HEAD)
    for heading in (made.columns, "goal", "place", "configuration"):
        drawn.add_column(heading, no_wrap=True)
    for heading in (f"{made.unit} (x floor)", "quartiles", "over the best"):
        drawn.add_column(heading, justify="right")
    for line in made.lines:
        drawn.add_section()
        times = timed(line.results)
        for place, (name, time) in enumerate(times.items(), 1):
            mine = name == line.details[CHOSEN]
            if place > show and not mine:
                continue
            drawn.add_row(
                line.label if place == 1 else "",
                tables.number(line.goal) if place == 1 else "",
                str(place),
                f"[bold]{name} (chosen)[/]" if mine else name,
                tables.cell(line, line.results[name], ours=True),
                f"{tables.number(time.low)} to {tables.number(time.high)}",
                f"{_over(time, times):.1f} %",
            )
    return drawn


def overall(made: Record) -> list[str]:
    """The regret of the choice over all rows, in one line; none where nothing was timed."""
    found = [
        (percent, line.label)
        for line in made.lines
        if (percent := line.details["regret_percent"]) is not None
    ]
    if not found:
        return []
    mean = math.exp(sum(math.log1p(percent / 100) for percent, _ in found) / len(found)) - 1
    most, label = max(found)
    return [
        f"the choice takes {100 * mean:.1f} % longer than the best (geometric mean of "
        f"{len(found)} rows), most at {label}: {most:.1f} %"
    ]


def status(made: Record) -> int:
    """1 where a configuration is wrong or the chosen one was not timed.

    Others may fail: that a candidate does not compile is a finding.
    """
    for line in made.lines:
        wrong = any(result.status == record.WRONG for result in line.results.values())
        if wrong or line.details["regret_percent"] is None:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

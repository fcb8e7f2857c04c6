"""One case of the decoding benchmark: every engine set up, checked and timed."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_cascade.benchmarks import cases, decode, decode_check, memory, models, record
from torch_cascade.benchmarks.cases import Case, Size
from torch_cascade.benchmarks.decode import WARM_UP, WAYS, Running, Way
from torch_cascade.benchmarks.decode_check import Reference
from torch_cascade.benchmarks.record import Line, Result
from torch_cascade.benchmarks.rows import Ceilings
from torch_cascade.benchmarks.spread import Spread
from torch_cascade.benchmarks.timing import first_line

# What compiling and running take beside weights and caches, at most, if engines stay together.
WORKSPACE = 12 * 2**30
RECOMPILES = 64  # every engine compiles the same function: more than Dynamo expects


@dataclass
class Scene:
    """What the engines of one case share."""

    case: Case
    prefix: list[models.KeyValue]
    size: Size
    fed: list[Tensor]
    burst: int
    watched: Tensor
    known: Reference | None = None
    results: dict[str, Result] = field(default_factory=dict)
    choices: dict[str, Tensor] = field(default_factory=dict)

    @property
    def alone(self) -> list[Tensor]:
        """Tokens of the steps that are waited for."""
        return self.fed[: len(self.fed) - self.burst]

    @property
    def together(self) -> list[Tensor]:
        """Tokens of the burst."""
        return self.fed[len(self.fed) - self.burst :]


@dataclass
class Contestant:
    """An engine at work, with what its setting up cost."""

    running: Running
    peak: int | None
    burst: float | None = None


@dataclass(frozen=True)
class Measurement:
    """Measures one case after the other.

    Attributes:
        loaded: the model.
        ceilings: of the machine.
        options: of the command line.
        say: prints one line.
        deadline: no engine is set up after it, in seconds of `time.monotonic`; None for no limit.
    """

    loaded: models.Loaded
    ceilings: Ceilings
    options: argparse.Namespace
    say: Callable[[str], None]
    deadline: float | None = None

    def line(self, case: Case) -> Line:
        """Measure all engines at one case."""
        torch._dynamo.config.recompile_limit = RECOMPILES
        scene = self._scene(case)
        reason = self._check(scene)
        chosen = [way for way in WAYS if way.name in self.options.engines]
        together = self._together(scene, chosen)
        for group in [chosen] if together else [[way] for way in chosen]:
            self._group(scene, group)
            memory.forget_compiled()
        agreement(scene)
        half = WARM_UP + self.options.steps / 2
        floors = [cases.floor(case, scene.size, half, self.ceilings, s) for s in (True, False)]
        shared, expanded = (1e3 * floor.seconds for floor in floors)
        stock = [way.name for way in chosen if way.stock]
        details = {
            "floor_with_expanded_kv_ms": expanded,
            "interleaved": together,
            "checked": reason is None,
            "not_checked_because": reason,
            "fastest_stock": record.fastest(scene.results, stock),
        }
        goal = cases.GOAL_FACTOR * shared
        return Line(str(case), shared, goal, floors[0], scene.results, details | vars(case))

    def late(self) -> bool:
        """Is the time over that the user gave?"""
        return self.deadline is not None and time.monotonic() > self.deadline

    def _scene(self, case: Case) -> Scene:
        options, model = self.options, self.loaded.model
        count = WARM_UP + options.steps + options.burst
        models.check_length(model, case.length + count)
        if options.prefill == "random":
            prefix = models.random_prefix(model, case.requests, case.length, options.seed)
        else:
            prefix = models.prompt_prefix(self.loaded, case.requests, case.length, options.seed)
        vocabulary = model.config.get_text_config().vocab_size
        fed = decode.tokens_to_feed(count, case.batch, vocabulary, model.device)
        watched = decode_check.watched_rows(case.batch, options.check_rows, model.device)
        return Scene(case, prefix, Size.of(model, prefix), fed, options.burst, watched)

    def _check(self, scene: Scene) -> str | None:
        """Compute the reference; the reason where there is none."""
        if self.options.check_rows == 0:
            return "--check-rows 0"
        model, branches = self.loaded.model, scene.case.branches
        try:
            scene.known = decode_check.reference(
                model, scene.prefix, branches, scene.watched, scene.alone
            )
        except RuntimeError as error:
            if not record.is_out_of_memory(error):
                raise
            return first_line(error)
        finally:
            memory.release()
        return None

    def _together(self, scene: Scene, ways: Sequence[Way]) -> bool:
        """Do all engines fit at once?"""
        if self.options.order != "auto":
            return bool(self.options.order == "interleaved")
        free = memory.free_bytes(self.loaded.model.device)
        case, count = scene.case, len(scene.fed)
        needed = sum(
            decode.cache_bytes(
                way.cache, case.requests, case.branches, case.length, count, scene.size.token
            )
            for way in ways
        )
        return free is None or needed + WORKSPACE <= free

    def _group(self, scene: Scene, ways: Sequence[Way]) -> None:
        """Set engines up one after the other, then let them take turns."""
        alive: dict[str, Contestant] = {}
        for way in ways:
            if self.late():
                scene.results[way.name] = Result(record.MISSING, "out of time")
                continue
            self._try(scene, way.name, alive, functools.partial(self._set_up, scene, way, alive))
        for index, fed in enumerate(scene.alone[WARM_UP:]):
            names = list(alive)
            first = index % max(1, len(names))
            for name in names[first:] + names[:first]:
                step = alive[name].running.step
                self._try(scene, name, alive, functools.partial(step, fed))
        for name in list(alive):
            self._try(scene, name, alive, functools.partial(self._finish, scene, alive[name]))

    def _try(
        self, scene: Scene, name: str, alive: dict[str, Contestant], action: Callable[[], None]
    ) -> None:
        """Do something; an engine that fails in it leaves, with its reason in the results."""
        try:
            action()
        except Exception as error:  # anything that a compiler raises
            alive.pop(name, None)
            status = record.OUT_OF_MEMORY if record.is_out_of_memory(error) else record.FAILED
            scene.results[name] = Result(status, first_line(error))
            self.say(f"{scene.case} {name}: {status}: {first_line(error)}")
        else:
            return
        memory.release()  # out here: the exception's frames no longer hold tensors

    def _set_up(self, scene: Scene, way: Way, alive: dict[str, Contestant]) -> None:
        peak = memory.Peak(self.loaded.model.device)
        branches, room = scene.case.branches, len(scene.fed)
        running = Running.start(way, self.loaded.model, scene.prefix, branches, room, scene.watched)
        for fed in scene.alone[:WARM_UP]:
            running.step(fed)
        above = peak.above()
        total = None if above is None else above + self._needed_before(scene, way)
        alive[way.name] = Contestant(running, total)
        self.say(f"{scene.case} {way.name}: ready after {sum(running.seconds):.0f} s")

    def _needed_before(self, scene: Scene, way: Way) -> int:
        """Bytes that were there before and that this engine cannot do without."""
        parameters = self.loaded.model.parameters()
        weights: int = sum(p.numel() * p.element_size() for p in parameters)
        case = scene.case
        prefix = case.requests * case.length * scene.size.token
        return weights + (0 if way.stock else prefix)

    def _finish(self, scene: Scene, one: Contestant) -> None:
        running = one.running
        if scene.burst:
            one.burst = running.burst(scene.together)
        result = summary(scene, one)
        scene.choices[running.way.name] = torch.stack(running.choices).cpu()
        scene.results[running.way.name] = result
        if result.time is not None:
            self.say(f"{scene.case} {running.way.name}: {result.time.median:.2f} ms a step")


def summary(scene: Scene, one: Contestant) -> Result:
    """What an engine did at a case: milliseconds a step, unless its logits are wrong."""
    running = one.running
    steady = [1e3 * s for s in running.seconds[WARM_UP:]]
    usual = statistics.median(steady)
    warm = 1e3 * sum(running.seconds[:WARM_UP])
    details: dict[str, Any] = {
        "tokens_per_second": 1e3 * scene.case.batch / usual,
        "compile_s": 1e-3 * max(0.0, warm - WARM_UP * usual),
        "peak_bytes": one.peak,
        "burst_ms": None if one.burst is None else 1e3 * one.burst,
    }
    if scene.known is not None:
        verdict, choices = decode_check.judge(torch.stack(running.logits), scene.known)
        details |= {"verdict": vars(verdict), "choices": choices}
        if not verdict.right:
            return Result(record.WRONG, verdict.complaint(), details=details)
    return Result(record.OK, time=Spread.of(steady), details=details)


def agreement(scene: Scene) -> None:
    """Note in the results how many greedy choices, of all rows, are those of the last engine.

    The last is the plainest that ran: eager with a stock cache, where there is room for it.
    """
    if not scene.choices:
        return
    base = next(way.name for way in reversed(WAYS) if way.name in scene.choices)
    for name, choices in scene.choices.items():
        same = int((choices == scene.choices[base]).sum())
        scene.results[name].details["same_choices"] = {
            "as": base,
            "same": same,
            "of": choices.numel(),
        }

"""Prefills of one prompt after the other: every engine set up, then timed in turn."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_cascade.benchmarks import memory, prefill, record
from torch_cascade.benchmarks.prefill import Prefill, Prompt, Running
from torch_cascade.benchmarks.prefill_work import Rows, Shapes, blend_work, full_work
from torch_cascade.benchmarks.record import Line, Result
from torch_cascade.benchmarks.rows import Ceilings, Floor
from torch_cascade.benchmarks.spread import Spread
from torch_cascade.benchmarks.timing import first_line

GOAL = 0.22  # of the full compiled prefill, at 15 % of the rows
CHECK_LAYER = 1  # where the pass chooses rows unless told otherwise
WARM_UP = 2


@dataclass
class Race:
    """The engines at one prompt.

    Attributes:
        prompt: what all read.
        folder: of this prompt's files.
        alive: engines that are ready.
        times: seconds to put the prompt together and to the first token, of each.
        logits: of the first token, [V].
        results: of those that left, and at last of all.
    """

    prompt: Prompt
    folder: Path
    alive: dict[str, Running] = field(default_factory=dict)
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)


class Contest:
    """Measures one prompt length after the other; every engine is compiled once."""

    def __init__(
        self,
        model: Any,
        engines: Sequence[Prefill],
        options: argparse.Namespace,
        ceilings: Ceilings,
        folder: Path,
        say: Callable[[str], object],
    ) -> None:
        """Nothing is compiled before the first line."""
        self.model, self.engines, self.options, self.say = model, engines, options, say
        self.ceilings, self.shapes, self.folder = ceilings, Shapes.of(model), folder
        self.deadline = None if options.seconds is None else time.monotonic() + options.seconds
        # A ratio is compiled once, wherever the chunks come from.
        forward = functools.cache(
            lambda way: way.forward(model, len(options.lengths) > 1, options.mode)
        )
        self.forwards = {way.name: forward(replace(way, name="", source="")) for way in engines}

    def line(self, length: int) -> Line:
        """All engines at one length."""
        options, vocabulary = self.options, self.model.config.get_text_config().vocab_size
        prompt = Prompt.draw(length, options.chunk, options.question, vocabulary, options.seed)
        race = Race(prompt, self.folder / str(length))
        self._set_up_all(race)
        for turn in range(options.repeat):
            names = list(race.alive)
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                self._try(race, name, functools.partial(_take_time, race, name))
        for name in race.alive:
            race.results[name] = self._result(race, name)
        memory.release()
        work, full = full_work(self.shapes, length, self.ceilings), race.results.get("full")
        goal = GOAL * full.time.median if full and full.time else float("nan")
        details = {"fresh": options.question, "chunks": len(prompt.chunks)}
        return Line(str(length), 1e3 * work.seconds, goal, work, race.results, details)

    def _set_up_all(self, race: Race) -> None:
        store = functools.cache(functools.partial(self._store, race))
        for way in self.engines:
            if self.deadline is not None and time.monotonic() > self.deadline:
                race.results[way.name] = Result(record.MISSING, "out of time")
            else:
                self._try(race, way.name, functools.partial(self._set_up, race, way, store))

    def _set_up(self, race: Race, way: Prefill, store: Callable[[str], Any]) -> None:
        running = Running(way, self.model, self.forwards[way.name], race.prompt)
        if way.ratio is not None:
            running.store = store(way.source)
        if way.source == "disk":
            running.folder = race.folder
        begin = time.monotonic()
        for _ in range(WARM_UP):
            *_, race.logits[way.name] = running.once()
        race.alive[way.name] = running
        self.say(f"{race.prompt.tokens} {way.name}: ready after {time.monotonic() - begin:.0f} s")

    def _store(self, race: Race, source: str) -> Any:
        """A store with the prompt's chunks, prefilled in eager mode."""
        made = prefill.make_store(self.model, source, race.folder)
        for chunk in race.prompt.chunks:
            made.add(chunk)
        return made

    def _try(self, race: Race, name: str, action: Callable[[], None]) -> None:
        """Do something; an engine that fails in it leaves, with its reason in the results."""
        try:
            action()
        except Exception as error:  # anything that a compiler raises
            race.alive.pop(name, None)
            status = record.OUT_OF_MEMORY if record.is_out_of_memory(error) else record.FAILED
            race.results[name] = Result(status, first_line(error))
            self.say(f"{race.prompt.tokens} {name}: {status}: {first_line(error)}")

    def _result(self, race: Race, name: str) -> Result:
        together, total = zip(*race.times[name], strict=True)
        work = self._work(race, name)
        details: dict[str, Any] = {
            "put_together_ms": 1e3 * Spread.of(together).median,
            "flops": work.flops,
            "bytes": work.bytes,
        }
        if "full" in race.times:
            full = Spread.of([time for _, time in race.times["full"]]).median
            details["share_of_full"] = Spread.of(total).median / full
            details |= distance(race.logits["full"], race.logits[name])
        return Result(record.OK, time=Spread.of([1e3 * t for t in total]), details=details)

    def _work(self, race: Race, name: str) -> Floor:
        way, tokens = race.alive[name].way, race.prompt.tokens
        ratio = way.ratio
        if ratio is None:
            return full_work(self.shapes, tokens, self.ceilings)
        check = CHECK_LAYER if ratio else -1
        rows = Rows(tokens, self.options.question, ratio, check, way.looks_ahead)
        return blend_work(self.shapes, rows, self.ceilings)


def _take_time(race: Race, name: str) -> None:
    race.times.setdefault(name, []).append(race.alive[name].once()[:2])


def distance(full: Tensor, blended: Tensor) -> dict[str, float | bool]:
    """How far a first token's distribution is from that of the full prefill, in nats."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (full, blended))
    same = bool(full.argmax() == blended.argmax())
    return {"kl": float((p.exp() * (p - q)).sum()), "same_token": same}

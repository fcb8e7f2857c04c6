"""What can be run in a dump: the graph around every pass as a Python file, and `repro.py`.

Files of a compilation's folder:

    01.cascade.before.py   the graph before the pass; `compiler.runnable` describes such a file
    01.cascade.after.py    the graph after it
    02.blend.before.py     and so on, for every pass but the clean-up after the last one
    constants.pt           tensors that the graph itself holds, if there are any
    repro.py               runs it alone: before and after, eager and compiled, against float64
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_cascade.compiler.random_inputs import Strided
from torch_cascade.compiler.runnable import CONSTANTS, NotRunnable, constants, source

logger = logging.getLogger(__name__)

_TITLE = "<title>"
_LIMIT = 64 * 2**20  # bytes of tensors in a graph that are written
_UNSEEN = ("before", "cleanup")
_LOWERING = "lower"
_INEXACT = "blend"

_REPRO = '''\
"""{title}: before and after the passes, eager and compiled, against float64.

Ends with status 1 if a result is wrong, 2 if the graph's device is not there. `--seed` makes other
random inputs, `--eager` leaves the compiled runs out.
"""

from pathlib import Path

from torch_cascade.compiler.repro import Case, main

CASE = Case(
    Path(__file__).parent,
    before={before!r},
    after={after!r},
    lowered={lowered!r},
    exact={exact!r},{why}
    options={options!r},
)

if __name__ == "__main__":
    raise SystemExit(main(CASE))
'''


@dataclass(frozen=True)
class _Pair:
    """The files around one pass."""

    stage: str
    number: int
    before: str
    after: str

    def name(self, when: str) -> str:
        return f"{self.number:02d}.{self.stage}.{when}.py"

    @property
    def changed(self) -> bool:
        return self.before != self.after


@dataclass
class Modules:
    """Writes the runnable files of one compilation as its passes run.

    Attributes:
        write: writes a file of the compilation's folder, given its name and content.
        graph: how to call the graph in titles.
        known: what the real inputs are like.
        options: options that the lowering depends on, for `repro.py`.
        notes: why something was not written.
    """

    write: Callable[[str, str | bytes], None]
    graph: str = ""
    known: Sequence[Strided | None] = ()
    options: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _pairs: list[_Pair] = field(default_factory=list)
    _last: str = ""
    _held: set[str] = field(default_factory=set)

    def see(self, stage: str, graph: fx.Graph) -> None:
        """Take the graph "before" the passes, or after one; raises for the disk only."""
        if stage == "before":
            self.notes, self._pairs, self._held = [], [], set()
            self._last = self._source(stage, graph)
        if stage in _UNSEEN:
            return
        pair = _Pair(stage, len(self._pairs) + 1, self._last, self._source(stage, graph))
        self._pairs.append(pair)
        self._last = pair.after
        for when, text in (("before", pair.before), ("after", pair.after)):
            if text:
                title = f"{self.graph}, {when} the pass {stage}."
                self.write(pair.name(when), text.replace(_TITLE, title, 1))
        if self._pairs[0].before:
            self.write("repro.py", self._repro())

    def _source(self, stage: str, graph: fx.Graph) -> str:
        """The module's text; "" and a note where there is none."""
        try:
            held = constants(graph)
            if sum(x.nbytes for x in held.values()) > _LIMIT:
                raise NotRunnable(f"the graph holds more than {_LIMIT >> 20} MiB of tensors")
            text = source(graph, _TITLE, self.known)
        except Exception as error:  # a dump must not be what breaks a compilation
            known = isinstance(error, NotRunnable)
            logger.warning("%s is not written as Python", self.graph, exc_info=not known)
            self.notes.append(f"{stage}: not written as Python: {error}")
            return ""
        if held.keys() - self._held:
            self._held |= held.keys()
            memory = io.BytesIO()
            with unset_fake_temporarily():  # passes run under one; these tensors are real
                torch.save(held, memory)
            self.write(CONSTANTS, memory.getvalue())
        return text

    def _repro(self) -> str:
        stages = [pair.stage for pair in self._pairs]
        cut = stages.index(_LOWERING) if _LOWERING in stages else len(stages)
        ours = [pair for pair in self._pairs[:cut] if pair.after]
        lowered = [pair for pair in self._pairs[cut:] if pair.after]
        blended = any(pair.stage == _INEXACT and pair.changed for pair in ours)
        first = self._pairs[0].name("before")
        return _REPRO.format(
            title=f"{self.graph}, alone on random inputs",
            before=first,
            after=ours[-1].name("after") if ours else first,
            lowered=lowered[-1].name("after") if lowered else "",
            exact=not blended,
            why="  # a blend recomputes some tokens only" if blended else "",
            options=self.options,
        )

"""What looks on while a graph is compiled: trace, pictures, the option `dump`, the numeric check.

The pipeline shows them the graph before the passes and after each; they only read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_cascade.compiler.dump import Dump
from torch_cascade.compiler.numeric import NumericCheck
from torch_cascade.compiler.picture import Album
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.structured_trace import trace_graph, trace_report
from torch_cascade.passes.cleanup import CleanupPass
from torch_cascade.passes.lower import LowerPass


@dataclass
class Observers:
    """Those of one compilation; None for one that nobody has asked for. The trace is always there.

    Attributes:
        record: of the compilation.
        dump: where the option `dump` wants it written.
        numeric: the check that `verify=numeric` wants in the first call.
        album: holds what pictures are made of.
    """

    record: Compilation
    dump: Dump | None = None
    numeric: NumericCheck | None = None
    album: Album | None = None
    _lowered: bool = False

    @classmethod
    def of(cls, record: Compilation, inputs: Sequence[Any], *, draws: bool) -> Observers:
        """Those that the options ask for.

        Args:
            record: its options and `training` are read.
            inputs: those of the graph.
            draws: pictures are wanted; a dump has them anyway.

        Raises:
            ValueError: the folder of the option `dump` cannot be written to.
        """
        options, made = record.options, cls(record)
        if options.disable:
            return made
        if options.dump is not None:
            made.dump = Dump.claim(options.dump, inputs, options)
        if record.training:
            return made
        if options.verify == "numeric":
            made.numeric = NumericCheck(record, options.strict)
        if draws or made.dump is not None:
            made.album = Album()
        return made

    @property
    def need_passes(self) -> bool:
        """True iff there is nothing to see in an artefact from a cache."""
        return self.dump is not None or self.numeric is not None

    def see(self, stage: str, graph: fx.Graph) -> None:
        """Look at the graph "before" the passes, or after the one of that name."""
        state = self._state(stage)
        trace_graph(state, graph)
        if self.album is not None and state in ("before", "after"):
            self.album.see(stage, graph)
        if self.dump is not None:
            self.dump.see(stage, graph, state)
        if self.numeric is not None:
            self.numeric.see(stage, graph)
        if stage == LowerPass.name and self.dump is not None and self.album is not None:
            self.dump.draw(self.album.pictures(self.record))  # even if what comes next should fail

    def _state(self, stage: str) -> str:
        """What a graph is: "before" the passes, "after" one that rewrites it, "lowered", or ""."""
        if stage == "before":
            self._lowered = False
            return stage
        self._lowered |= stage == LowerPass.name
        if not self._lowered:
            return "after"
        return "lowered" if stage == CleanupPass.name else ""

    def around(self, inner_compile: Callable[..., Any]) -> Callable[..., Any]:
        """Code generation whose artefacts make the numeric check, where one is wanted."""
        return inner_compile if self.numeric is None else self.numeric.around(inner_compile)

    def draw(self) -> None:
        """Put the pictures into the record."""
        if self.album is not None:
            self.record.pictures = self.album.pictures(self.record)

    def finish(self, codes: Sequence[str]) -> None:
        """Say what there is to say of a compilation that has ended, and later of its check.

        Args:
            codes: what Inductor generated.
        """
        trace_report(self.record)
        dump = self.dump
        if dump is None:
            return
        dump.finish(self.record, codes)
        if self.numeric is not None:
            self.numeric.done = lambda: dump.finish(self.record, codes)

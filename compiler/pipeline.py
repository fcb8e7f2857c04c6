"""The passes of one compilation in order, as Inductor's `joint_custom_pre_pass`."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import dynamo_timed
from torch._inductor.custom_graph_pass import CustomGraphPass

from torch_cascade.compiler import calibration
from torch_cascade.compiler.graph import Sizes, show
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import Pass, PassContext, PassError
from torch_cascade.compiler.pass_list import known_of
from torch_cascade.compiler.record import Compilation
from torch_cascade.passes.blend import BlendPass
from torch_cascade.passes.bodies import body_records, is_body
from torch_cascade.passes.cascade import CascadePass
from torch_cascade.passes.cleanup import CleanupPass
from torch_cascade.passes.linears import LinearsPass
from torch_cascade.passes.lower import LowerPass
from torch_cascade.passes.uses import Uses
from torch_cascade.passes.verify import Runs, check_graph, check_lowered
from torch_cascade.runtime.ranks import group_sizes

logger = logging.getLogger(__name__)

# Kernels may keep tables of launch configurations beside their code.
_SOURCES = (".py", ".json")

_OURS: dict[str, Callable[[], Pass]] = {
    "cascade": CascadePass,
    "blend": BlendPass,
    "linears": LinearsPass,
}

UserPass = Callable[[fx.Graph], None]
Watch = Callable[[str, fx.Graph], None]
"""Sees the graph "before" the passes and after each, with the name of the pass; only reads it."""


def passes_of(options: Options, graph: fx.Graph) -> tuple[Pass, ...]:
    """The passes to run on a graph, in order."""
    early: list[Pass] = []
    late: list[Pass] = []
    for spec in options.passes:
        known = known_of(spec)
        made = _OURS[spec.name]() if known.type is None else known.make(dict(spec.options))
        (late if known.runs_after_lower else early).append(made)
    return (*early, LowerPass(), *late, CleanupPass(since=frozenset(graph.nodes)))


class Pipeline(CustomGraphPass):
    """Runs the passes on the functional graph that AOTAutograd hands to Inductor.

    A user's own `joint_custom_pre_pass` runs first. `uuid` is part of Inductor's cache key: it
    covers everything that can change the generated code.
    """

    def __init__(
        self,
        options: Options,
        record: Compilation,
        users: tuple[UserPass, ...] = (),
        watch: Watch | None = None,
    ) -> None:
        """The pipeline of one compilation."""
        self.options = options
        self.record = record
        self.users = users
        self.watch = watch
        self.ran = False

    def __call__(self, graph: fx.Graph) -> None:
        """Edit `graph` in place."""
        self.ran = True
        for user_pass in self.users:
            user_pass(graph)
        if not _has_tensors(graph):
            return
        if is_body(graph):
            self.record.sites += body_records(graph, Sizes.of(graph))
            return
        self.record.restart()
        self.record.before = self.record.after = show(graph, renamed=False)
        self._see("before", graph)
        checks = _Checks(Uses.of(graph)) if self.options.verify else None
        for each in passes_of(self.options, graph):
            self._run(each, graph, checks)
        graph.lint()

    def uuid(self) -> Any:
        """Hash of our sources, the options, the cost model's figures, groups of ranks, and others.

        It is chained with those of the user's passes, of passes of others that the options name,
        and of callables among the options. None (the compilation is not cached) where one of these
        has none.
        """
        given = (self.options.decide, self.options.selector)
        named = [(known_of(spec), spec) for spec in self.options.passes]
        made = [known.make(dict(spec.options)) for known, spec in named if known.type is not None]
        others = (*self.users, *made, *(value for value in given if callable(value)))
        theirs = [getattr(other, "uuid", lambda: None)() for other in others]
        if None in theirs:
            return None
        figures = calibration.key(self.options.calibration)
        ours = (source_hash(), self.options.fingerprint(), figures, group_sizes())
        return hashlib.sha256(repr((*ours, theirs)).encode()).hexdigest()

    def _run(self, each: Pass, graph: fx.Graph, checks: _Checks | None) -> None:
        options = self.options.of_pass(each.name)
        sizes = Sizes.of(graph, may_guard=options.guards == "auto")
        begin = time.perf_counter()
        with dynamo_timed(f"cascade.{each.name}"):  # `torch._dynamo.utils.compile_times` has it
            _apply(each, graph, PassContext(sizes, options, self.record))
        self.record.seconds[each.name] = time.perf_counter() - begin
        logger.debug("%s: %.1f ms", each.name, 1e3 * self.record.seconds[each.name])
        if LowerPass.name not in self.record.seconds:
            self.record.after = show(graph, renamed=False)
        if checks is not None:
            checks.look(graph, each)
        self._see(each.name, graph)

    def _see(self, stage: str, graph: fx.Graph) -> None:
        if self.watch is not None:
            self.watch(stage, graph)


@dataclass
class _Checks:
    """What `verify` knows of a graph: after a pass it runs what that pass has changed, no more."""

    uses: Uses
    right: Runs = field(default_factory=dict)

    def look(self, graph: fx.Graph, each: Pass) -> None:
        """Check the graph after a pass."""
        made = (node for node in graph.nodes if node not in self.uses.reads)
        self.right = check_graph(graph, after=each.name, earlier=self.right)
        check_lowered(made, after=each.name)
        self.uses = self.uses.check(graph, after=each.name, strides=each.keeps_strides)


def _apply(each: Pass, graph: fx.Graph, context: PassContext) -> None:
    """Run a pass; what a pass of others raises names it, as its graph may be half edited."""
    try:
        each.apply(graph, context)
    except Exception as error:
        if type(each).__module__.startswith(f"{__package__.partition('.')[0]}."):
            raise
        who = f"{type(each).__module__}.{type(each).__qualname__}"
        raise PassError(f"pass {each.name} ({who}): {type(error).__name__}: {error}") from error


def _has_tensors(graph: fx.Graph) -> bool:
    return any(isinstance(n.meta.get("val"), torch.Tensor) for n in graph.nodes)


@cache
def source_hash() -> str:
    """Hash of every source file of this package: a warm cache must not serve stale code."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("compiler", "passes", "runtime", "kernels"):
        files = (f for f in (root / folder).rglob("*") if f.suffix in _SOURCES)
        for file in sorted(files):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()

"""The passes of one compilation in order, as Inductor's `joint_custom_pre_pass`."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import dynamo_timed
from torch._inductor.custom_graph_pass import CustomGraphPass

from torch_cascade.compiler import calibration
from torch_cascade.compiler.graph import Sizes, show
from torch_cascade.compiler.option_values import KNOWN_PASSES
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.compiler.record import Compilation
from torch_cascade.passes.blend import BlendPass
from torch_cascade.passes.bodies import body_records, is_body
from torch_cascade.passes.cascade import CascadePass
from torch_cascade.passes.cleanup import CleanupPass
from torch_cascade.passes.lower import LowerPass
from torch_cascade.passes.verify import check_graph

logger = logging.getLogger(__name__)

# Kernels may keep tables of launch configurations beside their code.
_SOURCES = (".py", ".json")

UserPass = Callable[[fx.Graph], None]
Watch = Callable[[str, fx.Graph], None]
"""Sees the graph "before" the passes and after each, with the name of the pass; only reads it."""


def passes_of(options: Options, graph: fx.Graph) -> tuple[Pass, ...]:
    """The passes to run on a graph, in order."""
    known: dict[str, Pass] = {"cascade": CascadePass(), "blend": BlendPass()}
    chosen = (known[name] for name in KNOWN_PASSES if name in options.passes)
    return (*chosen, LowerPass(), CleanupPass(since=frozenset(graph.nodes)))


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
        sizes = Sizes.of(graph, may_guard=self.options.guards == "auto")
        context = PassContext(sizes, self.options, self.record)
        for each in passes_of(self.options, graph):
            self._run(each, graph, context)
        graph.lint()

    def uuid(self) -> Any:
        """Hash of this package's sources, the options, the figures of the cost model, and others.

        It is chained with those of the user's passes, and of callables among the options. None (the
        compilation is not cached) where one of these has none.
        """
        given = (self.options.decide, self.options.selector)
        others = (*self.users, *(value for value in given if callable(value)))
        theirs = [getattr(other, "uuid", lambda: None)() for other in others]
        if None in theirs:
            return None
        figures = calibration.key(self.options.calibration)
        ours = (source_hash(), self.options.fingerprint(), figures)
        return hashlib.sha256(repr((*ours, theirs)).encode()).hexdigest()

    def _run(self, each: Pass, graph: fx.Graph, context: PassContext) -> None:
        begin = time.perf_counter()
        with dynamo_timed(f"cascade.{each.name}"):  # `torch._dynamo.utils.compile_times` has it
            each.apply(graph, context)
        self.record.seconds[each.name] = time.perf_counter() - begin
        logger.debug("%s: %.1f ms", each.name, 1e3 * self.record.seconds[each.name])
        if each.name in KNOWN_PASSES:
            self.record.after = show(graph, renamed=False)
        if self.options.verify:
            check_graph(graph, after=each.name)
        self._see(each.name, graph)

    def _see(self, stage: str, graph: fx.Graph) -> None:
        if self.watch is not None:
            self.watch(stage, graph)


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

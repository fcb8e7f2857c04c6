"""Writes a blend into the graph: scores, rows, what is made of them; undone if that raises."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing

from torch_cascade.compiler.graph import Emitter, Sizes, fake_mode, value
from torch_cascade.compiler.pass_base import ROLE, STAGE
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.blend_ahead import Ahead, emit_ahead, mean_of
from torch_cascade.passes.blend_exits import Exits
from torch_cascade.passes.blend_plan import BlendPlan, Stage
from torch_cascade.passes.blend_question import emit_question
from torch_cascade.passes.blend_site import ReuseSite
from torch_cascade.passes.inline import Call, Inliner
from torch_cascade.passes.token_apply import MadeRows, Narrowed, apply_rows
from torch_cascade.passes.token_frontier import ancestors, contracts
from torch_cascade.passes.token_ranks import has_effect
from torch_cascade.passes.trace import TraceError
from torch_cascade.runtime.ranks import Ranks
from torch_cascade.runtime.reading import Reading
from torch_cascade.runtime.row_choice import Layer, choose_rows
from torch_cascade.runtime.selection import EXPECTED, Selector, SelectorError, selector_name

aten = torch.ops.aten


def emit_blend(graph: fx.Graph, plan: BlendPlan, selector: Selector, sizes: Sizes) -> int:
    """Rewrite the graph, or leave it as it was and raise.

    Returns:
        Through how many layers the fresh tokens run ahead: none if the selector does not ask.
    """
    with _undone_on_error(graph) as kept:
        made: MadeRows | None = None
        inliner = Inliner(graph, sizes)
        before: Stage | None = None
        first = Emitter(plan.stages[0].marker or plan.site.markers[0])
        wanted = [found.wanted(first, plan.site) for found in plan.exits.picked]
        named = first.call(aten.cat.default, wanted, 1) if wanted else None
        looked: list[fx.Node] = []
        if isinstance(plan.ahead, Ahead):
            looked = emit_ahead(inliner, plan.ahead, plan.site)
        for stage in plan.stages:
            layer = (*_layer(plan.site, stage, before, made), named, _later(plan, stage, looked))
            index, places = _chosen(inliner, plan, stage, layer, made, selector)
            narrowed = None if made is None else Narrowed(made, places)
            made, before = apply_rows(stage.plan, index, narrowed=narrowed), stage
        assert made is not None
        written = _results(plan.exits, made, wanted)
        _revalue(graph, written)
        _check(graph, plan, kept)
    unread = plan.frontier.below | {node for node in graph.nodes if node not in kept}
    graph.eliminate_dead_code(lambda node: has_effect(node, unread))
    alive = set(graph.nodes)
    return sum(node in alive for node in looked)


def _results(exits: Exits, made: MadeRows, wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """What leaves the graph, written again of its rows and put in its place."""
    written = [(x.node, x.of_rows(made.of(*x.demand))) for x in exits.tokens]
    written += [
        (x.node, x.of_rows(made.of(*x.demand), made.index, named))
        for x, named in zip(exits.picked, wanted, strict=True)
    ]
    for node, new in written:
        node.replace_all_uses_with(new)
    return [new for _, new in written]


def _revalue(graph: fx.Graph, changed: Sequence[fx.Node]) -> None:
    """Values of all that is computed from some nodes: few rows lie closer than many."""
    stale, mode = set(changed), fake_mode(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not any(n in stale for n in node.all_input_nodes):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        with tracing(None), mode:
            node.meta["val"] = node.target(*args, **kwargs)
        stale.add(node)


def _check(graph: fx.Graph, plan: BlendPlan, kept: Collection[fx.Node]) -> None:
    """Nothing that is alive may compute all tokens from the check layer's attention on."""
    below = plan.frontier.below
    roots = (n for n in graph.nodes if n.op == "output" or has_effect(n, below))
    alive = ancestors(roots)
    of_rows: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in kept or any(source in of_rows for source in node.all_input_nodes):
            of_rows.add(node)
        elif node in alive and node in plan.frontier.below and contracts(node.target):
            raise AssertionError(f"{node.name} still computes all tokens below the check layer")


def _layer(
    site: ReuseSite, stage: Stage, before: Stage | None, made: MadeRows | None
) -> tuple[Any, ...]:
    """What the rows of a stage are chosen by: keys, values, and which tokens these are."""
    marker = stage.marker or site.markers[0]
    k, v, k_cached, v_cached, *_ = marker.args
    if stage.marker is None:
        k, v = k_cached, v_cached  # for their sizes: nothing is computed of them
    elif before is not None and made is not None:
        k, v = (made.rows[demand] for demand in before.plan.barriers[stage.marker])
    kept = None if made is None else made.index
    return k, v, k_cached, v_cached, site.fresh_rows, site.chunks, kept


def _later(plan: BlendPlan, stage: Stage, looked: Sequence[fx.Node]) -> fx.Node | None:
    """Where the fresh tokens look in the layers below a stage."""
    below = looked[len(looked) - (len(plan.site.markers) - 1 - stage.layer) :]
    if not below or stage.marker is None or not isinstance(plan.ahead, Ahead):
        return None
    return mean_of(Emitter(plan.ahead.anchor), below)


def _chosen(
    inliner: Inliner,
    plan: BlendPlan,
    stage: Stage,
    layer: tuple[Any, ...],
    made: MadeRows | None,
    selector: Selector,
) -> tuple[fx.Node, fx.Node]:
    """The rows of a stage, and their places among those of the one before."""
    anchor = stage.marker or plan.site.markers[0]
    if isinstance(plan.ahead, Ahead) and stage is plan.stages[0]:
        anchor = plan.ahead.anchor  # below what was written to look ahead
    tensors: tuple[fx.Node | None, ...] = ()
    unseen = plan.unseen(stage)
    choice = _Choice(
        selector if stage.ratio else None,
        ranks=plan.ranks,
        unseen="" if unseen is None else str(unseen),
    )
    if isinstance(stage.question, Declined):
        choice = replace(choice, unknown=str(stage.question))
    elif stage.question is not None and stage.ratio:
        anchor = stage.question.asking.attention
        asked = emit_question(stage.question, plan.site, anchor, made)
        tensors = asked.q, asked.k, asked.v, asked.mask
        differs = stage.question.asking.differs
        choice = replace(
            choice,
            is_causal=asked.is_causal,
            scale=asked.scale,
            flat=asked.flat,
            differs="" if differs is None else str(differs),
        )
    emit = Emitter(anchor)
    counts = emit.size(stage.count), emit.size(plan.exits.last)
    kept = set(plan.site.markers[0].graph.nodes)
    try:
        index, places = inliner.inline(Call(choice, (layer, tensors, *counts)), anchor)
    except TraceError as error:
        raise SelectorError(f"selector {selector_name(selector)}: {error}. {EXPECTED}") from error
    for node in plan.site.markers[0].graph.nodes:
        if node not in kept:
            node.meta[ROLE] = "choice"
    index.meta[STAGE] = stage.layer
    return index, places


@dataclass(frozen=True)
class _Choice:
    """What is traced into the graph: `choose_rows` on the tensors of a stage.

    Attributes:
        selector: None where nothing but forced rows is wanted.
        is_causal, scale, flat: of `Reading`.
        unknown: why it cannot be had.
        differs: why cached keys and values cannot take the place of those that it reads.
        unseen: why the layers to come cannot be looked at.
        ranks: that choose together.
    """

    selector: Selector | None
    is_causal: bool = False
    scale: float | None = None
    flat: bool = False
    unknown: str = ""
    differs: str = ""
    unseen: str = ""
    ranks: Ranks | None = None

    def __call__(
        self,
        layer: tuple[Any, ...],
        tensors: tuple[Any, ...],
        count: Any,
        exits: Any,
    ) -> tuple[Tensor, Tensor]:
        known = replace(Layer(*layer), ranks=self.ranks, unseen=self.unseen)

        @cache
        def reading() -> Reading:
            if not tensors:
                raise SelectorError(f"how the prompt is read is not known here: {self.unknown}")
            q, k, v, mask = tensors
            return Reading(
                q,
                k,
                v,
                mask,
                known.fresh_rows,
                known.chunks,
                is_causal=self.is_causal,
                scale=self.scale,
                flat=self.flat,
                differs=self.differs,
            )

        return choose_rows(known, count, exits, self.selector, reading)


@contextmanager
def _undone_on_error(graph: fx.Graph) -> Iterator[Collection[fx.Node]]:
    """Give every node its arguments and its place back and erase the new ones on an error."""
    kept = {node: (node.args, node.kwargs, node.meta.get("val")) for node in graph.nodes}
    try:
        yield kept
    except BaseException:
        for node, (args, kwargs, held) in kept.items():
            node.args, node.kwargs = args, kwargs
            if "val" in node.meta:
                node.meta["val"] = held
        for node in reversed(list(graph.nodes)):
            if node not in kept:
                graph.erase_node(node)
        for before, node in pairwise(kept):
            before.append(node)
        raise

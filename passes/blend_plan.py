"""Plans a blend: at which layers rows are chosen, and how all that follows is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import fx
from torch.utils._sympy.functions import FloorDiv, Min

from torch_cascade.compiler.graph import Size, Sizes, size_expr
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.blend_ahead import Ahead, plan_ahead
from torch_cascade.passes.blend_exits import Exits, Maximum, find_exits
from torch_cascade.passes.blend_question import Question, plan_question
from torch_cascade.passes.blend_site import ReuseSite
from torch_cascade.passes.token_axis import RowPlan, plan_rows
from torch_cascade.passes.token_frontier import Frontier
from torch_cascade.passes.token_ranks import ranks_of
from torch_cascade.passes.token_rows import Demand
from torch_cascade.runtime.ranks import Ranks

Minimum: Any = Min  # torch's, as above


@dataclass(frozen=True)
class Stage:
    """From one check layer to the next, or to the end.

    Attributes:
        layer: number of the check layer; -1 before all.
        ratio: share of the cached tokens that is kept there.
        marker: of the check layer; None before all.
        count: K, the rows that are computed from here on.
        plan: how.
        question: the fresh tokens' queries there, for a selector that may ask for them; or why
            they are not to be had.
    """

    layer: int
    ratio: Fraction
    marker: fx.Node | None
    count: Size
    plan: RowPlan
    question: Question | Declined | None = None


@dataclass(frozen=True)
class BlendPlan:
    """A blend of one graph; nothing is edited yet.

    Attributes:
        site: the marked layers.
        frontier: what is computed in full: all up to the first check layer.
        exits: what leaves the graph.
        stages: in order.
        ranks: that have to choose the same rows; None for no others.
        ahead: how the fresh tokens run ahead, for a selector that looks where they look then; or
            why they cannot.
    """

    site: ReuseSite
    frontier: Frontier
    exits: Exits
    stages: tuple[Stage, ...]
    ranks: Ranks | None = None
    ahead: Ahead | Declined | None = None

    def unseen(self, stage: Stage) -> Declined | None:
        """Why the selector of a stage cannot be told where the fresh tokens look later."""
        if isinstance(self.ahead, Ahead):
            return self.ahead.unseen(stage.marker)
        return self.ahead


def plan_blend(
    graph: fx.Graph,
    site: ReuseSite,
    stages: Sequence[tuple[int, Fraction]],
    sizes: Sizes,
    *,
    asks: bool = False,
    looks_ahead: bool = False,
) -> BlendPlan | Declined:
    """Plan all stages, or say why that is not possible.

    Args:
        graph: functional ATen with `meta["val"]`; it is only read.
        site: its marked layers.
        stages: (layer, ratio) as `Options.stages` gives them.
        sizes: facts about the sizes.
        asks: the selector may ask what the fresh tokens look at.
        looks_ahead: in later layers, too.
    """
    markers = _checks(site, stages)
    if isinstance(markers, Declined):
        return markers
    frontier = Frontier.of(graph, markers[0])
    exits = find_exits(graph, site, frontier, markers[0], sizes)
    if isinstance(exits, Declined):
        return exits
    planned: list[Stage] = []
    earlier: set[Demand] = set()
    for place, (layer, ratio) in enumerate(stages):
        last = place == len(stages) - 1
        wanted = exits.markers if last else (markers[place + 1],)
        plan = plan_rows(
            graph,
            frontier,
            tokens=site.tokens,
            batch=site.each,
            rows=exits.demands if last else (),
            whole=[user for marker in wanted if marker for user in marker.users],
            earlier=earlier,
            sizes=sizes,
        )
        if isinstance(plan, Declined):
            return plan
        marker, question = markers[place], None
        if asks and marker is not None:
            question = plan_question(graph, site, frontier, marker, earlier, sizes)
        earlier = {step.demand for step in plan.steps}
        count = row_count(site, ratio, exits.others)
        planned.append(Stage(layer, ratio, marker, count, plan, question))
    ahead = None
    if looks_ahead and markers[0] is not None:
        ahead = plan_ahead(graph, site, frontier, markers[0], sizes)
    plans = [stage.plan for stage in planned]
    ranks = ranks_of([*plans, ahead.plan] if isinstance(ahead, Ahead) else plans)
    if isinstance(ranks, Declined):
        return ranks
    return BlendPlan(site, frontier, exits, tuple(planned), ranks, ahead)


def _checks(
    site: ReuseSite, stages: Sequence[tuple[int, Fraction]]
) -> list[fx.Node | None] | Declined:
    layers = len(site.markers)
    for layer, _ in stages:
        if layer >= layers:
            detail = f"check layer {layer}, but the graph has layers 0 to {layers - 1}"
            return Declined(Reason.CHECK_LAYER, site.markers[-1].name, detail)
    return [None if layer < 0 else site.markers[layer] for layer, _ in stages]


def row_count(site: ReuseSite, ratio: Fraction, others: Size) -> Size:
    """K: all fresh tokens and the ratio of the cached ones, rounded up to one.

    At least `others` of the cached ones, which are asked for: of these none may be fresh, as far as
    the graph knows.
    """
    ratio_of = ratio.numerator * site.cached + (ratio.denominator - 1)
    chosen = size_expr(FloorDiv(ratio_of, ratio.denominator))
    if others != 0:
        chosen = Minimum(site.cached, Maximum(chosen, others))
    return site.fresh + chosen

"""The blend pass: cached keys and values are reused, and the tokens that need it recomputed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from torch_cascade.compiler.decide import Decision
from torch_cascade.compiler.decide_reuse import decide_reuse
from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.option_values import written
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.compiler.record import BlendRecord, StageRecord, source_line
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.blend_emit import emit_blend
from torch_cascade.passes.blend_plan import BlendPlan, Stage, plan_blend
from torch_cascade.passes.blend_question import Question
from torch_cascade.passes.blend_site import ReuseSite, find_reuse, markers_of
from torch_cascade.passes.failures import Failures
from torch_cascade.runtime.selection import (
    ASKING,
    NEEDS_CHUNKS,
    SelectorError,
    looks_ahead,
    resolve,
    selector_name,
)


@dataclass(frozen=True)
class BlendPass(Pass):
    """Computes some tokens of a prefill whose layers are marked by `cascade::reuse_kv`.

    Before, in each layer, all T tokens of the prompt are computed:

        k, v = cascade.reuse_kv(k, v, k_cached, v_cached, fresh_rows)
        o = cascade.sdpa(q, k, v, is_causal=True)

    After, up to the check layer c the same; there the rows are chosen, and from its attention on
    all is computed for these K rows only:

        index = sort(top K of selector(k, v, k_cached, v_cached)) at layer c
        k = scatter(k_cached, index, k rows), v = scatter(v_cached, index, v rows)    below c
        o = cascade.sdpa(q rows, k, v, mask: key j <= index)

    Assumes that results below layer c are asked for the last tokens only, and that nothing but
    attention mixes tokens there; both are proved, else the graph stays as it is. Positions and
    masks are those of the tokens themselves. With nothing cached, or ratio 1, it is the same
    function up to rounding; otherwise it is CacheBlend's approximation (arXiv 2405.16444, section
    4).
    """

    name: ClassVar[str] = "blend"
    keeps_strides: ClassVar[bool] = False  # the last tokens are sliced from fewer rows

    def apply(self, graph: fx.Graph, context: PassContext) -> None:
        """Plan all layers together, decide, then rewrite them or none."""
        markers = markers_of(graph)
        if not markers:
            return
        failures = Failures(context.options.strict, (SelectorError,))
        blend = failures.guarded(markers[0], _blended, graph, markers, context)
        if isinstance(blend, Declined):
            blend = _record(markers, context, declined=blend)
        context.record.blend = blend
        failures.warn("pass blend")


def _blended(graph: fx.Graph, markers: tuple[fx.Node, ...], context: PassContext) -> BlendRecord:
    """Rewrite the graph if that is possible and pays; what is said of it."""
    options, sizes = context.options, context.sizes
    site = find_reuse(markers, sizes)
    if isinstance(site, Declined):
        return _record(markers, context, declined=site)
    decision = decide_reuse(site.cached, options.stages()[0][1], sizes, options)
    plan = _plan(graph, site, context) if decision.apply or options.decide == "never" else None
    if isinstance(plan, Declined):
        return _record(markers, context, site=site, decision=decision, declined=plan)
    record = _record(markers, context, site=site, plan=plan, decision=decision)
    if record.declined is None and plan is not None:
        ahead = emit_blend(graph, plan, resolve(options.selector), sizes)
        return replace(record, ahead=ahead)
    return record


def _plan(graph: fx.Graph, site: ReuseSite, context: PassContext) -> BlendPlan | Declined:
    options = context.options
    if options.selector in NEEDS_CHUNKS and site.chunks is None:
        detail = f"{options.selector} needs chunks"
        return Declined(Reason.SELECTOR, site.markers[0].name, detail)
    asks = callable(options.selector) or options.selector in ASKING
    plan = plan_blend(
        graph,
        site,
        options.stages(),
        context.sizes,
        asks=asks,
        looks_ahead=looks_ahead(options.selector),
    )
    if isinstance(plan, Declined):
        return plan
    unasked = _unasked(plan, options)  # a decline is false
    return plan if unasked is None else unasked


def _unasked(plan: BlendPlan, options: Options) -> Declined | None:
    """Why a named selector cannot be told what it asks. A callable is told if it asks."""
    if callable(options.selector):
        return None
    asked = [stage.question for stage in plan.stages if stage.question is not None]
    changes = options.selector == "change"
    differ = [q.asking.differs for q in asked if changes and isinstance(q, Question)]
    unseen = [plan.unseen(stage) for stage in plan.stages if stage.ratio]
    unknown = [x for x in (*asked, *differ, *unseen) if isinstance(x, Declined)]
    return unknown[0] if unknown else None


def _record(
    markers: tuple[fx.Node, ...],
    context: PassContext,
    *,
    site: ReuseSite | None = None,
    plan: BlendPlan | None = None,
    decision: Decision | None = None,
    declined: Declined | None = None,
) -> BlendRecord:
    if decision is not None and decision.reason is not None and declined is None:
        declined = Declined(decision.reason, markers[0].name, decision.why)
    applied = declined is None and plan is not None
    return BlendRecord(
        where=source_line(markers[0]),
        node=markers[0].name,
        layers=tuple(_use(i, plan if applied else None) for i in range(len(markers))),
        tokens="" if site is None else str(site.tokens),
        fresh="" if site is None else str(site.fresh),
        selector=selector_name(context.options.selector),
        stages=() if plan is None else tuple(_stage(s, context.sizes) for s in plan.stages),
        decision=decision,
        declined=declined,
    )


def _use(layer: int, plan: BlendPlan | None) -> str:
    """What becomes of a layer."""
    checks = [] if plan is None else [stage.layer for stage in plan.stages]
    if not checks or layer < checks[0]:
        return "computed"
    return "checked" if layer in checks else "reused"


def _stage(stage: Stage, sizes: Sizes) -> StageRecord:
    rows = str(stage.count)
    return StageRecord(stage.layer, written(stage.ratio), rows, sizes.hint(stage.count))

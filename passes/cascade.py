"""The cascade pass: attention over an expanded batch becomes attention a segment, and one merge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from torch_cascade.compiler.calibration import CalibrationError
from torch_cascade.compiler.decide import DecideError, Decision, cheapest, decide
from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.compiler.price import time_text
from torch_cascade.compiler.record import SiteRecord, source_line
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.attention import find_attention
from torch_cascade.passes.blend_site import reads_marker
from torch_cascade.passes.describe import describe_scores, describe_segment, describe_shapes
from torch_cascade.passes.emit import emit_cascade
from torch_cascade.passes.failures import Failures
from torch_cascade.passes.joins import alternatives
from torch_cascade.passes.levels import at_most
from torch_cascade.passes.mask import MaskReader
from torch_cascade.passes.plan import CascadePlan, limit_rows, plan, resolve
from torch_cascade.passes.prefix import Segment, batch_size
from torch_cascade.passes.site import AttentionSite


@dataclass(frozen=True)
class CascadePass(Pass):
    """Rewrites attention over a batch that was expanded from shared KV rows.

    Before, with T branches a request:

        k = cat([repeat_interleave(prefix_k, T), suffix_k], 2)
        v = cat([repeat_interleave(prefix_v, T), suffix_v], 2)
        o = cascade.sdpa(q, k, v)

    After:

        o0, lse0 = cascade.attend(q, prefix_k, prefix_v, branches=T)
        o1, lse1 = cascade.attend(q, suffix_k, suffix_v)
        o, lse = cascade.merge([o0, o1], [lse0, lse1])

    Assumes nothing that is not proved on the graph: a site whose sharing, masks or layout cannot be
    proved is left as it is, with the reason in the record. Exact: both sides are the same function
    (Hydragen, Juravsky et al. 2024, section 3.1; FlashInfer's cascade inference).
    """

    name: ClassVar[str] = "cascade"

    def apply(self, graph: fx.Graph, context: PassContext) -> None:
        """Plan every site, decide, then rewrite those that pay, the last one first.

        The plan of a site names nodes above it. One of them may be another attention (its query,
        say), so that must still be there: it is emitted later.
        """
        failures = Failures(context.options.strict, (CalibrationError, DecideError))
        found = failures.guarded(None, find_attention, graph, context.sizes, failures)
        sites = [found] if isinstance(found, Declined) else found
        reader = MaskReader(context.sizes)
        verdicts = [self._verdict(graph, site, reader, context, failures) for site in sites]
        records = [_emitted(*verdict, context.sizes, failures) for verdict in reversed(verdicts)]
        context.record.add(records[::-1])
        if any(accepted is not None for _, accepted in verdicts):
            graph.eliminate_dead_code()  # the expansion that nobody reads any more
        failures.warn("pass cascade")

    def _verdict(
        self,
        graph: fx.Graph,
        site: AttentionSite | Declined,
        reader: MaskReader,
        context: PassContext,
        failures: Failures,
    ) -> tuple[SiteRecord, CascadePlan | None]:
        """What is said of one site, and the plan if it is to be applied."""
        if isinstance(site, Declined):
            nodes = (n for n in graph.nodes if n.name == site.node)
            where = site.where or next(map(source_line, nodes), "")
            return SiteRecord(site.node, where, form="eager", declined=site), None
        judged = failures.guarded(site.node, _judged, site, reader, context)
        if isinstance(judged, Declined):
            failed = SiteRecord(site.node.name, judged.where, form=site.form, declined=judged)
            return failed, None
        return judged


def _judged(
    site: AttentionSite, reader: MaskReader, context: PassContext
) -> tuple[SiteRecord, CascadePlan | None]:
    resolved = resolve(site, context.sizes)
    if isinstance(resolved, Declined):
        return _site_record(site, (), reader, None, _refined(site, resolved, context)), None
    resolved = at_most(context.options.levels, resolved, batch_size(site), context.sizes)
    planned = plan(site, resolved, reader, context.sizes)
    if isinstance(planned, Declined):
        return _site_record(site, resolved, reader, None, planned), None
    plans = [planned, *alternatives(planned, reader, context.sizes)]
    works = [each.work for each in plans]
    chosen = plans[cheapest(works, context.sizes, context.options)]
    decision = decide(chosen.work, context.sizes, context.options)
    refusal = _refusal(site, decision)
    record = _site_record(site, _as_read(resolved, chosen), reader, decision, refusal)
    return record, chosen if refusal is None else None


def _as_read(resolved: tuple[Segment, ...], chosen: CascadePlan) -> tuple[Segment, ...]:
    """The segments, each as the plan reads it."""
    spread = {id(s.source): s for part in chosen.parts for s in part.segments if s.source}
    return tuple(spread.get(id(segment), segment) for segment in resolved)


def _refined(site: AttentionSite, declined: Declined, context: PassContext) -> Declined:
    """Nothing shared is no news of a prompt that is blended: the pass blend has its own say."""
    blends = any(spec.name == "blend" for spec in context.options.passes)
    of_blend = declined.reason is Reason.NO_SHARED_PREFIX and blends
    if not (of_blend and reads_marker(site.k.node)):
        return declined
    return Declined(Reason.OF_BLEND, site.node.name)


def _emitted(
    record: SiteRecord, accepted: CascadePlan | None, sizes: Sizes, failures: Failures
) -> SiteRecord:
    """Apply an accepted plan; what is then said of the site."""
    if accepted is None:
        return record
    result = failures.guarded(accepted.site.node, _emit_or_undo, accepted, sizes)
    return replace(record, declined=result) if isinstance(result, Declined) else record


def _emit_or_undo(accepted: CascadePlan, sizes: Sizes) -> fx.Node:
    """Emit; on an exception erase the nodes made so far, which stand right before the site."""
    node, above = accepted.site.node, accepted.site.node.prev
    done = False
    try:
        out = emit_cascade(accepted, sizes)
        done = True
        return out
    finally:
        while not done and node.prev is not above:
            node.graph.erase_node(node.prev)


def _site_record(
    site: AttentionSite,
    resolved: tuple[Segment, ...],
    reader: MaskReader,
    decision: Decision | None,
    declined: Declined | None,
) -> SiteRecord:
    return SiteRecord(
        node=site.node.name,
        where=source_line(site.node),
        form=site.form,
        shapes=describe_shapes(site),
        scores=describe_scores(site),
        segments=tuple(
            describe_segment(s, reader.segment(site, s.start, s.length, limit_rows(site, s)))
            for s in resolved
        ),
        decision=decision,
        declined=declined,
    )


def _refusal(site: AttentionSite, decision: Decision) -> Declined | None:
    if decision.apply:
        return None
    assert decision.reason is not None
    numbers = ""
    if decision.facts is not None:
        times = (f"{n} {time_text(way.seconds)}" for n, way in decision.facts.ways().items())
        numbers = f" ({', '.join(times)})"
    return Declined(decision.reason, site.node.name, f"{decision.why}{numbers}")

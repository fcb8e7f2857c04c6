"""The cascade pass: attention over an expanded batch becomes attention a segment, and one merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from torch_cascade.compiler.cost import Decision, decide
from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.compiler.record import SiteRecord, source_line
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.attention import find_attention
from torch_cascade.passes.describe import describe_segment, describe_shapes
from torch_cascade.passes.emit import emit_cascade
from torch_cascade.passes.mask import MaskReader
from torch_cascade.passes.plan import CascadePlan, plan, resolve
from torch_cascade.passes.prefix import Segment
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
        """Plan every site, decide, then rewrite those that pay."""
        reader = MaskReader(context.sizes)
        found = find_attention(graph, context.sizes)
        verdicts = [self._verdict(graph, site, reader, context) for site in found]
        for record, accepted in verdicts:
            if accepted is not None:
                emit_cascade(accepted, context.sizes)
            context.record.sites.append(record)

    def _verdict(
        self,
        graph: fx.Graph,
        site: AttentionSite | Declined,
        reader: MaskReader,
        context: PassContext,
    ) -> tuple[SiteRecord, CascadePlan | None]:
        """What is said of one site, and the plan if it is to be applied."""
        if isinstance(site, Declined):
            where = next((source_line(n) for n in graph.nodes if n.name == site.node), "")
            return SiteRecord(site.node, where, form="eager", declined=site), None
        resolved = resolve(site, context.sizes)
        if isinstance(resolved, Declined):
            return _site_record(site, (), reader, None, resolved), None
        planned = plan(site, resolved, reader, context.sizes)
        if isinstance(planned, Declined):
            return _site_record(site, resolved, reader, None, planned), None
        decision = decide(planned.work, context.sizes, context.options)
        refusal = _refusal(site, decision)
        record = _site_record(site, resolved, reader, decision, refusal)
        return record, planned if refusal is None else None


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
        segments=tuple(
            describe_segment(s, reader.segment(site, s.start, s.length)) for s in resolved
        ),
        decision=decision,
        declined=declined,
    )


def _refusal(site: AttentionSite, decision: Decision) -> Declined | None:
    if decision.apply:
        return None
    assert decision.reason is not None
    numbers = f"naive {decision.naive} bytes, cascade {decision.cascade} bytes"
    return Declined(decision.reason, site.node.name, f"{decision.why} ({numbers})")

"""Bodies of higher-order ops (cond, map, nested_compile_region): looked at, never rewritten.

A body may serve several call sites, and what its inputs look like at one of them proves nothing of
the others. Inductor runs its joint passes on each body before the graph around it.
"""

from __future__ import annotations

from torch import fx

from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.record import SiteRecord, source_line
from torch_cascade.compiler.report import EXPLANATIONS, Declined, Reason
from torch_cascade.passes.attention import find_attention
from torch_cascade.passes.failures import Failures


def is_body(graph: fx.Graph) -> bool:
    """True for the graph of a higher-order op's body.

    AOTAutograd describes the inputs of the graph it hands over (`meta["desc"]`); those of a body
    are nodes it traced, with their provenance.
    """
    inputs = graph.find_nodes(op="placeholder")
    described = any("desc" in node.meta for node in inputs)
    return not described and any("from_node" in node.meta for node in inputs)


def body_records(graph: fx.Graph, sizes: Sizes) -> list[SiteRecord]:
    """One decline for each hand-written attention of a body (SDPA calls are seen at capture)."""
    failures = Failures(strict=False)
    found = find_attention(graph, sizes, failures)
    failures.warn("search of a body")
    nodes = {node.name: node for node in graph.nodes}
    names = [site.node if isinstance(site, Declined) else site.node.name for site in found]
    return [_record(nodes[name]) for name in names if name in nodes]


def _record(node: fx.Node) -> SiteRecord:
    reason, where = Reason.HIGHER_ORDER_BODY, source_line(node)
    remedy = EXPLANATIONS[reason].remedy
    declined = Declined(reason, node.name, "hand-written attention in a body", remedy, where)
    return SiteRecord(node.name, where, declined=declined)

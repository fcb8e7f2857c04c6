"""The fresh tokens run ahead: through every later layer over the cached copies, before the choice.

What a prompt is asked for shows in later layers, which a check layer does not see. The fresh tokens
are few, so they are computed twice: once over what is cached, to see where they look, and once
over what was then recomputed.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from torch_cascade.compiler.graph import Emitter, Sizes
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.attention import bound_arguments
from torch_cascade.passes.blend_question import Asked, Asking, asked_of, asking_of, unknown
from torch_cascade.passes.blend_site import ReuseSite
from torch_cascade.passes.inline import Call, Inliner
from torch_cascade.passes.token_apply import MadeRows, apply_rows
from torch_cascade.passes.token_axis import RowPlan, plan_rows
from torch_cascade.passes.token_frontier import Frontier, ancestors, contracts
from torch_cascade.passes.token_rows import Demand
from torch_cascade.runtime.reading import Reading

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Ahead:
    """The fresh tokens' rows of all layers below a check, planned.

    Attributes:
        anchor: the attention of the check layer, before which all is written.
        frontier: of the check layer.
        layers: those below it.
        plan: how their rows are made.
    """

    anchor: fx.Node
    frontier: Frontier
    layers: tuple[Asking, ...]
    plan: RowPlan

    def unseen(self, check: fx.Node | None) -> Declined | None:
        """Why there is nothing to look at below a later check layer; None where there is."""
        return _nothing_below(check) if check is self.layers[-1].marker else None


def plan_ahead(
    graph: fx.Graph, site: ReuseSite, frontier: Frontier, check: fx.Node, sizes: Sizes
) -> Ahead | Declined:
    """Plan the rows of the fresh tokens in all layers below a check.

    Args:
        graph: functional ATen; it is only read.
        site: the marked layers.
        frontier: of the check layer.
        check: its marker.
        sizes: facts about the sizes.
    """
    markers = site.markers[site.markers.index(check) + 1 :]
    if not markers:
        return _nothing_below(check)
    first, *layers = [asking_of(marker, site, sizes) for marker in (check, *markers)]
    found: list[Asking] = []
    for asking in layers:
        if isinstance(asking, Declined):
            return asking
        found.append(asking)
    if isinstance(first, Declined):
        return first
    plan = _planned(graph, site, frontier, found, sizes)
    if isinstance(plan, Declined):
        return plan
    return Ahead(first.attention, frontier, tuple(found), plan)


def _nothing_below(check: fx.Node) -> Declined:
    return unknown(check, "there is no layer below the check layer to look ahead at")


def _planned(
    graph: fx.Graph, site: ReuseSite, frontier: Frontier, layers: Sequence[Asking], sizes: Sizes
) -> RowPlan | Declined:
    return plan_rows(
        graph,
        frontier,
        tokens=site.tokens,
        batch=site.each,
        rows=[demand for asking in layers for demand in asking.demands],
        whole=[bound_arguments(asking.attention)["k"] for asking in layers],
        sizes=sizes,
    )


def emit_ahead(inliner: Inliner, ahead: Ahead, site: ReuseSite) -> list[fx.Node]:
    """Write the rows; for each layer the highest probability that a fresh token gives each key.

    Rows are written in place of values. The values stay where they are, for the tokens that will be
    chosen, so it is copies of them that get rows here.

    Args:
        inliner: of the graph.
        ahead: planned in it.
        site: the marked layers.

    Returns:
        Of each layer below the check, float [N, L].
    """
    graph, sizes = inliner.graph, inliner.sizes
    copies = _copied(graph, ahead)
    below = frozenset(copies.values())
    layers = [_of_copies(asking, copies) for asking in ahead.layers]
    frontier = replace(ahead.frontier, below=below)
    plan = _planned(graph, site, frontier, layers, sizes)
    assert not isinstance(plan, Declined), f"planned for the originals: {plan}"
    made = apply_rows(plan, site.fresh_rows)
    peaks = []
    for asking in layers:
        asked = asked_of(asking, site, made, made.fused[asking.marker])
        peaks.append(_peaks(inliner, ahead, site, asked, _logarithms(asking, made)))
    _erase(graph, below)
    return peaks


def _copied(graph: fx.Graph, ahead: Ahead) -> dict[fx.Node, fx.Node]:
    """Copies of what the layers are computed by, before the anchor; what they share moves there."""
    wanted = {node for asking in ahead.layers for node, _ in asking.demands}
    wanted |= {asking.attention for asking in ahead.layers}
    needed = wanted | ancestors(wanted)
    copies: dict[fx.Node, fx.Node] = {}
    below, passed = ahead.frontier.below, False
    for node in list(graph.nodes):
        passed |= node is ahead.anchor
        if node not in needed or node.op == "placeholder":
            continue
        if node in below:
            with graph.inserting_before(ahead.anchor):
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
        elif passed:
            ahead.anchor.prepend(node)
    return copies


def _of_copies(asking: Asking, copies: dict[fx.Node, fx.Node]) -> Asking:
    def moved(demand: Demand) -> Demand:
        return copies.get(demand[0], demand[0]), demand[1]

    mask = None if asking.mask is None else moved(asking.mask)
    marker, attention = copies[asking.marker], copies[asking.attention]
    return replace(asking, marker=marker, attention=attention, q=moved(asking.q), mask=mask)


def _logarithms(asking: Asking, made: MadeRows) -> fx.Node | None:
    """The log-sum-exp of the rows' scores: what attention of the same rows computes beside them."""
    out = made.rows.get((asking.attention, asking.q[1]))
    if out is not None and out.target is prims.convert_element_type.default:
        out = out.args[0]  # type: ignore[assignment]
    if out is None or out.target is not operator.getitem:
        return None
    pair = out.args[0]
    assert isinstance(pair, fx.Node)
    if pair.target is not torch.ops.cascade.attend.default:
        return None
    return Emitter(out).call(operator.getitem, pair, 1)


def _peaks(
    inliner: Inliner, ahead: Ahead, site: ReuseSite, asked: Asked, lse: fx.Node | None
) -> fx.Node:
    looked = _Looked(asked.is_causal, asked.scale, asked.flat)
    call = Call(looked, (asked.q, asked.k, asked.mask, site.fresh_rows, site.chunks, lse))
    found: fx.Node
    (found,) = inliner.inline(call, ahead.anchor)
    return found


@dataclass(frozen=True)
class _Looked:
    """What is traced into the graph for each layer."""

    is_causal: bool
    scale: float | None
    flat: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        fresh: Tensor,
        chunks: Tensor | None,
        lse: Tensor | None,
    ) -> Tensor:
        known = {"is_causal": self.is_causal, "scale": self.scale, "flat": self.flat}
        reading = Reading(q, k, k, mask, fresh, chunks, **known, short=True, lse=lse)  # type: ignore[arg-type]
        return reading.peak_attention()


def _erase(graph: fx.Graph, copies: Collection[fx.Node]) -> None:
    """Copies that are for all tokens, and that nobody reads any more."""
    for node in reversed(list(graph.nodes)):
        if node in copies and not node.users:
            graph.erase_node(node)
        elif node in copies and contracts(node.target):
            raise AssertionError(f"{node.name} still computes all tokens to look ahead")


def mean_of(emit: Emitter, layers: Sequence[fx.Node]) -> fx.Node:
    """The mean of some layers, [N, L]."""
    total = layers[0]
    for layer in layers[1:]:
        total = emit.call(aten.add.Tensor, total, layer)
    return emit.call(aten.mul.Tensor, total, 1 / len(layers))

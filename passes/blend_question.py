"""What the fresh tokens look at, at a check layer: for selectors that ask how a prompt is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from torch_cascade.compiler.graph import Emitter, Sizes, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.attention import bound_arguments
from torch_cascade.passes.blend_site import ReuseSite
from torch_cascade.passes.heads import repeats, sources
from torch_cascade.passes.token_apply import MadeRows, Narrowed, apply_rows
from torch_cascade.passes.token_axis import RowPlan, plan_rows
from torch_cascade.passes.token_frontier import Frontier, contracts, is_result
from torch_cascade.passes.token_rows import Axis, Demand, Rows

aten = torch.ops.aten
sdpa = torch.ops.cascade.sdpa.default


@dataclass(frozen=True)
class Asking:
    """What has to be known of one attention, for the fresh tokens.

    Attributes:
        marker: of the layer.
        attention: its `cascade::sdpa`.
        q, mask: the queries and the mask, with the rows; None for a mask that has none.
        differs: why what is cached cannot take the place of what is attended to; None where it can.
    """

    marker: fx.Node
    attention: fx.Node
    q: Demand
    mask: Demand | None
    differs: Declined | None = None

    @property
    def demands(self) -> list[Demand]:
        """The rows that are wanted."""
        return [self.q] if self.mask is None else [self.q, self.mask]


@dataclass(frozen=True)
class Question:
    """The fresh tokens' rows of a check layer's attention, planned."""

    asking: Asking
    plan: RowPlan


@dataclass(frozen=True)
class Asked:
    """The same, written: what `runtime.reading.Reading` is made of."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    is_causal: bool
    scale: float | None
    flat: bool


def plan_question(
    graph: fx.Graph,
    site: ReuseSite,
    frontier: Frontier,
    marker: fx.Node,
    earlier: Collection[Demand],
    sizes: Sizes,
) -> Question | Declined:
    """Plan the queries of the fresh tokens at a check layer.

    Args:
        graph: functional ATen; it is only read.
        site: the marked layers.
        frontier: of the first check layer.
        marker: of this one.
        earlier: rows that exist, of which these are some; none at the first.
        sizes: facts about the sizes.
    """
    asking = asking_of(marker, site, sizes)
    if isinstance(asking, Declined):
        return asking
    plan = plan_rows(
        graph,
        frontier,
        tokens=site.tokens,
        batch=site.each,
        rows=asking.demands,
        earlier=earlier,
        sizes=sizes,
    )
    return plan if isinstance(plan, Declined) else Question(asking, plan)


def asking_of(marker: fx.Node, site: ReuseSite, sizes: Sizes) -> Asking | Declined:
    """What the attention of a marked layer takes."""
    attention = _attention_of(marker)
    if attention is None or len(shape(attention)) != 4:
        return unknown(marker, "its attention is no 4-D scaled_dot_product_attention")
    given = bound_arguments(attention)
    if not isinstance(given["scale"], (float, int, type(None))):
        return unknown(attention, "the scale of its attention is no number")
    if not sizes.equal(shape(given["q"])[2], site.tokens):
        return unknown(attention, f"its queries {list(shape(given['q']))} are not all tokens")
    each = None if site.each is None else Axis(0, site.each)
    q = given["q"], Rows(Axis(2, site.tokens), each)
    mask = _mask_rows(given["attn_mask"], site, sizes)
    return Asking(marker, attention, q, mask, _differs(marker, attention, sizes))


def _differs(marker: fx.Node, attention: fx.Node, sizes: Sizes) -> Declined | None:
    """Whether the attention reads the marker's keys and values as they are, or each head repeated.

    Only then is a cached one what it would read instead.
    """
    given = bound_arguments(attention)
    for index, name in enumerate("kv"):
        read, kept, fresh = given[name], marker.args[2 + index], marker.args[index]
        assert isinstance(kept, fx.Node) and isinstance(fresh, fx.Node)
        for size, own in zip(shape(kept), shape(fresh), strict=True):
            sizes.agree(size, own)  # the op needs it; dynamic shapes give each a symbol
        (batch, heads, *rest), (rows, fewer, *others) = shape(read), shape(kept)
        same = zip((batch, *rest), (rows, *others), strict=True)
        if heads % fewer != 0 or not all(sizes.equal(x, y) for x, y in same):
            found = f"its attention reads {list(shape(read))}, but {list(shape(kept))} are cached"
            return unknown(attention, found)
        if not _reads(read, marker, index, sizes):
            found = f"{read.name} holds other {name} than those that are cached, or other heads"
            return unknown(attention, f"its attention reads them changed: {found}")
    return None


def _reads(node: fx.Node, marker: fx.Node, index: int, sizes: Sizes) -> bool:
    """Whether head h of a node is head h // times of a result of the marker; nothing is moved."""
    return any(
        is_result(source)
        and source.args == (marker, index)
        and repeats(node, (source, dims), sizes)
        for source, dims in sources(node, sizes)
    )


def _attention_of(marker: fx.Node) -> fx.Node | None:
    """The first product that reads the marker's keys, if it is an attention."""
    waiting = [marker]
    while waiting:
        node = waiting.pop()
        if contracts(node.target):
            return node if node.target is sdpa else None
        waiting += reversed(node.users)
    return None


def _mask_rows(mask: fx.Node | None, site: ReuseSite, sizes: Sizes) -> Demand | None:
    if mask is None or len(shape(mask)) < 2:
        return None
    dims = shape(mask)
    if not sizes.equal(dims[-2], site.tokens):
        return None
    batch = site.each is not None and len(dims) == 4 and sizes.equal(dims[0], site.each)
    each = Axis(0, site.each) if batch and site.each is not None else None
    return mask, Rows(Axis(len(dims) - 2, site.tokens), each)


def emit_question(
    question: Question, site: ReuseSite, anchor: fx.Node, made: MadeRows | None
) -> Asked:
    """Write the rows.

    Args:
        question: planned in the same graph.
        site: the marked layers.
        anchor: stands below the rows that were made.
        made: what `earlier` rows became.
    """
    index, narrowed = site.fresh_rows, None
    if made is not None:
        index, places = _places(Emitter(anchor), made.index, site.fresh_rows)
        narrowed = Narrowed(made, places)
    marker = question.asking.marker
    whole = _results(marker) if made is None else made.fused[marker]
    rows = apply_rows(question.plan, index, narrowed=narrowed)
    return asked_of(question.asking, site, rows, whole)


def _results(marker: fx.Node) -> tuple[fx.Node, ...]:
    """Keys and values of a marker; those that are read."""
    found = {user.args[1]: user for user in marker.users if is_result(user)}
    return tuple(found[index] for index in (0, 1) if index in found)


def asked_of(asking: Asking, site: ReuseSite, rows: MadeRows, whole: tuple[fx.Node, ...]) -> Asked:
    """What was asked for, of the rows that were made.

    Args:
        asking: of a layer.
        site: the marked layers.
        rows: of the queries and the mask.
        whole: the layer's keys and values, which its attention may read repeated for its heads.
    """
    given = bound_arguments(asking.attention)
    k, v = whole if asking.differs is None else (given["k"], given["v"])
    mask: fx.Node | None = given["attn_mask"]
    flat = False
    if asking.mask is not None:
        mask = rows.of(*asking.mask)
        flat = site.each is not None and asking.mask[1].batch is None
    q = rows.of(*asking.q)
    return Asked(q, k, v, mask, given["is_causal"], given["scale"], flat)


def _places(emit: Emitter, kept: fx.Node, fresh: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The fresh tokens, and where they stand among the kept ones, which ascend."""
    rows = emit.call(aten.unsqueeze.default, kept, 1)
    wanted = emit.call(aten.unsqueeze.default, fresh, 2)
    before = emit.call(aten.lt.Tensor, rows, wanted)
    places = emit.call(aten.sum.dim_IntList, before, [2])
    return emit.call(aten.gather.default, kept, 1, places), places


def unknown(node: fx.Node, detail: str) -> Declined:
    """How a prompt is read cannot be told."""
    return Declined(Reason.SELECTOR, node.name, detail)

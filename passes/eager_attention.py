"""Hand-written attention: matmul, scale, mask, softmax, matmul, in whatever spelling.

    bmm(view(softmax(mask(cap(scale(view(bmm(q, k^T))))))), v)

A candidate is a `bmm` one operand of which is a softmax of another `bmm`. Everything between the
two must be a scale, a soft-cap, a mask, a softmax, a sink or a rearrangement, and nothing else may
use it: then the whole is `softmax(cap(q k^T * scale) + masks) v` and nobody needs the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import Dims, whole
from torch_cascade.passes.eager_site import Matmuls, View, eager_site
from torch_cascade.passes.labels import above, labels
from torch_cascade.passes.scalars import is_float_cast
from torch_cascade.passes.scores import MATMULS, Scores, find_above, trace_scores
from torch_cascade.passes.sinks import Joined, Side, dropped_column, joined_scores
from torch_cascade.passes.site import AttentionSite
from torch_cascade.passes.softmax import Softmax, match_softmax

aten = torch.ops.aten

_RANDOM = frozenset({aten.rand.default, aten.bernoulli.p, aten.native_dropout.default})
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


@dataclass(frozen=True)
class _Weights:
    """A softmax, the dims of its value, and the column of it that is dropped (a sink's), if any."""

    softmax: Softmax
    dims: Dims
    side: Side | None = None


class EagerMatcher:
    """Matches the hand-written attentions of one graph; reads only."""

    def __init__(self, graph: fx.Graph, sizes: Sizes) -> None:
        """Nodes are numbered once, to look only between the two matmuls of a candidate."""
        self.nodes = list(graph.nodes)
        self.positions = {node: i for i, node in enumerate(self.nodes)}
        self.sizes = sizes

    def match(self, out: fx.Node) -> AttentionSite | Declined | None:
        """The attention whose second matmul is the `bmm` node `out`.

        Returns:
            The site; a decline if softmax and two matmuls are there but the whole is not provably
            attention; None if `out` is no such matmul.
        """
        found = self._values_right(out)
        if found is None:
            found = self._values_left(out)
        if not isinstance(found, Matmuls):
            return found
        declined = self._used_elsewhere(found)
        return eager_site(found, self.sizes) if declined is None else declined

    def _values_right(self, out: fx.Node) -> Matmuls | Declined | None:
        """Read `out` as P V."""
        p, v = _operands(out)
        rows, queries, width = shape(out)
        keys = shape(v)[1]
        n, q, k, d = whole("n", rows), whole("q", queries), whole("k", keys), whole("d", width)
        view = View(out, (n, q, d))
        return self._matmuls(View(p, (n, q, k)), View(v, (n, k, d)), view, keys)

    def _values_left(self, out: fx.Node) -> Matmuls | Declined | None:
        """Read `out` as V^T P^T, the transposed product."""
        v, p = _operands(out)
        rows, width, queries = shape(out)
        keys = shape(v)[2]
        n, q, k, d = whole("n", rows), whole("q", queries), whole("k", keys), whole("d", width)
        view = View(out, (n, d, q))
        return self._matmuls(View(p, (n, k, q)), View(v, (n, d, k)), view, keys)

    def _matmuls(self, p: View, v: View, out: View, keys: Size) -> Matmuls | Declined | None:
        found = self._softmax_above(p, keys)
        if not isinstance(found, _Weights):
            return found
        joined = self._joined(found, keys)
        if not isinstance(joined, Joined):
            return joined
        scores = trace_scores(joined.scores, joined.dims, self.sizes)
        if not isinstance(scores, Scores):
            return scores
        columns = keys if found.side is None else keys + 1
        if found.dims[found.softmax.dim] != whole("k", columns):
            return _decline(Reason.SPELLING, out.node, "softmax over another axis than the keys")
        names = labels(scores.dims, ("n", "q", "k"), self.sizes)
        if names is None or names[0] != "n":
            return _decline(Reason.RANK, out.node, "the two matmuls have different batches")
        a, b = _operands(scores.matmul)
        batch, left, right = scores.dims
        width = shape(a)[2]
        first = View(a, (batch, left, whole("d", width)))
        second = View(b, (batch, whole("d", width), right))
        q, k = (first, second) if names[1] == "q" else (second, first)
        return Matmuls(out, found.softmax, scores, q, k, v, keys, width, joined.sinks)

    def _joined(self, found: _Weights, keys: Size) -> Joined | Declined | None:
        if found.side is None:
            return Joined(found.softmax.scores, found.dims)
        return joined_scores(found.softmax, found.dims, keys, found.side, self.sizes)

    def _softmax_above(self, p: View, keys: Size) -> _Weights | Declined | None:
        """The softmax that `p` is, but perhaps for one column."""
        node, dims = p.node, p.dims
        side: Side | None = None
        while True:
            softmax = match_softmax(node, self.sizes)
            if softmax is not None:
                return _Weights(softmax, dims, side)
            dropped = dropped_column(node, dims, keys, self.sizes) if side is None else None
            if dropped is not None:
                node, dims, side = dropped
                continue
            source = node.args[0] if is_float_cast(node) else None
            step = (source, dims) if isinstance(source, fx.Node) else above(node, dims, self.sizes)
            if step is None:
                return self._changed(node)
            node, dims = step

    def _changed(self, node: fx.Node) -> Declined | None:
        """Why a softmax that reaches the second matmul only through `node` is no attention's."""
        upper = find_above(node, lambda n: match_softmax(n, self.sizes) is not None)
        softmax = None if upper is None else match_softmax(upper, self.sizes)
        if softmax is None or find_above(softmax.scores, lambda n: n.target in MATMULS) is None:
            return None
        if find_above(node, lambda n: n.target in _RANDOM) is not None:
            return _decline(Reason.DROPOUT, node, "probabilities are dropped at random")
        if node.target in _VIEWS:
            return _decline(
                Reason.RANK, node, "the batch of the matmuls is more than rows and heads"
            )
        return _decline(Reason.SPELLING, node, f"{node.target} between softmax and second matmul")

    def _used_elsewhere(self, found: Matmuls) -> Declined | None:
        """A decline if scores or probabilities are needed for anything but this attention."""
        first, out = found.scores.matmul, found.out.node
        span = self.nodes[self.positions[first] : self.positions[out]]
        derived = {first}
        for node in span:
            if _holds_values(node) and not derived.isdisjoint(node.all_input_nodes):
                derived.add(node)
        masks = (mask.node for mask in found.scores.masks)
        sinks = [] if found.sinks is None else [found.sinks.node]
        for node in (found.v.node, *masks, *sinks, *found.scores.factor.nodes):
            if node in derived:
                return _decline(Reason.SPELLING, out, f"{node.name} is computed from the scores")
        needed = set(out.all_input_nodes)
        for node in reversed(span):
            if node in needed:
                needed.update(node.all_input_nodes)
        inside = derived & needed
        users = (u for node in inside for u in node.users if u not in inside and u is not out)
        reader = next((u for u in users if _reads(u)), None)
        if reader is None:
            return None
        hint = "do not return attention weights (output_attentions=False)"
        return _decline(Reason.SCORES_USED, out, f"{reader.name} uses them", hint)


def _operands(matmul: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two factors of a bmm or baddbmm."""
    a, b = matmul.args[-2:]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b


def _holds_values(node: fx.Node) -> bool:
    """False for a size asked of a tensor: it does not depend on the tensor's values."""
    return node.target is not aten.sym_size.int


def _reads(user: fx.Node) -> bool:
    """True iff a user needs the values: asking for a size does not, nor does dead code."""
    return _holds_values(user) and (bool(user.users) or user.is_impure())


def _decline(reason: Reason, node: fx.Node, detail: str, hint: str = "") -> Declined:
    return Declined(reason, node.name, detail, hint)

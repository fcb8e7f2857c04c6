"""What a graph gives out below a check layer: whole keys and values, and rows of last tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import Max

from torch_cascade.compiler.graph import Emitter, Size, Sizes, shape, size_expr, tensor
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import ONE
from torch_cascade.passes.blend_site import ReuseSite
from torch_cascade.passes.token_axis import Demand
from torch_cascade.passes.token_frontier import CONTRACTIONS, Frontier, reuse_kv
from torch_cascade.passes.token_registry import bound
from torch_cascade.passes.token_rows import Axis, Rows

aten = torch.ops.aten


@dataclass(frozen=True)
class Exit:
    """A slice or a selection of the last tokens; later layers are not asked for others.

    Attributes:
        node: the slice, or the selection of one token.
        last: n, it takes none but the last n tokens.
        rows: the axes of its operand.
    """

    node: fx.Node
    last: Size
    rows: Rows

    @property
    def demand(self) -> Demand:
        """The operand, and its rows."""
        source = self.node.args[0]
        assert isinstance(source, fx.Node)
        return source, self.rows

    def of_rows(self, rows: fx.Node) -> fx.Node:
        """The node written again, of ascending rows whose last n are the last n tokens."""
        emit, dim = Emitter(self.node), self.rows.tokens.dim
        if self.node.target is aten.select.int:
            return emit.call(aten.select.int, rows, dim, -self.last)
        return emit.call(aten.slice.Tensor, rows, dim, -self.last, _END)


@dataclass(frozen=True)
class Exits:
    """All that leaves the graph below the check layer.

    Attributes:
        tokens: rows of last tokens.
        markers: whose keys and values leave it, or are read by what leaves it, for all tokens.
    """

    tokens: tuple[Exit, ...]
    markers: tuple[fx.Node, ...]

    @property
    def last(self) -> Size:
        """How many of the last tokens are asked for; at least one."""
        return cast("Size", Maximum(ONE, *(found.last for found in self.tokens)))


_END = 2**63 - 1
Maximum: Any = Max  # torch's, which printers of sizes know


def find_exits(
    graph: fx.Graph, site: ReuseSite, frontier: Frontier, sizes: Sizes
) -> Exits | Declined:
    """Walk from the results of a graph to its markers; a slice of last tokens ends the walk.

    Where a path leads through a matrix product or an attention and meets no such slice, a result is
    asked for tokens that are not computed: that is declined as `all-tokens`.
    """
    walk = _Walk(site, frontier, sizes)
    for root in _roots(graph):
        declined = walk.from_root(root)
        if declined is not None:
            return declined
    return Exits(tuple(walk.exits.values()), tuple(walk.markers))


def _roots(graph: fx.Graph) -> Iterator[fx.Node]:
    """What the graph returns, and what it writes into its inputs."""
    for node in graph.nodes:
        if node.op == "output" or (node.op == "call_function" and node.is_impure()):
            yield from node.all_input_nodes


@dataclass
class _Walk:
    site: ReuseSite
    frontier: Frontier
    sizes: Sizes
    exits: dict[fx.Node, Exit] = field(default_factory=dict)
    markers: dict[fx.Node, None] = field(default_factory=dict)
    seen: set[tuple[fx.Node, bool]] = field(default_factory=set)

    def from_root(self, root: fx.Node) -> Declined | None:
        waiting = [(root, False)]
        while waiting:
            node, computed = waiting.pop()
            if node not in self.frontier.below or (node, computed) in self.seen:
                continue
            self.seen.add((node, computed))
            found = self._exit(node)
            if isinstance(found, Declined):
                return found
            if found is not None:
                self.exits[node] = found
                continue
            if node.target is reuse_kv:
                if computed:
                    return _all_tokens(root, "all of them")
                self.markers[node] = None
                continue
            computed = computed or node.target in CONTRACTIONS
            waiting += [(source, computed) for source in node.all_input_nodes]
        return None

    def _exit(self, node: fx.Node) -> Exit | Declined | None:
        """The exit that a slice or a selection along the tokens is; None for any other node."""
        if node.target not in (aten.slice.Tensor, aten.select.int):
            return None
        given = bound(node)
        source = given["self"]
        sizes, dim = shape(source), given.get("dim", 0) % tensor(source).dim()
        rows = self._rows(sizes, dim)
        if rows is None or source not in self.frontier.below:
            return None
        if node.target is aten.select.int:
            last = self._from_end(size_expr(given["index"]))
        elif self._everything(given):
            return None
        else:
            last = self._suffix(given)
        if last is None:
            return _all_tokens(node, f"{node.target} takes others")
        return Exit(node, last, rows)

    def _rows(self, sizes: tuple[Size, ...], dim: int) -> Rows | None:
        """Batch first, tokens in `dim`; None for a slice of another dim."""
        tokens, each = self.site.tokens, self.site.each
        if not self.sizes.equal(sizes[dim], tokens):
            return None
        if each is None:
            return Rows(Axis(dim, tokens))
        if dim == 0 or not self.sizes.equal(sizes[0], each):
            return None
        return Rows(Axis(dim, tokens), Axis(0, each))

    def _everything(self, given: dict[str, Any]) -> bool:
        start, end = given.get("start"), given.get("end")
        return (start is None or size_expr(start) == 0) and self._to_end(end)

    def _suffix(self, given: dict[str, Any]) -> Size | None:
        if given.get("step", 1) != 1 or not self._to_end(given.get("end")):
            return None
        return self._from_end(size_expr(given.get("start") or 0))

    def _to_end(self, end: Any) -> bool:
        whole = end is None or (isinstance(end, int) and end >= _END)
        return whole or self.sizes.at_least(end, self.site.tokens)

    def _from_end(self, index: Size) -> Size | None:
        """N for -n or L - n; None where that may or may not be one of the two."""
        if self.sizes.known(sympy.Lt(index, 0)):
            return -index
        return self.site.tokens - index if self.sizes.at_least(index, 0) else None


def _all_tokens(node: fx.Node, detail: str) -> Declined:
    return Declined(Reason.ALL_TOKENS, node.name, detail)

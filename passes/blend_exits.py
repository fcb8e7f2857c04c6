"""What a graph gives out below a check layer: whole keys and values, and rows of last tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import Max

from torch_cascade.compiler.graph import Emitter, Size, Sizes, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import ONE
from torch_cascade.passes.blend_picked import Picked, find_picked, rows_along
from torch_cascade.passes.blend_pieces import Piece, piece_of
from torch_cascade.passes.blend_site import ReuseSite
from torch_cascade.passes.token_frontier import Frontier, contracts, reuse_kv
from torch_cascade.passes.token_ranks import has_effect
from torch_cascade.passes.token_rows import Demand, Rows

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Exit:
    """A slice or a selection of the last tokens; later layers are not asked for others.

    Attributes:
        node: the slice, or the selection of one token.
        source: what it is taken from.
        last: n, it takes none but the last n tokens.
        rows: the axes of the source.
        one: it is a selection, and has no dim of tokens.
        flipped: the last token comes first.
    """

    node: fx.Node
    source: fx.Node
    last: Size
    rows: Rows
    one: bool
    flipped: bool = False

    @property
    def demand(self) -> Demand:
        """The source, and its rows."""
        return self.source, self.rows

    def of_rows(self, rows: fx.Node) -> fx.Node:
        """The node written again, of ascending rows whose last n are the last n tokens."""
        emit, dim = Emitter(self.node), self.rows.tokens.dim
        if self.one:
            return emit.call(aten.select.int, rows, dim, -self.last)
        last = emit.call(aten.slice.Tensor, rows, dim, self._start(shape(rows)[dim]), _END)
        return emit.call(prims.rev.default, last, [dim]) if self.flipped else last

    def _start(self, count: Size) -> Size:
        """Where the last n of so many rows begin; -0 would be the first of them."""
        some = Sizes.of(self.node.graph).at_least(self.last, 1)
        return -self.last if some else count - self.last


@dataclass(frozen=True)
class Exits:
    """All that leaves the graph below the check layer.

    Attributes:
        tokens: rows of last tokens.
        picked: rows of tokens that an index names.
        markers: whose keys and values leave it, or are read by what leaves it, for all tokens.
    """

    tokens: tuple[Exit, ...]
    picked: tuple[Picked, ...]
    markers: tuple[fx.Node, ...]

    @property
    def demands(self) -> list[Demand]:
        """The values that rows are asked of."""
        tokens = [found.demand for found in self.tokens]
        return tokens + [found.demand for found in self.picked]

    @property
    def last(self) -> Size:
        """How many of the last tokens are asked for; at least one."""
        return cast("Size", Maximum(ONE, *(found.last for found in self.tokens)))

    @property
    def others(self) -> Size:
        """How many rows these tokens may take beside those without a cached copy."""
        named = [found.count for found in self.picked if not found.free]
        return sum(named, self.last - 1)


_END = 2**63 - 1
Maximum: Any = Max  # torch's, which printers of sizes know


def find_exits(
    graph: fx.Graph, site: ReuseSite, frontier: Frontier, check: fx.Node | None, sizes: Sizes
) -> Exits | Declined:
    """Walk from the results of a graph to its markers; a slice of last tokens ends the walk.

    Where a path leads through a matrix product or an attention and meets no such slice, a result is
    asked for tokens that are not computed: that is declined as `all-tokens`.

    Args:
        graph: functional ATen.
        site: the marked layers.
        frontier: below `check`.
        check: the first check layer's marker; None for none.
        sizes: facts about the sizes.
    """
    walk = _Walk(site, frontier, check, sizes)
    for root in _roots(graph, frontier):
        declined = walk.from_root(root)
        if declined is not None:
            return declined
    found = walk.exits.values()
    tokens = tuple(x for x in found if isinstance(x, Exit))
    picked = tuple(x for x in found if isinstance(x, Picked))
    return Exits(tokens, picked, tuple(walk.markers))


def _roots(graph: fx.Graph, frontier: Frontier) -> Iterator[fx.Node]:
    """What the graph returns, and what it writes into its inputs."""
    for node in graph.nodes:
        effect = node.op == "call_function" and has_effect(node, frontier.below)
        if node.op == "output" or effect:
            yield from node.all_input_nodes


@dataclass
class _Walk:
    site: ReuseSite
    frontier: Frontier
    check: fx.Node | None
    sizes: Sizes
    exits: dict[fx.Node, Exit | Picked] = field(default_factory=dict)
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
            computed = computed or contracts(node.target)
            waiting += [(source, computed) for source in node.all_input_nodes]
        return None

    def _exit(self, node: fx.Node) -> Exit | Picked | Declined | None:
        """The exit that a slice, a selection or a lookup along the tokens is; else None."""
        picked = find_picked(node, self.site, self.frontier, self.check, self.sizes)
        if picked is not None:
            return picked
        piece = piece_of(node)
        if piece is None or piece.source not in self.frontier.below:
            return None
        rows = rows_along(piece.source, piece.dim, self.site, self.sizes)
        if rows is None or self._everything(piece):
            return None
        last = self._last(piece)
        if last is None:
            return _all_tokens(node, f"{node.target} takes others")
        return Exit(node, piece.source, last, rows, piece.one, piece.flipped)

    def _everything(self, piece: Piece) -> bool:
        return not piece.one and piece.start == 0 and self._to_end(piece.end)

    def _last(self, piece: Piece) -> Size | None:
        """N, where a piece takes none but the last n tokens and is told by them."""
        if not piece.one and (piece.step != 1 or not self._to_end(piece.end)):
            return None
        return self._from_end(piece.start)

    def _to_end(self, end: Size | None) -> bool:
        return end is None or end >= _END or self.sizes.at_least(end, self.site.tokens)

    def _from_end(self, index: Size) -> Size | None:
        """N for -n or L - n; None where that may or may not be one of the two."""
        if self.sizes.known(sympy.Lt(index, 0)):
            return -index
        return self.site.tokens - index if self.sizes.at_least(index, 0) else None


def _all_tokens(node: fx.Node, detail: str) -> Declined:
    return Declined(Reason.ALL_TOKENS, node.name, detail)

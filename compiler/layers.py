"""Places the nodes of a directed acyclic graph in layers, for pictures."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import networkx as nx

_LETTER, _HEIGHT, _GAP, _DROP = 6.7, 40.0, 16.0, 30.0
_WIDEST = 660.0  # what is wider goes on below
_SWEEPS = 6

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True)
class Box:
    """A rectangle, in pixels; y grows downwards."""

    x: float
    y: float
    width: float
    height: float


def arrange(dag: nx.DiGraph, letters: Mapping[N, int], top: float = 0.0) -> dict[N, Box]:
    """A box for every node, sources above what they feed; unconnected parts in rows.

    Args:
        dag: the graph.
        letters: length of each node's text.
        top: where the first boxes begin; the left end is 0.
    """
    boxes: dict[N, Box] = {}
    left, bottom = 0.0, top
    for part in sorted(nx.weakly_connected_components(dag), key=len, reverse=True):
        placed = _part(induced(dag, part), letters, left, top)
        if left and max(box.x + box.width for box in placed.values()) > _WIDEST:
            left, top = 0.0, bottom + _DROP
            placed = _part(induced(dag, part), letters, left, top)
        bottom = max(bottom, *(box.y + box.height for box in placed.values()))
        boxes.update(placed)
        left = max(box.x + box.width for box in placed.values()) + 2 * _GAP
    return boxes


def induced(dag: nx.DiGraph, nodes: Set[N]) -> nx.DiGraph:
    """The part of a graph that some nodes make up, in the graph's own order.

    `nx.DiGraph.subgraph` may have the order of the set, which is another in every process.

    Example:
        >>> list(induced(nx.path_graph(40, nx.DiGraph), {30, 3, 17}))
        [3, 17, 30]
    """
    part = dag.copy()
    part.remove_nodes_from([node for node in dag if node not in nodes])
    return part


def _part(dag: nx.DiGraph, letters: Mapping[N, int], left: float, top: float) -> dict[N, Box]:
    widths = {node: letters[node] * _LETTER + 16 for node in dag}
    layers = [row for layer in _ordered(dag) for row in _broken(layer, widths)]
    spans = [sum(widths[n] for n in layer) + _GAP * (len(layer) - 1) for layer in layers]
    boxes: dict[N, Box] = {}
    for row, (layer, span) in enumerate(zip(layers, spans, strict=True)):
        x = left + (max(spans) - span) / 2
        for node in layer:
            boxes[node] = Box(x, top + row * (_HEIGHT + _DROP), widths[node], _HEIGHT)
            x += widths[node] + _GAP
    return boxes


def _broken(layer: list[Any], widths: Mapping[Any, float]) -> list[list[Any]]:
    """A layer in rows that are not too wide: no edge leads from one of its nodes to another."""
    rows: list[list[Any]] = [[]]
    for node in layer:
        span = sum(widths[n] + _GAP for n in rows[-1])
        if rows[-1] and span + widths[node] > _WIDEST:
            rows.append([])
        rows[-1].append(node)
    return rows


def _ordered(dag: nx.DiGraph) -> list[list[Any]]:
    """Layers from top to bottom; within each the nodes stand near their neighbours.

    A node is as low as what it feeds allows, so inputs stand right above their use. The order is
    that of the mean position of the neighbours (Sugiyama's barycentres), swept down and up.
    """
    rising = nx.topological_generations(dag.reverse(copy=False))
    layers: list[list[Any]] = [list(layer) for layer in rising][::-1]
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        neighbours = dag.predecessors if down else dag.successors
        place = {n: i / len(layer) for layer in layers for i, n in enumerate(layer)}
        for layer in layers if down else reversed(layers):
            means = {n: fmean([place[m] for m in neighbours(n)] or [place[n]]) for n in layer}
            layer.sort(key=means.__getitem__)
            place.update({n: (i + 0.5) / len(layer) for i, n in enumerate(layer)})
    return layers

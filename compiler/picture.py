"""A picture of the attentions of a graph after the cascade pass, as SVG text.

Shown is the neighbourhood of each attention: its queries and bases above, what reads it below.
Attentions that look the same (the layers of a model) are drawn once, with their number.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast
from xml.sax.saxutils import escape, quoteattr

import networkx as nx
import torch
from torch import fx

from torch_cascade.compiler.layers import Box, arrange, induced
from torch_cascade.compiler.printing import Printer
from torch_cascade.compiler.text import alike

_UP, _DOWN = 2, 2  # ops to show above the inputs of an attention, and below it

_KINDS = {
    "shared": ("keys and values that branches share", "#fde9b8"),
    "attend": ("attention over one segment", "#bfe3c4"),
    "merge": ("exact merge", "#bcd7f2"),
    "sdpa": ("attention left as it is", "#f3c6c0"),
    "other": ("", "#f4f4f4"),
}
_STYLE = "text{font:12px monospace}rect{stroke:#555}path{fill:none;stroke:#777}"


@dataclass(frozen=True)
class _Attention:
    """One attention.

    Attributes:
        out: the node that yields it.
        shared: the keys and values that branches share, with what they are rearranged from.
        core: its ops, their inputs, and `shared`.
        shown: all that is drawn.
    """

    out: fx.Node
    shared: frozenset[fx.Node]
    core: frozenset[fx.Node]
    shown: frozenset[fx.Node]


def picture(graph: fx.Graph) -> str | None:
    """The attentions of a graph as SVG text; None if it has none.

    Args:
        graph: functional ATen with `cascade` ops; it is only read.
    """
    dag = _dag(graph)
    found = [_attention(dag, node) for node in _outputs(graph)]
    if not found:
        return None
    printer = Printer(graph, renamed=False)
    kinds = [_kind(attention, printer) for attention in found]
    counts = Counter(kinds)
    drawn = [found[kinds.index(kind)] for kind in counts]
    times = {a.out: count for a, count in zip(drawn, counts.values(), strict=True)}
    shared = frozenset(node for a in drawn for node in a.shared)
    shown = induced(dag, {node for a in drawn for node in a.shown})
    letters = {node: max(map(len, _label(node, printer, times))) for node in shown}
    boxes = arrange(shown, letters)
    return _svg(boxes, shown, printer, shared, times)


def _dag(graph: fx.Graph) -> nx.DiGraph:
    """Tensors and what is computed from them; a tuple's parts are joined with the tuple."""
    dag = nx.DiGraph()
    for node in graph.nodes:
        if node.op == "output" or not _has_tensor(node):
            continue
        if node.target is operator.getitem:
            continue
        dag.add_node(node)
        dag.add_edges_from((_whole(source), node) for source in node.all_input_nodes)
    dag.remove_nodes_from([node for node in dag if not _has_tensor(node)])
    return dag


def _has_tensor(node: fx.Node) -> bool:
    val = node.meta.get("val")
    first = val[0] if isinstance(val, (tuple, list)) and val else val
    return isinstance(first, torch.Tensor)


def _whole(node: fx.Node) -> fx.Node:
    """The tuple that a getitem takes from, or the node itself."""
    return cast("fx.Node", node.args[0]) if node.target is operator.getitem else node


def _name(node: fx.Node) -> str:
    """The name of a `cascade` op: "attend"; "" for all other nodes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    namespace, name = target._schema.name.split("::")
    return name if namespace == "cascade" else ""


def _outputs(graph: fx.Graph) -> Iterator[fx.Node]:
    """The last op of every attention, in graph order."""
    for node in graph.nodes:
        merged = any(_name(user) == "merge" for part in node.users for user in part.users)
        if _name(node) in ("merge", "sdpa") or (_name(node) == "attend" and not merged):
            yield node


def _attention(dag: nx.DiGraph, out: fx.Node) -> _Attention:
    parts = [out]
    if _name(out) == "merge":
        parts += [node for node in dag.predecessors(out) if _name(node) == "attend"]
    shared: set[fx.Node] = set()
    for part in parts:
        if _name(part) == "attend" and part.kwargs.get("branches", 1) != 1:
            keys = cast("list[fx.Node]", list(part.args[1:3]))
            shared.update(node for key in keys for node in _base(dag, _whole(key)))
    core = {*parts, *shared, *(node for part in parts for node in dag.predecessors(part))}
    shown = {*core, *nx.single_source_shortest_path_length(dag, out, _DOWN)}
    for part in parts:
        shown.update(nx.single_source_shortest_path_length(dag.reverse(copy=False), part, _UP))
    return _Attention(out, frozenset(shared), frozenset(core), frozenset(shown))


def _base(dag: nx.DiGraph, node: fx.Node) -> Iterator[fx.Node]:
    """A node and what it is a rearrangement of, up to the first op of several inputs."""
    yield node
    while len(above := list(dag.predecessors(node))) == 1 and not _name(node):
        node = above[0]
        yield node


def _kind(attention: _Attention, printer: Printer) -> str:
    """Equal for attentions that are drawn alike, but for what stands around them."""
    labels = ("\t".join(_label(node, printer, {})) for node in attention.core)
    return alike("\n".join(sorted(labels, key=alike)))


def _label(node: fx.Node, printer: Printer, times: dict[fx.Node, int]) -> tuple[str, str]:
    """Two lines: what is computed, and the (first) tensor it yields."""
    val: Any = node.meta["val"]
    made = printer.type_of(val[0] if isinstance(val, (tuple, list)) else val)
    name = node.name if node.op == "placeholder" else printer.target(node)
    branches = node.kwargs.get("branches", 1) if _name(node) == "attend" else 1
    if branches != 1:
        name += f" for {branches} branches"
    if times.get(node, 1) > 1:
        name += f"  ({times[node]} times)"
    return name, made


def _svg(
    boxes: dict[fx.Node, Box],
    shown: nx.DiGraph,
    printer: Printer,
    shared: frozenset[fx.Node],
    times: dict[fx.Node, int],
) -> str:
    width = max(max(b.x + b.width for b in boxes.values()) + 20, 340)
    height = max(b.y + b.height for b in boxes.values()) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(),
        *(_edge(boxes[a], boxes[b]) for a, b in shown.edges),
    ]
    for node, box in boxes.items():
        kind = "shared" if node in shared else _name(node) or "other"
        lines += _box(box, _KINDS.get(kind, _KINDS["other"])[1], _label(node, printer, times))
        lines[-1] = lines[-1].replace("</g>", f"<title>{escape(printer.line(node))}</title></g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for row, (meaning, colour) in enumerate(m for m in _KINDS.values() if m[0]):
        yield f'<rect x="20" y="{16 + 20 * row}" width="14" height="14" fill={quoteattr(colour)}/>'
        yield f'<text x="42" y="{28 + 20 * row}">{escape(meaning)}</text>'


def _box(box: Box, colour: str, label: tuple[str, str]) -> Iterator[str]:
    yield f'<g><rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" '
    yield f'height="{box.height:.0f}" rx="4" fill={quoteattr(colour)}/>'
    for row, text in enumerate(label):
        yield f'<text x="{box.x + 8:.0f}" y="{box.y + 16 + 15 * row:.0f}">{escape(text)}</text>'
    yield "</g>"


def _edge(above: Box, below: Box) -> str:
    x0, y0 = above.x + above.width / 2, above.y + above.height
    x1, y1 = below.x + below.width / 2, below.y
    bend = (y1 - y0) / 2
    return (
        f'<path d="M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} '
        f'{x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"/>'
    )

"""A graph as plain data for pictures: what each node computes, from what, and which part it plays.

It is taken between the passes, so that the graph before them can still be drawn after them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from torch_cascade.compiler.pass_base import ROLE
from torch_cascade.compiler.printing import Printer
from torch_cascade.compiler.record import SiteRecord, source_line

PARTS: Mapping[str, str] = {
    "shared": "keys and values that branches share, and attention over them",
    "own": "keys and values of each branch alone, and attention over them",
    "merge": "exact merge",
    "sdpa": "attention as it is in the model",
    "cached": "cached keys and values that are reused",
    "choice": "tokens are chosen, their rows gathered",
    "rows": "computed for the chosen tokens only",
    "product": "matrix product",
    "other": "all else",
}
"""The parts that nodes play, with what a legend says of them."""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "embedding"})
"""Ops that are a box of their own."""
_GATHERS = frozenset({"index", "gather"})
_CONSTANTS = (torch.ops.aten.scalar_tensor.default, torch.ops.aten.full.default)


@dataclass(frozen=True)
class Vertex:
    """One node that yields a tensor; the parts of a tuple are joined with the tuple.

    Attributes:
        name: unique in its graph.
        op: what is called, "mm", or "input".
        made: the (first) tensor, "f32[8, 16]".
        strides: of it, "(16, 1)".
        dtype: of it, as torch calls it.
        line: the node as the graph's text has it.
        where: the user's source line ("" if unknown).
        inputs: names of what it reads.
        part: one of `PARTS`, or "input".
        weight: an input of at most two dims of floating numbers, a constant, or made of such only.
        branches: of an attend.
    """

    name: str
    op: str
    made: str
    strides: str
    dtype: str
    line: str
    where: str
    inputs: tuple[str, ...]
    part: str = "other"
    weight: bool = False
    branches: str = "1"


Sketch = tuple[Vertex, ...]


def sketch(graph: fx.Graph) -> Sketch:
    """All nodes of tensors, in graph order; the graph is only read."""
    printer = Printer(graph, renamed=False)
    made: dict[str, Vertex] = {}
    for node in graph.nodes:
        if node.op == "output" or node.target is operator.getitem or _first(node) is None:
            continue
        names = (_whole(source).name for source in node.all_input_nodes)
        inputs = tuple(name for name in dict.fromkeys(names) if name in made)
        made[node.name] = _vertex(node, printer, inputs, made)
    return _attended(graph, made)


def _first(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a node yields, of a tuple the first."""
    val: Any = node.meta.get("val")
    first = val[0] if isinstance(val, (tuple, list)) and val else val
    return first if isinstance(first, torch.Tensor) else None


def _whole(node: fx.Node) -> fx.Node:
    """The tuple that a getitem takes from, or the node itself."""
    return cast("fx.Node", node.args[0]) if node.target is operator.getitem else node


def _vertex(
    node: fx.Node, printer: Printer, inputs: tuple[str, ...], made: Mapping[str, Vertex]
) -> Vertex:
    tensor = _first(node)
    assert tensor is not None
    is_input = node.op in ("placeholder", "get_attr")
    weight = all(made[name].weight for name in inputs) if inputs else node.target in _CONSTANTS
    if is_input:
        weight = tensor.dim() <= 2 and tensor.dtype.is_floating_point
    op = "input" if is_input else printer.target(node)
    return Vertex(
        name=node.name,
        op=op,
        made=printer.type_of(tensor),
        strides=str(tuple(tensor.stride())),
        dtype=str(tensor.dtype).removeprefix("torch."),
        line=printer.line(node),
        where=source_line(node),
        inputs=inputs,
        part="input" if is_input else _part(node, op),
        weight=weight,
        branches=str(node.kwargs.get("branches", 1)) if op == "cascade.attend" else "1",
    )


def _part(node: fx.Node, op: str) -> str:
    if op in ("cascade.merge", "cascade.sdpa"):
        return op.removeprefix("cascade.")
    if op == "cascade.attend":
        return "own" if node.kwargs.get("branches", 1) == 1 else "shared"
    if op == "cascade.reuse_kv":
        return "cached"
    role = node.meta.get(ROLE)
    if role is not None:
        return str(role)
    return "product" if op in PRODUCTS else "other"


def _attended(graph: fx.Graph, made: dict[str, Vertex]) -> Sketch:
    """Give keys and values the part of the attend that reads them; cached ones that of a marker."""
    for node in graph.nodes:
        if node.name not in made or made[node.name].op not in (
            "cascade.attend",
            "cascade.reuse_kv",
        ):
            continue
        vertex = made[node.name]
        read = node.args[1:3] if vertex.op == "cascade.attend" else node.args[2:4]
        for operand in cast("Sequence[fx.Node]", read):
            _color(made, _whole(operand).name, vertex.part)
    return tuple(made.values())


def _color(made: dict[str, Vertex], name: str, part: str) -> None:
    """A node and what it is a rearrangement of, up to the first op of several inputs."""
    while name in made and made[name].part in ("other", "input"):
        made[name] = replace(made[name], part=part, weight=False)
        above = made[name].inputs
        if len(above) != 1:
            return
        name = above[0]


def with_sites(graph: Sketch, sites: Sequence[SiteRecord], after: Sketch = ()) -> Sketch:
    """A graph with what the passes found in it.

    Args:
        graph: before the passes or after them.
        sites: hand-written attention is known by these only.
        after: what became of the graph: keys and values play the same part in both.
    """
    found = {v.name: v for v in after if v.part in ("own", "shared") and v.op != "cascade.attend"}
    written = {site.node for site in sites if site.form == "eager"}
    made = []
    for vertex in graph:
        if vertex.name in found:
            vertex = replace(vertex, part=found[vertex.name].part, weight=False)
        made.append(replace(vertex, part="sdpa") if vertex.name in written else vertex)
    return tuple(made)


def with_rows(after: Sketch, before: Sketch) -> Sketch:
    """The graph after `blend`, in which nodes that were not there before compute some rows only."""
    known = {vertex.name: vertex.part for vertex in before}
    made: dict[str, Vertex] = {}
    for vertex in after:
        part = vertex.part
        if vertex.op == "cascade.reuse_kv":
            part = "other"  # of a layer that is computed for all tokens
        elif vertex.name in known:
            part = known[vertex.name] if part in ("other", "input") else part
        elif part in ("other", "product", "sdpa"):
            part = _rows_part(vertex, made)
        made[vertex.name] = replace(vertex, part=part)
    return tuple(made.values())


def _rows_part(vertex: Vertex, made: Mapping[str, Vertex]) -> str:
    """What a node that `blend` wrote does."""
    parts = {made[name].part for name in _read(vertex, made)}
    if vertex.op in ("index_put", "scatter") or (vertex.op == "clone" and parts == {"cached"}):
        return "cached"
    gathers = vertex.op in _GATHERS and not parts & {"rows"}
    index = vertex.dtype.startswith("int") and parts == {"choice"}
    return "choice" if gathers or index else "rows"


def _read(vertex: Vertex, made: Mapping[str, Vertex]) -> Iterator[str]:
    return (name for name in vertex.inputs if name in made)

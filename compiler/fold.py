"""A sketch made small enough to be drawn: layers that are alike once, and ops in groups.

The attentions cut a graph into sections: a section has what an attention needs and no attention
before it does, the last one what none needs. Sections that compute the same, one after the other,
are drawn once with their number. Within a section, ops of one part that stand together become one
box; no circle can arise, since a box has ops of one level only, and levels rise along every edge
that is not inside a box.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch_cascade.compiler.sketch import PRODUCTS, Sketch, Vertex
from torch_cascade.compiler.text import alike

_ALONE = PRODUCTS | {"merge", "sdpa", "cascade.attend", "cascade.sdpa", "cascade.reuse_kv"}


@dataclass(frozen=True)
class Group:
    """What is one box.

    Attributes:
        vertices: in graph order; one, or several ops.
        part: of them all.
        count: it stands for so many that are alike and that nothing reads.
    """

    vertices: Sketch
    part: str
    count: int = 1

    @property
    def name(self) -> str:
        """That of its last op: what others read."""
        return self.vertices[-1].name


@dataclass(frozen=True)
class Section:
    """Boxes that stand together.

    Attributes:
        groups: in graph order.
        first, count: it stands for so many sections from this one on.
    """

    groups: tuple[Group, ...]
    first: int
    count: int


@dataclass(frozen=True)
class Folded:
    """A graph to be drawn.

    Attributes:
        sections: from top to bottom.
        edges: pairs of names of groups.
        layers: the number of attentions.
    """

    sections: tuple[Section, ...]
    edges: frozenset[tuple[str, str]]
    layers: int


def folded(graph: Sketch) -> Folded:
    """Cut, fold and group; weights are left out."""
    kept = [vertex for vertex in graph if not vertex.weight]
    cut, layers = _sections(kept)
    runs = [list(run) for _, run in groupby(enumerate(cut), key=lambda pair: _same(pair[1]))]
    stands_for = {
        vertex.name: run[0][1][place].name
        for run in runs
        for _, section in run
        for place, vertex in enumerate(section)
    }
    drawn = [vertex for run in runs for vertex in run[0][1]]
    where = {vertex.name: n for n, run in enumerate(runs) for vertex in run[0][1]}
    groups = _groups(drawn, where)
    owner = {vertex.name: group.name for group in groups for vertex in group.vertices}
    copy = {vertex.name: n for n, section in enumerate(cut) for vertex in section}
    run_of = {name: where[stand] for name, stand in stands_for.items()}
    pairs = (
        (owner[stands_for[source]], owner[stands_for[vertex.name]])
        for vertex in kept
        for source in vertex.inputs
        if source in stands_for
        # What one of the sections hands to the next that is alike is not drawn.
        and (copy[source] == copy[vertex.name] or run_of[source] != run_of[vertex.name])
    )
    edges = frozenset((a, b) for a, b in pairs if a != b)
    groups = _ends_once(groups, edges, where)
    kept_names = {group.name for group in groups}
    sections = tuple(
        Section(tuple(g for g in groups if where[g.name] == n), run[0][0], len(run))
        for n, run in enumerate(runs)
        if run[0][1]
    )
    edges = frozenset(edge for edge in edges if kept_names.issuperset(edge))
    return Folded(sections, edges, layers)


def _ends_once(
    groups: Sequence[Group], edges: Collection[tuple[str, str]], where: Mapping[str, int]
) -> list[Group]:
    """Boxes that nothing reads, such as what a cache becomes: alike ones of a section once."""
    read = {source for source, _ in edges}
    firsts: dict[object, Group] = {}
    for group in groups:
        same = (where[group.name], _same(group.vertices))
        key = group.name if group.name in read else same
        first = firsts.setdefault(key, group)
        if first is not group:
            firsts[key] = replace(first, count=first.count + 1)
    return list(firsts.values())


def _sections(graph: Sequence[Vertex]) -> tuple[list[list[Vertex]], int]:
    """Of each attention what it needs; then what is left."""
    merged = {name for vertex in graph if vertex.op == "cascade.merge" for name in vertex.inputs}
    ends = [vertex.name for vertex in graph if _is_attention(vertex, merged)]
    section = {name: n for n, name in enumerate(ends)}
    for vertex in reversed(graph):
        mine = section.setdefault(vertex.name, len(ends))
        for source in vertex.inputs:
            section[source] = min(section.get(source, len(ends)), mine)
    cut: list[list[Vertex]] = [[] for _ in range(len(ends) + 1)]
    for vertex in graph:
        cut[section[vertex.name]].append(vertex)
    return cut, len(ends)


def _is_attention(vertex: Vertex, merged: set[str]) -> bool:
    if vertex.op == "cascade.attend":
        return vertex.name not in merged
    return vertex.op in ("cascade.merge", "cascade.sdpa") or vertex.part == "sdpa"


def _same(section: Sequence[Vertex]) -> tuple[str, ...]:
    """Equal for sections that compute the same."""
    return tuple(alike(f"{v.op}\t{v.part}\t{v.branches}\t{v.made}") for v in section)


def _groups(drawn: Sequence[Vertex], where: Mapping[str, int]) -> list[Group]:
    """Boxes, each at the place of its last op."""
    known = {vertex.name: vertex for vertex in drawn}
    level: dict[str, int] = {}
    leader: dict[str, str] = {}
    for vertex in drawn:
        sources = [known[name] for name in vertex.inputs if name in known]
        joins = {s.name: _joins(s, vertex, where) for s in sources}
        level[vertex.name] = max(
            (level[s] + (not joined) for s, joined in joins.items()), default=0
        )
        leader[vertex.name] = vertex.name
        for source, joined in joins.items():
            if joined and level[source] == level[vertex.name]:
                leader[_leader(source, leader)] = _leader(vertex.name, leader)
    members: dict[str, list[Vertex]] = {}
    for vertex in drawn:
        members.setdefault(_leader(vertex.name, leader), []).append(vertex)
    made = [Group(tuple(vertices), vertices[0].part) for vertices in members.values()]
    place = {vertex.name: n for n, vertex in enumerate(drawn)}
    return sorted(made, key=lambda group: (level[group.name], place[group.name]))


def _joins(source: Vertex, vertex: Vertex, where: Mapping[str, int]) -> bool:
    """Whether an op may stand in one box with what it reads."""
    if where[source.name] != where[vertex.name] or source.part != vertex.part:
        return False
    return not any(v.op in _ALONE or v.part in _ALONE or v.op == "input" for v in (source, vertex))


def _leader(name: str, leader: Mapping[str, str]) -> str:
    while leader[name] != name:
        name = leader[name]
    return name

"""Pictures of a graph before and after the passes, as SVG text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from xml.sax.saxutils import escape, quoteattr

import networkx as nx
from torch import fx

from torch_cascade.compiler.fold import Folded, Group, Section, folded
from torch_cascade.compiler.layers import Box, arrange
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.sketch import PARTS, Sketch, sketch, with_rows, with_sites

logger = logging.getLogger(__name__)

MOST_BOXES = 600
"""A graph with more is not drawn: nothing would be seen in it."""

# Fill in light and in dark; the text upon it is black and white.
COLOURS = {
    "shared": ("#fbdf9d", "#6b4e00"),
    "own": ("#bfe3c4", "#1f5a2b"),
    "merge": ("#bcd7f2", "#1f4a78"),
    "sdpa": ("#f3c6c0", "#7a2a1d"),
    "cached": ("#d9cdf3", "#493a80"),
    "choice": ("#f7c3e4", "#782a5c"),
    "rows": ("#b6e4e4", "#145859"),
    "product": ("#dfe3e8", "#454c57"),
    "other": ("#f4f5f7", "#2b2f37"),
}
_MARGIN, _SPACE, _MIDDLE = 16.0, 34.0, 640.0
_LONGEST = 34


def picture_style() -> str:
    """CSS of the pictures, for light and dark."""
    light = "".join(f".k-{part}{{fill:{fill}}}" for part, (fill, _) in COLOURS.items())
    dark = "".join(f".k-{part}{{fill:{fill}}}" for part, (_, fill) in COLOURS.items())
    return (
        ".graph .paper{fill:#fff;stroke:none}"
        f".graph text{{font:11px ui-monospace,monospace;fill:#000}}.graph rect{{stroke:#555}}"
        f".graph path{{fill:none;stroke:#777}}.graph .far{{stroke-dasharray:5 4;stroke:#9a9a9a}}"
        f".graph .frame{{fill:none;stroke-width:2;stroke-dasharray:2 3}}{light}"
        "@media (prefers-color-scheme:dark){.graph .paper{fill:#16181d}"
        f".graph text{{fill:#fff}}.graph rect{{stroke:#aaa}}"
        f".graph path{{stroke:#999}}.graph .far{{stroke:#777}}{dark}}}"
    )


@dataclass(frozen=True)
class Pictures:
    """What a graph was and what the passes made of it; None for one that is not drawn."""

    before: Folded | None
    after: Folded | None


@dataclass
class Album:
    """Looks at a graph between the passes; holds what pictures are made of."""

    taken: dict[str, Sketch] = field(default_factory=dict)

    def see(self, stage: str, graph: fx.Graph) -> None:
        """Remember the graph "before" the passes, and after each that rewrites it."""
        if stage == "before":
            self.taken.clear()
        self.taken[stage] = _guarded(sketch, graph)

    def pictures(self, record: Compilation) -> Pictures | None:
        """Those of a compilation that has ended; None where there is nothing to draw.

        A report without a picture is better than no report: what goes wrong is logged.
        """
        try:
            return self._drawn(record)
        except Exception as error:
            _said(error)
            return None

    def _drawn(self, record: Compilation) -> Pictures | None:
        before = self.taken.get("before", ())
        if not before or not (record.sites or record.blend):
            return None
        stages = list(self.taken)
        last = self.taken[stages[-1]] if len(stages) > 1 else ()
        if "blend" in stages and record.blend is not None and record.blend.reused:
            earlier = self.taken[stages[stages.index("blend") - 1]]
            parts = {v.name: v.part for v in with_rows(self.taken["blend"], earlier)}
            last = tuple(replace(v, part=parts.get(v.name, v.part)) for v in last)
        before = with_sites(before, record.sites, self.taken.get("cascade", before))
        return Pictures(_drawable(before), _drawable(with_sites(last, record.sites)))


def _guarded(make: Callable[[fx.Graph], Sketch], graph: fx.Graph) -> Sketch:
    try:
        return make(graph)
    except Exception as error:
        _said(error)
        return ()


def _said(error: Exception) -> None:
    logger.warning("a graph could not be drawn; the report has no picture", exc_info=error)


def _drawable(graph: Sketch) -> Folded | None:
    made = folded(graph)
    boxes = sum(len(section.groups) for section in made.sections)
    return made if 0 < boxes <= MOST_BOXES else None


def parts_of(*drawn: Folded | None) -> list[str]:
    """The parts that occur, in the order of legends."""
    found = {g.part for each in drawn if each for s in each.sections for g in s.groups}
    return [part for part in PARTS if part in found]


def svg(drawn: Folded, title: str, links: str = "") -> str:
    """One picture.

    Args:
        drawn: what is in it.
        title: read aloud.
        links: a box with the name x is a link to `#<links>x`; "" for a file of its own, with a
            style and a legend, where hovering shows what a box computes.
    """
    boxes, frames = _arranged(drawn, 0.0 if links else 20.0 * len(parts_of(drawn)) + _MARGIN)
    width = max([b.x + b.width for b in boxes.values()] + [0.0 if links else 520.0]) + _MARGIN
    height = max(b.y + b.height for b in boxes.values()) + 1.5 * _MARGIN
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    about = f'class="graph" role="group" aria-label={quoteattr(title)}'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {about}>']
    if not links:
        paper = '<rect class="paper" width="100%" height="100%"/>'  # of any viewer, light or dark
        lines += [f"<style>{picture_style()}</style>", paper, *_legend(parts_of(drawn))]
    lines += _frames(drawn.sections, frames, width)
    lines += (_edge(boxes[a], boxes[b]) for a, b in sorted(drawn.edges))
    groups = [group for section in drawn.sections for group in section.groups]
    for group in groups:
        lines += _box(boxes[group.name], group, links)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _arranged(drawn: Folded, top: float) -> tuple[dict[str, Box], list[tuple[float, float]]]:
    """A box for each group; of each section where it begins and ends."""
    boxes: dict[str, Box] = {}
    spans: list[tuple[float, float]] = []
    for section in drawn.sections:
        dag = nx.DiGraph()
        dag.add_nodes_from(group.name for group in section.groups)
        dag.add_edges_from((a, b) for a, b in sorted(drawn.edges) if a in dag and b in dag)
        letters = {group.name: max(map(len, label(group))) for group in section.groups}
        placed = arrange(dag, letters, top + _SPACE)
        boxes |= placed
        end = max(box.y + box.height for box in placed.values())
        spans.append((top + _SPACE, end))
        top = end
    wide = max(box.x + box.width for box in boxes.values())
    for section in drawn.sections:
        ends = (boxes[group.name].x + boxes[group.name].width for group in section.groups)
        shift = _MARGIN + max(0.0, min(wide, _MIDDLE) - max(ends)) / 2
        for group in section.groups:
            boxes[group.name] = replace(boxes[group.name], x=boxes[group.name].x + shift)
    return boxes, spans


def label(group: Group) -> tuple[str, str]:
    """Two lines: what is computed, and the tensor it yields."""
    last = group.vertices[-1]
    names = list(dict.fromkeys(vertex.op for vertex in group.vertices))
    said = last.name if last.op == "input" else ", ".join(names[:3])
    if len(group.vertices) > 1 and len(names) > 3:
        said += f" .. {len(group.vertices)} ops"
    if last.branches != "1":
        said += f" for {last.branches} branches"
    if group.count > 1:
        said += f" ({group.count} alike)"
    return _short(said), _short(last.made)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def alike_text(section: Section) -> str:
    """What a frame says; "" for what stands for itself only."""
    if section.count == 1:
        return ""
    last = section.first + section.count - 1
    return f"layers {section.first} to {last} are alike: {section.count} times"


def _frames(
    sections: Sequence[Section], spans: Sequence[tuple[float, float]], width: float
) -> Iterator[str]:
    for section, (top, end) in zip(sections, spans, strict=True):
        if section.count > 1:
            yield f'<rect class="frame" x="4" y="{top - 20:.0f}" width="{width - 8:.0f}" '
            yield f'height="{end - top + 28:.0f}" rx="6"/>'
            yield f'<text x="12" y="{top - 6:.0f}">{alike_text(section)}</text>'


def _legend(parts: Sequence[str]) -> Iterator[str]:
    for row, part in enumerate(parts):
        y = 16 + 20 * row
        yield f'<rect class="k-{part}" x="20" y="{y}" width="14" height="14"/>'
        yield f'<text x="42" y="{y + 12}">{escape(PARTS[part])}</text>'


def _box(box: Box, group: Group, links: str) -> Iterator[str]:
    said = label(group)
    if links:
        href, own = quoteattr(f"#{links}{group.name}"), quoteattr(f"{links}{group.name}-box")
        yield f"<a href={href} id={own} aria-label={quoteattr(', '.join(said))}>"
    else:
        yield "<g>"
    part = "other" if group.part == "input" else group.part
    yield f'<rect class="k-{part}" x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" '
    yield f'height="{box.height:.0f}" rx="4"/>'
    for row, text in enumerate(said):
        yield f'<text x="{box.x + 8:.0f}" y="{box.y + 16 + 15 * row:.0f}">{escape(text)}</text>'
    lines = "\n".join(vertex.line for vertex in group.vertices)
    yield "</a>" if links else f"<title>{escape(lines)}</title></g>"


def _edge(above: Box, below: Box) -> str:
    x0, y0 = above.x + above.width / 2, above.y + above.height
    x1, y1 = below.x + below.width / 2, below.y
    bend = min((y1 - y0) / 2, 60.0)
    far = ' class="far"' if y1 - y0 > 160 else ""
    return (
        f'<path{far} d="M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} '
        f'{x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"/>'
    )

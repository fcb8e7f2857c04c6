"""The graph before and after as pictures of a page, with what each box computes.

A box is a link to its panel, which is shown while it is the target of the address: no script.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_cascade.compiler.fold import Folded, Group
from torch_cascade.compiler.markup import Markup, joined, scrolling, table, tag
from torch_cascade.compiler.picture import Pictures, alike_text, label, parts_of, svg
from torch_cascade.compiler.sketch import PARTS, Vertex


def pictures_section(pictures: Pictures, name: str) -> Markup:
    """Both pictures side by side, their legend, and the panels.

    Args:
        pictures: of one graph.
        name: of the graph, as links have it.
    """
    both = [("before", pictures.before), ("after", pictures.after)]
    drawn = [(which, each, f"g{name}-{which}-") for which, each in both if each is not None]
    if not drawn:
        return tag("p", "The graph is too large to be drawn.")
    items = (
        tag("li", tag("span", "", class_=f"swatch s-{part}"), PARTS[part])
        for part in parts_of(*(each for _, each, _ in drawn))
    )
    about = (
        "A box is an op or several that stand together; follow it, with a click or Enter, for its "
        "ops, shapes, strides, dtype and source line. Weights are left out."
    )
    columns = (
        tag("div", tag("h4", which), _picture(which, each, links)) for which, each, links in drawn
    )
    panels = (panel for _, each, links in drawn for panel in _panels(each, links))
    past = f"past-pictures-{name}"
    return joined(
        tag("p", about, " ", tag("a", "Skip the pictures", href=f"#{past}"), class_="soft"),
        tag("ul", *items, class_="legend"),
        tag("div", *columns, class_="pair"),
        tag("div", "", id=past),
        *panels,
    )


def _picture(which: str, drawn: Folded, links: str) -> Markup:
    said = "; ".join(filter(None, map(alike_text, drawn.sections)))
    title = f"the graph {which}, {drawn.layers} attentions" + (f"; {said}" if said else "")
    return scrolling(Markup(svg(drawn, title, links)), f"picture of the graph {which}")


def _panels(drawn: Folded, links: str) -> Iterator[Markup]:
    for section in drawn.sections:
        for group in section.groups:
            yield _panel(group, links, alike_text(section))


def _panel(group: Group, links: str, times: str) -> Markup:
    said = label(group)
    back = tag("a", "close", href=f"#{links}{group.name}-box", class_="close")
    rows = [_row(vertex) for vertex in group.vertices]
    head = ["op", "tensor", "strides", "dtype", "source line", "in the graph's text"]
    part = f"{PARTS.get(group.part, '')}{'; ' if times else ''}{times}"
    inside = (back, tag("b", ": ".join(said)), tag("p", part, class_="soft"), table(head, rows))
    name = f"{links}{group.name}"
    return tag("div", *inside, id=name, class_="panel", role="region", aria_label=said[0])


def _row(vertex: Vertex) -> list[str]:
    where = vertex.where or "unknown"
    return [vertex.op, vertex.made, vertex.strides, vertex.dtype, where, tag("code", vertex.line)]

"""`report.html`: a report as one file that loads nothing, for any browser.

It is read in light and dark, by keyboard, and in a window of 320 px; it has no script. `section`
makes the part of one graph, `page` puts parts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_cascade.compiler.lines import linears_line
from torch_cascade.compiler.markup import Markup, folded, joined, table, tag
from torch_cascade.compiler.options import PREFIX
from torch_cascade.compiler.page_blend import blend_section
from torch_cascade.compiler.page_diff import diff_section
from torch_cascade.compiler.page_graph import pictures_section
from torch_cascade.compiler.page_sites import sites_section
from torch_cascade.compiler.page_style import document
from torch_cascade.compiler.picture import Pictures


def section(graph: dict[str, Any], name: str, pictures: Pictures | None = None) -> Markup:
    """The part of one graph.

    Args:
        graph: its object in the JSON of a report; without "before" there is no text of it.
        name: what links call it; unique in a page.
        pictures: of it; None for none.
    """
    parts = [tag("h2", f"Graph {graph['id'] or name}"), tag("p", _verdict(graph))]
    if graph["blend"] is not None:
        parts.append(blend_section(graph["blend"], graph.get("maps", [])))
    parts.append(sites_section(graph["sites"], graph.get("maps", [])))
    if graph.get("linears") is not None:
        parts.append(tag("p", linears_line(graph["linears"])))
    if pictures is not None:
        parts += [tag("h3", "The graph before and after"), pictures_section(pictures, name)]
    if graph.get("before"):
        parts += [
            tag("h3", "What changed in its text"),
            diff_section(graph["before"], graph["after"]),
        ]
        parts += [_text("before", graph["before"]), _text("after", graph["after"])]
    parts += [_seconds(graph["seconds"]), _options(graph["options"])]
    return joined(tag("section", *parts, id=f"graph-{name}"), Markup("\n"))


def page(report: dict[str, Any], sections: Sequence[tuple[str, Markup]]) -> str:
    """The whole file.

    Args:
        report: the JSON object of a report.
        sections: of its graphs in order, with the names that `section` was given.
    """
    links = (
        tag("li", tag("a", f"graph {graph['id'] or name}", href=f"#graph-{name}"), _brief(graph))
        for graph, (name, _) in zip(report["graphs"], sections, strict=True)
    )
    about = f"torch_cascade {report['torch_cascade']}, torch {report['torch']}"
    body = (
        tag("h1", f"torch_cascade: {_headline(report)}"),
        tag("p", about, class_="soft"),
        tag("nav", tag("ul", *links), aria_label="graphs"),
        *(part for _, part in sections),
    )
    return document("torch_cascade report", tag("main", *body))


def _headline(report: dict[str, Any]) -> str:
    said = "no attention was found"
    if report["sites"]:
        said = f"{report['rewritten']} of {report['sites']} attention sites rewritten"
    blends = [graph["blend"] for graph in report["graphs"] if graph["blend"] is not None]
    if blends:
        layers, reused = sum(len(b["layers"]) for b in blends), sum(b["reused"] for b in blends)
        said += f", {reused} of {layers} layers reuse cached keys and values"
    return said


def _brief(graph: dict[str, Any]) -> str:
    done = sum(site["rewritten"] for site in graph["sites"])
    return f": {done} of {len(graph['sites'])} sites" if graph["sites"] else ": no attention"


def _verdict(graph: dict[str, Any]) -> str:
    """What there is to say of a graph as a whole."""
    if graph["options"]["disable"] == "1":
        return f"Plain Inductor, as disable is set ({PREFIX}DISABLE)."
    if graph["training"]:
        return "Compiled for training, as an input requires a gradient: the passes did not run."
    cached = "The artefact came from Inductor's cache; the passes did not run"
    if graph["cached"] and not graph.get("before"):
        return f"{cached}; {graph['origin']}."
    done = sum(site["rewritten"] for site in graph["sites"])
    found = f"{done} of {len(graph['sites'])} attention sites rewritten"
    found = found if graph["sites"] else "No attention was found"
    return f"{found}; {graph['origin']}. {cached}." if graph["cached"] else f"{found}."


def _text(which: str, text: str) -> Markup:
    return folded(f"all of the graph {which}", tag("div", tag("pre", text), class_="scroll"))


def _seconds(seconds: dict[str, float]) -> Markup:
    rows = [[name, f"{1e3 * time:.3g} ms"] for name, time in seconds.items()]
    return folded("time of the passes", table(["pass", "time"], rows))


def _options(options: dict[str, str]) -> Markup:
    rows = [[name, value or "unset", PREFIX + name.upper()] for name, value in options.items()]
    return folded("options", table(["option", "value", "variable"], rows))

"""Pictures of a graph: what is folded, grouped and coloured, and what a box leads to."""

from __future__ import annotations

import re
from dataclasses import replace

import networkx as nx
import pytest
import torch
from support.html_reader import Reader, checked
from support.shared_prefix import attention, inputs, stack, unshared
from torch import fx

import torch_cascade
from torch_cascade.compiler.fold import folded
from torch_cascade.compiler.page_map import _DARK, _LIGHT
from torch_cascade.compiler.page_style import STYLE
from torch_cascade.compiler.page_tokens import _STYLE as TOKENS
from torch_cascade.compiler.picture import COLOURS, MOST_BOXES, Album, Pictures, svg
from torch_cascade.compiler.record import BlendRecord, Compilation, SiteRecord
from torch_cascade.compiler.sketch import PARTS, Vertex, with_rows


def vertex(name, *reads, op="add", part="other", made="f32[2, 3]", **more):
    line = f"%{name}: {made} = {op}({', '.join(reads)})"
    return Vertex(name, op, made, "(3, 1)", "float32", line, f"m.py:{name}", reads, part, **more)


def names(drawn):
    """Of each section its groups, each as its vertices' names."""
    return [[[v.name for v in g.vertices] for g in s.groups] for s in drawn.sections]


def layers(count):
    """A chain of layers, with one mask for all of them."""
    graph = [vertex("x", op="input", part="input"), vertex("mask", "x", op="ge", made="b8[2, 2]")]
    last = "x"
    for n in range(count):
        graph += [
            vertex(f"norm_{n}", last),
            vertex(f"mul_{n}", f"norm_{n}", op="mul"),
            vertex(f"mm_{n}", f"mul_{n}", op="mm", part="product"),
            vertex(f"sdpa_{n}", f"mm_{n}", "mask", op="cascade.sdpa", part="sdpa"),
        ]
        last = f"sdpa_{n}"
    return (*graph, vertex("out", last), vertex("unread", last, op="clone"))


def test_layers_that_are_alike_are_drawn_once():
    drawn = folded(layers(6))
    assert drawn.layers == 6
    assert [(s.first, s.count) for s in drawn.sections] == [(0, 1), (1, 5), (6, 1)]
    assert names(drawn)[1] == [["norm_1", "mul_1"], ["mm_1"], ["sdpa_1"]]
    # What each of the five reads and gives is there once: the mask in, the next one's input out.
    assert {("mask", "sdpa_1"), ("sdpa_0", "mul_1"), ("sdpa_1", "out")} <= drawn.edges
    assert ("sdpa_1", "mul_1") not in drawn.edges  # from one of the five to the next
    assert nx.is_directed_acyclic_graph(nx.DiGraph(sorted(drawn.edges)))


def test_a_residual_from_one_layer_to_the_next_is_not_drawn_within_one():
    graph, last = [vertex("x", op="input", part="input")], "x"
    for n in range(4):
        graph += [vertex(f"mm_{n}", last, op="mm", part="product")]
        graph += [vertex(f"add_{n}", f"mm_{n}", f"mm_{n - 1}" if n else "x")]
        graph += [vertex(f"sdpa_{n}", f"add_{n}", op="cascade.sdpa", part="sdpa")]
        last = f"sdpa_{n}"
    drawn = folded(graph)
    assert [(s.first, s.count) for s in drawn.sections] == [(0, 1), (1, 3)]
    assert {b for a, b in drawn.edges if a == "mm_1"} == {"add_1"}
    assert ("mm_0", "add_1") in drawn.edges


def test_a_layer_that_differs_stands_for_itself():
    graph = [
        v if v.name != "mm_3" else vertex("mm_3", "mul_3", op="addmm", part="product")
        for v in layers(6)
    ]
    assert [(s.first, s.count) for s in folded(graph).sections] == [
        (0, 1),
        (1, 2),
        (3, 1),
        (4, 2),
        (6, 1),
    ]


def test_boxes_never_make_a_circle():
    """Ops around a product are not one box, though they are joined by a way past it."""
    graph = (
        vertex("x", op="input", part="input"),
        vertex("a", "x"),
        vertex("b", "a", op="mm", part="product"),
        vertex("c", "a", "b"),
        vertex("d", "c", part="rows"),
        vertex("e", "c", "d"),
    )
    drawn = folded(graph)
    assert names(drawn) == [[["x"], ["a"], ["b"], ["c"], ["d"], ["e"]]]
    assert nx.is_directed_acyclic_graph(nx.DiGraph(sorted(drawn.edges)))


def test_weights_are_left_out_and_ends_that_are_alike_are_one_box():
    graph = (
        vertex("w", op="input", part="input", weight=True),
        vertex("t", "w", op="permute", weight=True),
        vertex("x", op="input", part="input"),
        vertex("y", "x", "t", op="mm", part="product"),
        *(vertex(f"clone_{n}", "y", op="clone") for n in range(3)),
    )
    drawn = folded(graph)
    assert names(drawn) == [[["x"], ["y"], ["clone_0"]]]
    assert drawn.sections[0].groups[-1].count == 3
    assert "clone (3 alike)" in svg(drawn, "a picture")


def test_rows_of_a_blend_and_where_they_are_gathered():
    before = (
        vertex("k", op="input", part="cached"),
        vertex("x", op="input", part="input"),
        vertex("mm", "x", op="mm", part="product"),
    )
    after = (
        *before,
        vertex("sort", "mm", op="sort", part="choice"),
        replace(vertex("flat", "sort", op="view"), dtype="int64"),
        vertex("index", "mm", "flat", op="index"),
        vertex("mm_1", "index", op="mm", part="product"),
        vertex("index_1", "mm_1", op="index"),
        vertex("clone", "k", op="clone"),
        vertex("put", "clone", "mm_1", op="index_put"),
    )
    parts = {v.name: v.part for v in with_rows(after, before)}
    assert parts == {
        "k": "cached",
        "x": "input",
        "mm": "product",
        "sort": "choice",
        "flat": "choice",
        "index": "choice",
        "mm_1": "rows",
        "index_1": "rows",
        "clone": "cached",
        "put": "cached",
    }


# --- of real graphs -------------------------------------------------------------------------------


def pictures(fn, *args, **options):
    compiled = torch.compile(fn, backend="cascade", options={"decide": "always"} | options)
    (record,) = torch_cascade.explain(compiled, *args).compilations
    return record.pictures


def parts(drawn):
    return {v.name: g.part for s in drawn.sections for g in s.groups for v in g.vertices}


def test_keys_and_values_have_the_same_colours_before_and_after():
    drawn = pictures(attention, *inputs())
    before, after = parts(drawn.before), parts(drawn.after)
    assert before["sdpa"] == "sdpa" and {"merge", "own", "shared"} <= {*after.values()}
    for name in ("arg0_1", "arg1_1"):
        assert before[name] == after[name] != "input"
    assert {after["arg0_1"], after["arg1_1"]} == {"shared", "own"}


def test_attention_that_is_left_is_the_same_in_both():
    drawn = pictures(unshared, *inputs())
    assert drawn.before == drawn.after


def test_hand_written_attention_is_seen_in_both():
    def eager(q, prefix, suffix):
        return (q @ suffix.mT).softmax(-1) @ suffix

    drawn = pictures(eager, *inputs())
    assert "sdpa" in parts(drawn.before).values() and drawn.before.layers == 1


def test_a_graph_without_attention_or_too_large_is_not_drawn():
    graph = fx.Graph()
    assert Album().pictures(Compilation()) is None
    album = Album({"before": layers(2)})
    assert album.pictures(Compilation()) is None
    record = Compilation([SiteRecord("sdpa_0", "")], BlendRecord("", ""))
    assert album.pictures(record).before.layers == 2
    chain = [vertex("x0", op="input", part="input")]
    chain += [vertex(f"x{n}", f"x{n - 1}", op="mm") for n in range(1, MOST_BOXES + 1)]
    chain = [v if n % 2 else vertex(v.name, *v.inputs, part="product") for n, v in enumerate(chain)]
    assert Album({"before": tuple(chain)}).pictures(record) == Pictures(None, None)
    assert not list(graph.nodes)


# --- in a page ------------------------------------------------------------------------------------


def test_every_box_leads_to_its_panel_and_back():
    report = torch_cascade.explain(
        torch.compile(stack(3), backend="cascade", options={"decide": "always"}), *inputs()
    )
    page = report.html()
    reader = checked(page)
    panels = [e for _, e in reader.elements if e.get("class") == "panel"]
    boxes = [a for a in reader.all("a") if a.get("id", "").endswith("-box")]
    assert len(panels) == len(boxes) > 10
    assert {a["href"] for a in boxes} == {f"#{panel['id']}" for panel in panels}
    assert {a["href"] for a in reader.all("a") if a.get("class") == "close"} == {
        f"#{a['id']}" for a in boxes
    }
    assert all(a["aria-label"] for a in boxes)
    for drawn in (report.compilations[0].pictures.before, report.compilations[0].pictures.after):
        for group in (g for s in drawn.sections for g in s.groups):
            for v in group.vertices:
                for said in (v.op, v.made, v.strides, v.dtype, v.line, v.where or "unknown"):
                    assert said in reader.text


def test_a_legend_has_the_parts_that_occur():
    page = Reader(
        torch_cascade.explain(
            torch.compile(attention, backend="cascade", options={"decide": "always"}), *inputs()
        ).html()
    )
    assert PARTS["shared"] in page.text and PARTS["merge"] in page.text
    assert PARTS["rows"] not in page.text


# --- colours --------------------------------------------------------------------------------------


def contrast(one, other):
    """Of two colours "#rgb" or "#rrggbb", as WCAG has it."""

    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        channels = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_in_pictures_can_be_read():
    assert set(COLOURS) == set(PARTS)
    for light, dark in (*COLOURS.values(), *zip(_LIGHT, _DARK, strict=True)):
        assert contrast(light, "#000") >= 4.5 and contrast(dark, "#fff") >= 4.5


@pytest.mark.parametrize("which", [0, 1], ids=["light", "dark"])
def test_text_of_pages_can_be_read(which):
    roots = re.findall(r":root\{([^}]*)\}", STYLE)
    colours = dict(re.findall(r"--(\w+):(#\w+)", roots[which]))
    for back in ("back", "box"):
        for text in ("text", "soft", "good", "bad", "link"):
            assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
    for back in ("old", "new"):
        assert contrast(colours["text"], colours[back]) >= 4.5
    for kind in ("again", "fresh"):
        back = re.findall(rf"\.{kind}{{background:(#\w+)", TOKENS)[which]
        assert contrast(colours["text"], back) >= 4.5


def test_the_contrast_of_known_colours():
    assert contrast("#000", "#fff") == pytest.approx(21)
    assert contrast("#777777", "#fff") == pytest.approx(4.48, abs=0.01)

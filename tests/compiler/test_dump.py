"""The option `dump`: what is written where, and the picture."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import networkx as nx
import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.shared_prefix import attention, inputs, sdpa, stack, unshared
from torch._dynamo.exc import BackendCompilerFailed

import torch_cascade
from torch_cascade.compiler import dump
from torch_cascade.compiler.dump import Dump
from torch_cascade.compiler.journal import Place
from torch_cascade.compiler.layers import arrange
from torch_cascade.compiler.record import Compilation

PASSES = ("01.cascade", "02.blend", "03.linears", "04.lower")
TEXTS = {"before.txt", "after.txt", "lowered.txt", "graph.svg", "graph.json", "section.html"}
RUNNABLE = {f"{n}.{when}.py" for n in PASSES for when in ("before", "after")} | {"repro.py"}
ALL = TEXTS | RUNNABLE
REPORTS = {"index.md", "report.json", "report.html"}


def run(fn, folder, args=None, **options):
    """Compile and call; the record."""
    backend = eager_cascade(dump=str(folder), **options)
    torch.compile(fn, backend=backend)(*(args or inputs()))
    return last_compilation()


def names(folder):
    return {path.name for path in folder.iterdir()}


# --- files ----------------------------------------------------------------------------------------


def test_what_is_written(tmp_path):
    folder = tmp_path / "deep" / "dump"
    record = run(attention, folder)
    assert names(folder) == {"000"} | REPORTS and names(folder / "000") == ALL
    assert (folder / "000/before.txt").read_text() == record.before + "\n"
    assert (folder / "000/after.txt").read_text() == record.after + "\n"
    lowered = (folder / "000/lowered.txt").read_text()
    assert "cascade." not in lowered and "%attend" not in lowered
    content = json.loads((folder / "report.json").read_text())
    (graph,) = content["graphs"]
    assert (content["version"], content["sites"], content["rewritten"]) == (1, 1, 1)
    assert graph == json.loads((folder / "000/graph.json").read_text())
    of_report = {*json.loads(torch_cascade.last_report().to_json())["graphs"][-1]}
    assert {*graph} == of_report - {"before", "after"} | {"folder", "notes"}
    assert graph["folder"] == "000" and graph["notes"] == ["Inductor handed out no generated code"]
    assert graph["options"]["dump"] == str(folder)


def broken(q, prefix, suffix):
    o = attention(q, prefix, suffix)
    torch._dynamo.graph_break()
    return o.cos()


def test_every_graph_has_a_number_and_numbers_go_on(tmp_path, monkeypatch):
    (tmp_path / "007").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setenv("TORCH_CASCADE_DUMP", str(tmp_path))
    torch_cascade.explain(broken, *inputs())
    assert names(tmp_path) == {"007", "008", "009", "notes.txt"} | REPORTS
    assert names(tmp_path / "007") == set() and names(tmp_path / "009") == ALL - {"graph.svg"}
    torch_cascade.explain(unshared, *inputs())
    content = json.loads((tmp_path / "report.json").read_text())
    assert [graph["folder"] for graph in content["graphs"]] == ["008", "009", "010"]
    assert (content["sites"], content["rewritten"]) == (2, 1)
    assert names(tmp_path / "010") == ALL


def test_a_training_graph_has_its_entry_and_part_only(tmp_path):
    q, prefix, suffix = inputs()
    run(attention, tmp_path, [q.requires_grad_(), prefix, suffix])
    assert names(tmp_path / "000") == {"graph.json", "section.html"}
    (graph,) = json.loads((tmp_path / "report.json").read_text())["graphs"]
    assert graph["training"] and graph["sites"][0]["declined"]["reason"] == "requires-grad"


def test_disabled_means_disabled(tmp_path):
    run(attention, tmp_path / "dump", disable=True)
    assert names(tmp_path) == set()


def test_texts_are_there_though_code_generation_failed(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no code")

    monkeypatch.setattr("support.backend.boxed", fail)
    with pytest.raises(BackendCompilerFailed, match="no code"):
        run(attention, tmp_path)
    assert names(tmp_path) == {"000"} and names(tmp_path / "000") == ALL - {
        "graph.json",
        "section.html",
    }


def test_strict_writes_what_it_refuses(tmp_path):
    with pytest.raises(BackendCompilerFailed, match="strict: none of 1"):
        run(unshared, tmp_path, strict=True)
    assert json.loads((tmp_path / "report.json").read_text())["rewritten"] == 0


def test_caches_are_off_as_a_cached_artefact_has_no_graphs(tmp_path, monkeypatch):
    seen = []

    def compile_fx(gm, inputs, config_patches, **keywords):
        seen.append(config_patches.get("force_disable_caches"))
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    run(torch.cos, tmp_path, inputs()[:1])
    torch._dynamo.reset()
    torch.compile(torch.cos, backend=eager_cascade())(inputs()[0])
    assert seen == [True, None]


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_option(path, tmp_path):
    (tmp_path / "file").write_text("")
    said = r"option 'dump' \(variable TORCH_CASCADE_DUMP\): cannot write to .*file.*: (Not|File)"
    with pytest.raises(BackendCompilerFailed, match=said) as caught:
        run(attention, tmp_path / path)
    assert isinstance(caught.value.inner_exception, ValueError)


def test_a_repeated_attempt_writes_over_the_one_before(tmp_path, monkeypatch):
    def claim(context, attempt):
        monkeypatch.setattr(Place, "current", lambda: Place(context, attempt))
        dump = Dump.claim(tmp_path)
        dump.finish(Compilation())
        return dump.folder.name

    one, other = object(), object()
    places = [(one, 0), (one, 1), (one, 1), (other, 0), (other, 2), (None, 0), (None, 0)]
    assert [claim(*place) for place in places] == ["000", "000", "001", "002", "002", "003", "004"]


def test_another_process_takes_a_number(tmp_path, monkeypatch):
    made = type(tmp_path).mkdir

    def mkdir(self, *args, **kwargs):
        if self.name == "000":
            made(self)  # just before us
        return made(self, *args, **kwargs)

    monkeypatch.setattr(type(tmp_path), "mkdir", mkdir)
    assert Dump.claim(tmp_path).folder.name == "001"


# --- the picture ----------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def drawn(folder):
    """Of each box: the colour, its lines, what hovering shows."""
    root = ElementTree.parse(folder / "000/graph.svg").getroot()
    assert root.tag == f"{SVG}svg"
    boxes = []
    for group in root.iter(f"{SVG}g"):
        (rect,) = group.iter(f"{SVG}rect")
        lines = [text.text for text in group.iter(f"{SVG}text")]
        (title,) = group.iter(f"{SVG}title")
        assert float(rect.get("width")) >= 6.6 * max(map(len, lines))
        boxes.append((rect.get("class"), lines, title.text))
    return boxes, root


def test_the_picture_of_one_attention(tmp_path):
    run(attention, tmp_path)
    boxes, root = drawn(tmp_path)
    said = [lines[0] for _, lines, _ in boxes]
    assert sorted(said) == [
        "arg0_1",
        "arg1_1",
        "arg2_1",
        "cascade.attend",
        "cascade.attend for 4 branches",
        "cascade.merge",
    ]
    assert len(list(root.iter(f"{SVG}path"))) == 4 + 2
    colours = {lines[0]: fill for fill, lines, _ in boxes}
    assert len(set(colours.values())) == 4  # the prefix, the suffix, merge, everything else
    base = last_compilation().sites[0].segments[0].base.split()[0]
    suffix = last_compilation().sites[0].segments[1].base.split()[0]
    assert colours[base] == colours["cascade.attend for 4 branches"] == "k-shared"
    assert colours[suffix] == colours["cascade.attend"] == "k-own"
    assert all(title.startswith("%") for _, _, title in boxes)


def test_layers_that_are_alike_are_drawn_once(tmp_path):
    run(stack(3), tmp_path)
    boxes, root = drawn(tmp_path)
    merges = [lines[0] for _, lines, _ in boxes if "merge" in lines[0]]
    assert merges == ["cascade.merge"] * 2  # the first layer has nothing to add to
    said = [text.text for text in root.iter(f"{SVG}text")]
    assert "layers 1 to 2 are alike: 2 times" in said


def test_what_was_left_as_it_is_and_odd_names_are_drawn_too(tmp_path):
    def fn(q, prefix, suffix):
        return sdpa(q, suffix, suffix, torch.ones(5, 7).tril() > 0.5)

    run(fn, tmp_path)
    boxes, _ = drawn(tmp_path)
    assert "cascade.sdpa" in [lines[0] for _, lines, _ in boxes]


def test_layers_of_boxes():
    dag = nx.DiGraph([("a", "b"), ("b", "d"), ("c", "d"), ("x", "y")])
    boxes = arrange(dag, {node: 4 for node in dag})
    assert boxes["a"].y < boxes["b"].y == boxes["c"].y < boxes["d"].y
    assert min(boxes[n].x for n in "xy") > max(boxes[n].x for n in "abcd")
    rows = {}
    for box in boxes.values():
        rows.setdefault(box.y, []).append(box)
    for row in rows.values():
        row.sort(key=lambda box: box.x)
        assert all(a.x + a.width < b.x for a, b in pairwise(row))


def test_edges_do_not_cross_where_they_need_not():
    ladder = nx.DiGraph([(f"t{i}", f"b{4 - i}") for i in range(5)])
    ladder.add_edges_from((f"b{i}", "end") for i in range(5))
    boxes = arrange(ladder, {node: 2 for node in ladder})
    order = sorted(range(5), key=lambda i: boxes[f"t{i}"].x)
    assert sorted(range(5), key=lambda i: boxes[f"b{4 - i}"].x) == order


def test_a_graph_that_another_process_finishes_meanwhile_is_not_lost(tmp_path, monkeypatch):
    """It appears between the first look at the folder and the writing of the reports."""
    run(attention, tmp_path)
    (content,) = tmp_path.glob("*/graph.json")
    late = tmp_path / "007" / "graph.json"
    write = dump._write

    def slow(root, path, text):
        if path.name == "report.json" and not late.exists():
            late.parent.mkdir()
            late.write_text(content.read_text().replace(f'"{content.parent.name}"', '"007"'))
        write(root, path, text)

    monkeypatch.setattr(dump, "_write", slow)
    Dump.claim(tmp_path)._report()
    report = json.loads((tmp_path / "report.json").read_text())
    assert "007" in [graph["folder"] for graph in report["graphs"]]

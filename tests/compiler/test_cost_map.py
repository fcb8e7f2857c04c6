"""The map of a decision: the cost model's own numbers, in the JSON and as a picture."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from support import machines
from support.html_reader import checked
from support.shared_prefix import attention, inputs, stack, unshared

import torch_cascade
from torch_cascade.compiler import calibration, structured_trace
from torch_cascade.compiler.cost_map import cost_map
from torch_cascade.compiler.decide import priced
from torch_cascade.compiler.page_map import map_section
from torch_cascade.compiler.work import KeyRun, Work


def facts(prefix=2000, branches=8, levels=1):
    rows = [1, 2][:levels]
    runs = (*(KeyRun(r, prefix // r) for r in rows), KeyRun(rows[-1] * branches, 30))
    work = Work(
        batch=rows[-1] * branches,
        heads=32,
        q_len=1,
        kv_heads=8,
        naive_heads=32,
        d_k=128,
        d_v=128,
        q_bytes=2,
        kv_bytes=2,
        dtype="bfloat16",
        copied=True,
        device=torch.device("cpu"),
        runs=runs,
    )
    return priced(work, machines.CPU)


@pytest.mark.parametrize("levels", [1, 2])
def test_every_number_is_the_cost_models(levels):
    at = facts(levels=levels)
    drawn = cost_map(at)
    assert drawn.now == (2000, 8)
    for count, row in zip(drawn.branches, drawn.gain, strict=True):
        for keys, gain in zip(drawn.prefix, row, strict=True):
            point = at.with_branches(count).with_prefix(keys)
            assert gain == pytest.approx(point.plain.seconds / point.cascade.seconds, rel=6e-3)
    assert drawn.prefix[0] < 2000 < drawn.prefix[-1] and drawn.branches[-1] > 8


def test_the_line_is_where_the_decision_turns():
    at = facts(branches=2)
    turns = cost_map(at).break_even
    assert [keys for branches, keys in turns if branches == 2] == [at.break_even()["prefix"]]
    for branches, keys in turns:
        around = [at.with_branches(branches).with_prefix(n).pays for n in (keys - 1, keys)]
        assert around[0] != around[1]


@pytest.mark.parametrize("prefix, branches", [(3, 2), (500_000, 1000)])
def test_the_call_is_within_the_map(prefix, branches):
    drawn = cost_map(facts(prefix, branches))
    assert drawn.prefix[0] <= prefix <= drawn.prefix[-1]
    assert drawn.branches[0] <= branches <= drawn.branches[-1]


def test_nothing_shared_has_no_map():
    assert cost_map(facts(branches=1)) is None


def test_json_has_a_map_once_for_sites_that_are_alike():
    (graph,) = json.loads(torch_cascade.explain(stack(4), *inputs(700)).to_json())["graphs"]
    assert [site["decision"]["costs"]["map"] for site in graph["sites"]] == [0] * 4
    (drawn,) = graph["maps"]
    assert drawn["now"] == [700, 4] and len(drawn["gain"]) == len(drawn["branches"])
    assert map_section(drawn).count("<rect") == len(drawn["branches"]) * len(drawn["prefix"])
    (graph,) = json.loads(torch_cascade.explain(unshared, *inputs()).to_json())["graphs"]
    assert graph["maps"] == []


def test_the_page_shows_and_tells_the_map(monkeypatch):
    monkeypatch.setattr(calibration, "_table", lambda device, threads: machines.CPU)
    reader = checked(torch_cascade.explain(attention, *inputs(700)).html())
    (drawn,) = [svg for svg in reader.all("svg") if svg["class"] == "map"]
    said = drawn["aria-label"]
    assert drawn["role"] == "img" and "This call has 700 keys and 4 branches." in said
    assert re.search(r"The decision turns at \d+ keys with \d+ branches", said)
    assert "keys of the prefix" in reader.text and "cascade pays" in reader.text


def test_a_point_stands_where_its_sizes_are():
    drawn = {"prefix": [16, 32, 64], "branches": [2, 4], "gain": [[0.4, 0.9, 1.1], [1.3, 3, 9]]}
    svg = map_section(drawn | {"break_even": [(2, 64)], "now": [32, 4]})
    (ring,) = re.findall(r'class="now" cx="(\d+)" cy="(\d+)"', svg)
    (dot,) = re.findall(r'class="dot" cx="(\d+)" cy="(\d+)"', svg)
    cells = re.findall(r'class="m-(\d)" x="(\d+)" y="(\d+)"', svg)
    assert [fill for fill, _, _ in cells] == list("023456")
    corners = {(int(x), int(y)): fill for fill, x, y in cells}
    assert corners[int(ring[0]) - 23, int(ring[1]) - 12] == "5"  # the middle of a cell
    assert corners[int(dot[0]) - 23, int(dot[1]) - 12] == "3"


def test_compiling_makes_no_map(monkeypatch):
    monkeypatch.setattr("torch_cascade.compiler.summary.cost_map", None)
    # A trace has the JSON where somebody listens, and in tests it is always made.
    monkeypatch.setattr(structured_trace, "_trace_structured", lambda: None)
    report = torch_cascade.explain(attention, *inputs(700))
    with pytest.raises(TypeError):
        report.to_json()


def test_a_map_takes_little_time():
    at = facts(prefix=2017)
    begin = time.perf_counter()
    cost_map(at)
    assert time.perf_counter() - begin < 2.0  # some 0.06 s; a busy machine may be slow

"""What `TORCH_TRACE` and `compile_times` show of a compilation."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.backend import eager_cascade
from support.shared_prefix import attention, inputs
from torch._dynamo.utils import compilation_time_metrics, compile_times

import torch_cascade
from torch_cascade.compiler import structured_trace

TESTS = Path(__file__).parents[1]
OF_TORCH = structured_trace._trace_structured


@pytest.fixture(autouse=True)
def _torch_decides_what_is_made(monkeypatch):
    """Elsewhere, what there is to trace is always made: see `conftest.py`."""
    monkeypatch.setattr(structured_trace, "_trace_structured", OF_TORCH)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from support.backend import eager_cascade
from support.shared_prefix import attention, inputs, unshared
torch.compile(attention, backend=eager_cascade(decide="always"))(*inputs())
torch.compile(unshared, backend=eager_cascade())(*inputs())
"""


def artifacts(folder):
    """(name, compile id, payload) of ours, in order; a payload's lines are indented by a tab."""
    (log,) = folder.glob("*.log")
    found, payload = [], None
    for line in log.read_text().splitlines():
        if line.startswith("\t") and payload is not None:
            payload.append(line[1:])
            continue
        content = json.loads(line[line.index("{") :]) if "{" in line else {}
        payload = []
        name = content.get("artifact", {}).get("name", "")
        if name.startswith("cascade_"):
            found.append((name, content["frame_id"], payload))
    return [(name, frame, "\n".join(lines)) for name, frame, lines in found]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    env = os.environ | {"TORCH_TRACE": str(folder), "PYTHONPATH": _path()}
    command = [sys.executable, "-c", PROGRAM, str(TESTS)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return artifacts(folder)


def _path():
    first = str(Path(torch_cascade.__file__).parents[1])
    return os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH")]))


def test_each_compilation_has_its_graphs_and_its_report(traced):
    names = [(name.removeprefix("cascade_"), frame) for name, frame, _ in traced]
    graphs = ("graph_before", *["graph_after"] * 3, "graph_lowered")
    assert names == [(n, f) for f in (0, 1) for n in (*graphs, "report", "report_json")]


def test_what_they_say(traced):
    first = {name: payload for name, frame, payload in traced if frame == 0}
    assert "= cascade.sdpa(" in first["cascade_graph_before"]
    assert "= cascade.merge(" in first["cascade_graph_after"]
    assert "merge" not in first["cascade_graph_lowered"]
    assert "1 of 1 attention sites rewritten" in first["cascade_report"]
    report = json.loads(first["cascade_report_json"])
    assert report["rewritten"] == 1 and report["graphs"][0]["id"] == "0/0"
    assert report["graphs"][0]["after"] == first["cascade_graph_after"]


def test_nothing_is_made_if_nobody_listens(monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    monkeypatch.setattr(structured_trace, "show", None)
    torch.compile(attention, backend=eager_cascade())(*inputs())


def test_a_torch_without_the_trace_compiles(monkeypatch):
    monkeypatch.delattr("torch._logging._internal.trace_structured")
    structured_trace.trace_graph("before", torch.fx.Graph())


def test_each_pass_has_its_time_in_compile_times():
    compilation_time_metrics.clear()
    torch.compile(attention, backend=eager_cascade())(*inputs())
    names = {
        f"cascade.{name}" for name in ("capture", "cascade", "blend", "linears", "lower", "cleanup")
    }
    assert names <= set(compilation_time_metrics)
    assert all(name in compile_times() for name in names)
    record = torch_cascade.last_report().compilations[-1]
    (measured,) = compilation_time_metrics["cascade.cascade"]
    assert abs(measured - record.seconds["cascade"]) < 0.05

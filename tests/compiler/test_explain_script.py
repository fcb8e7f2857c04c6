"""`python -m torch_cascade explain script.py`: the script as Python runs it, then the report."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys

import pytest
from support.backend import eager_cascade

from torch_cascade.__main__ import main
from torch_cascade.compiler import backend
from torch_cascade.compiler.record import Compilation

SCRIPT = """
import sys, torch
from support.shared_prefix import attention, inputs, unshared

assert __name__ == "__main__"
print("got", sys.argv[1:], sys.path[0])
def run(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend=cascade_without_code)(*inputs())
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script whose backend generates no code; its path."""
    without_code = eager_cascade(decide="always")
    monkeypatch.setattr(builtins, "cascade_without_code", without_code, raising=False)

    def write(body):
        path = tmp_path / "some script.py"
        path.write_text(SCRIPT + body)
        return path

    return write


def test_the_script_sees_its_arguments_and_the_report_follows(script, tmp_path, capsys):
    path = script("run(attention); run(unshared)")
    argv, search = [*sys.argv], [*sys.path]
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(["explain", *files, str(path), "--json", "x", "-v"]) == 0
    said = capsys.readouterr().out
    assert f"got ['--json', 'x', '-v'] {tmp_path}" in said
    assert said.index("got") < said.index("torch_cascade: 1 of 2 attention sites rewritten")
    assert json.loads((tmp_path / "r.json").read_text())["rewritten"] == 1
    assert "1 of 2 attention sites rewritten" in (page := (tmp_path / "r.html").read_text())
    assert page.count('class="graph"') == 4
    assert (sys.argv, sys.path) == (argv, search)


@pytest.mark.parametrize(
    "end, status, said",
    [
        ("raise ValueError('at the end')", 1, "ValueError: at the end"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('a message')", 1, "a message"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_a_script_that_ends_early_is_reported_with_its_status(script, capsys, end, status, said):
    assert main(["explain", str(script(f"run(attention)\n{end}"))]) == status
    output = capsys.readouterr()
    assert "1 of 1 attention sites rewritten" in output.out and said in output.err
    assert "runpy" not in output.err and "explain_script.py" not in output.err


MANY = """
from torch_cascade.compiler.backend import _journal
from torch_cascade.compiler.record import Compilation
for _ in range(70):
    _journal().add(Compilation())
"""


def test_all_graphs_are_kept_and_none_of_before(script, tmp_path, capsys):
    backend._journal().add(Compilation())
    path, report = script(MANY), tmp_path / "r.json"
    assert main(["explain", "--json", str(report), str(path)]) == 0
    assert len(json.loads(report.read_text())["graphs"]) == 70
    assert len(backend.recent()) == 64


def test_a_script_that_is_not_there(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"script: expected a Python file, got {tmp_path}\n"


def test_a_report_that_cannot_be_written(script, tmp_path, capsys):
    path = tmp_path / "none" / "r.html"
    assert main(["explain", "--html", str(path), str(script("run(attention)"))]) == 2
    output = capsys.readouterr()
    assert f"cannot write {path}" in output.err and "1 of 1" in output.out


PLAIN = """
import torch
def double(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)
with torch.no_grad():
    torch.compile(double, backend="cascade")(torch.ones(1, 2, 3, 16))
"""


def test_a_warm_cache_does_not_keep_the_passes_from_speaking(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def output(*command):
        run = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=variables, timeout=300
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert output(str(tmp_path / "plain.py")) == ""  # fills the cache
    said = output("-m", "torch_cascade", "explain", str(tmp_path / "plain.py"))
    assert "0 of 1 attention sites rewritten" in said and "no-shared-prefix" in said
    assert "cache; the passes did not run" not in said

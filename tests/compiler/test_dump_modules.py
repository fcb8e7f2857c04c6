"""The files of a dump that can be run, and `repro.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade
from support.blend_plain import Plain
from support.blend_plain import inputs as prompt
from support.shared_prefix import B, D, H, P, S, T, attention, inputs, stack

from torch_cascade.compiler import repro
from torch_cascade.compiler.dump_modules import Modules
from torch_cascade.compiler.runnable_kernels import NotRunnable, _import_of


def dumped(fn, folder, args, *, dynamic=False, **options):
    """Compile and call; the folder of the one graph."""
    options = {"decide": "always", "dump": str(folder)} | options
    with torch.no_grad():
        torch.compile(fn, backend=eager_cascade(**options), dynamic=dynamic)(*args)
    return folder / "000"


def run_repro(folder, *arguments):
    return repro.main(repro.load(folder / "repro.py").CASE, ["--eager", *arguments])


def results(path, args):
    """Of a file's graph on real inputs, which Dynamo may have put into another order."""
    module = repro.load(path)
    return module.Graph()(*(like(x, args) for x in module.make_inputs()))


def like(made, args):
    (x,) = (x for x in args if (x.shape, x.dtype) == (made.shape, made.dtype))
    return x


# --- graphs as Python -----------------------------------------------------------------------------


def test_each_file_computes_what_its_graph_computed(tmp_path):
    args = inputs()
    folder = dumped(attention, tmp_path, args)
    files = sorted(folder.glob("0*.py"))
    assert len(files) == 8
    for path in files:
        (out,) = results(path, args)
        torch.testing.assert_close(out, attention(*args))
    assert "torch.ops.cascade.sdpa" in (folder / "01.cascade.before.py").read_text()
    assert "torch.ops.cascade.merge" in (folder / "01.cascade.after.py").read_text()
    assert "torch.ops.cascade." not in (folder / "04.lower.after.py").read_text()


def test_sizes_strides_and_kinds_of_numbers_are_kept(tmp_path):
    def fn(q, prefix, suffix, ids, flags):
        return attention(q, prefix, suffix) + flags[:, None, None], torch.arange(50)[ids]

    q, prefix, suffix = inputs()
    q = (3 + 0.1 * q).transpose(1, 2).contiguous().transpose(1, 2)
    ids, flags = torch.tensor([7, 9, 30]), torch.ones(B * T, 1, dtype=torch.bool)
    args = (q, prefix[:1].expand(B, -1, -1, -1), suffix, ids, flags)
    made = repro.load(dumped(fn, tmp_path, args) / "01.cascade.before.py").make_inputs()
    assert len(made) == len(args)
    assert all(x.stride() == like(x, args).stride() for x in made)
    q, ids, flags = (like(x, made) for x in (q, ids, flags))
    assert abs(q.mean() - 3) < 0.05 and abs(q.std() - 0.1) < 0.02
    assert ids.diff().min() > 0 and 7 <= ids.min() and ids.max() <= 30
    assert flags.all()


def test_symbolic_sizes_are_arguments(tmp_path):
    folder = dumped(attention, tmp_path, inputs(), dynamic=True)
    module = repro.load(folder / "01.cascade.after.py")
    made = module.make_inputs()
    sizes = [x for x in made if isinstance(x, int)]
    assert {B * T, P, S} <= {*sizes}
    args = inputs()
    fewer = [args[0][: 2 * B], args[1], args[2][: 2 * B]]
    tensors = {x.shape: y for x, y in zip(args, fewer, strict=True)}
    other = [
        tensors[x.shape] if isinstance(x, torch.Tensor) else 2 * B if x == B * T else x
        for x in made
    ]
    (out,) = module.Graph()(*other)
    torch.testing.assert_close(out, attention(*fewer))


def test_constants_and_bodies_of_higher_order_ops(tmp_path):
    table = [1.5, -2.5] * 8

    def fn(q, prefix, suffix, which):
        y = attention(q + torch.tensor(table), prefix, suffix)
        return torch.cond(which, lambda x: x + torch.tensor(table), lambda x: x.cos(), (y,))

    args = (*inputs(), torch.tensor(True))
    folder = dumped(fn, tmp_path, args)
    held = torch.load(folder / "constants.pt", weights_only=True)
    assert all(x.tolist() == table for x in held.values()) and len(held) >= 1
    torch.testing.assert_close(results(folder / "04.lower.after.py", args)[0], fn(*args))
    assert run_repro(folder) == 0


def test_a_graph_that_cannot_be_written_says_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("torch_cascade.compiler.dump_modules._LIMIT", 10)

    def fn(q, prefix, suffix):
        return attention(q + torch.tensor([1.5] * D), prefix, suffix)

    folder = dumped(fn, tmp_path, inputs())
    assert not [*folder.glob("0*.py"), *folder.glob("repro.py")]
    assert "the graph holds more than 0 MiB of tensors" in (tmp_path / "index.md").read_text()
    assert (folder / "lowered.txt").exists()
    assert "is not written as Python" in caplog.text


def test_a_fault_of_the_writer_is_no_fault_of_the_compilation(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no print")

    monkeypatch.setattr("torch_cascade.compiler.dump_modules.source", fail)
    folder = dumped(attention, tmp_path, inputs())
    assert not [*folder.glob("0*.py")] and "no print" in (tmp_path / "index.md").read_text()


def test_stages_of_a_second_run_replace_those_of_the_first():
    written = {}
    modules = Modules(written.__setitem__)
    graph = torch.fx.symbolic_trace(lambda x: x.cos()).graph
    for stage in ("before", "cascade", "before", "cascade", "lower", "cleanup"):
        modules.see(stage, graph)
    assert modules.notes and not written  # a graph without values: said, not raised
    assert len(modules.notes) == 3


def test_triton_kernels_are_imported():
    pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_functional,
    )

    from torch_cascade.compiler.runnable_kernels import table
    from torch_cascade.kernels import triton_merge

    kernel = triton_merge.merge_parts
    number = kernel_side_table.add_kernel(kernel)
    constants = kernel_side_table.add_constant_args({"BLOCK": 16})
    graph = torch.fx.Graph()
    numbers = {"kernel_idx": number, "constant_args_idx": constants}
    graph.output(graph.call_function(triton_kernel_wrapper_functional, kwargs=numbers))
    made = {}
    exec(table([graph]), made)
    (again,) = made["KERNELS"].values()
    assert kernel_side_table.get_kernel(again) is kernel
    (other,) = made["CONSTANT_ARGS"].values()
    assert kernel_side_table.get_constant_args(other) == {"BLOCK": 16}
    kernel_side_table.constant_args[constants] = {"BLOCK": object()}
    with pytest.raises(NotRunnable, match="constants of a Triton kernel have no text"):
        table([graph])
    assert table([torch.fx.Graph()]) == ""


def test_a_kernel_that_cannot_be_imported_is_named():
    def kernel():
        pass

    with pytest.raises(NotRunnable, match="the Triton kernel kernel cannot be imported from"):
        _import_of(kernel)


# --- repro.py -------------------------------------------------------------------------------------


def test_a_right_graph_is_found_right(tmp_path, capsys):
    folder = dumped(stack(2), tmp_path, inputs())
    assert run_repro(folder) == 0 and run_repro(folder, "--seed", "7") == 0
    out = capsys.readouterr().out
    assert "after, eager: right" in out and "lowered, eager: right" in out
    assert out.endswith("all results are right\n")


@pytest.mark.parametrize(
    "name", ["01.cascade.after.py", "03.linears.after.py", "04.lower.after.py"]
)
def test_a_wrong_graph_is_found_wrong(name, tmp_path, capsys):
    folder = dumped(attention, tmp_path, inputs())
    path = folder / name
    text = path.read_text()
    result = text[: text.index("# One for each")].rsplit("return (", 1)[1].split(",")[0]
    path.write_text(text.replace(f"return ({result},", f"return ({result} * 1.0001,"))
    # What runs is the graph after the last pass, and the lowered one.
    wrong = name != "01.cascade.after.py"
    assert run_repro(folder) == wrong
    assert ("error" in capsys.readouterr().out.split("against float64")[1].split("all")[0]) or wrong


def test_inputs_that_are_written_to_are_compared(tmp_path, capsys):
    def fn(q, prefix, suffix, kept):
        kept.add_(suffix)
        return attention(q, prefix, kept).sum()

    folder = dumped(fn, tmp_path, (*inputs(), torch.randn(B * T, H, S, D)))
    assert run_repro(folder) == 0
    path = folder / "03.linears.after.py"
    text = path.read_text()
    assert "torch.ops.aten.copy_.default(" in text
    lines = [
        line.replace(", add)", ", add * 2)") if "copy_.default(" in line else line
        for line in text.splitlines()
    ]
    path.write_text("\n".join(lines))
    capsys.readouterr()
    assert run_repro(folder) == 1
    assert "result 1: error" in capsys.readouterr().out


def test_random_numbers_of_the_graph_are_the_same_in_every_run(tmp_path, capsys):
    def fn(q, prefix, suffix):
        return attention(F.dropout(q, 0.5) + torch.randn_like(q), prefix, suffix)

    folder = dumped(fn, tmp_path, inputs())
    assert run_repro(folder) == 0
    path = folder / "03.linears.after.py"
    path.write_text(path.read_text().replace("scale = None", "scale = 0.4"))
    assert run_repro(folder) == 1
    assert "after, eager: result 0: error" in capsys.readouterr().out


def test_a_blend_is_compared_with_itself(tmp_path, capsys):
    """It recomputes some tokens only, so what comes out is not what the graph before computes."""
    folder = dumped(Plain(), tmp_path, prompt(), min_tokens=0)
    assert (
        "exact=False,  # a blend recomputes some tokens only" in (folder / "repro.py").read_text()
    )
    assert run_repro(folder) == 0
    out = capsys.readouterr().out
    assert "after, eager: error" in out and "lowered, eager: right" in out


def test_a_missing_device_has_its_own_status(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    folder = dumped(attention, tmp_path, inputs())
    path = folder / "01.cascade.before.py"
    path.write_text(path.read_text().replace("device='cpu'", "device='cuda:0'"))
    assert run_repro(folder) == 2
    assert "the graph is one for cuda:0, which is not there" in capsys.readouterr().out


def test_inputs_are_wide_in_the_reference():
    x = torch.tensor([1.0, 2.0**-30])
    with repro.InFloat64():
        total = x.to(torch.float16).to(torch.float32).sum() + torch.zeros(1, dtype=torch.float32)
    assert total.dtype is torch.float64 and total.item() == 1 + 2.0**-30


def test_from_the_shell_with_inductor(tmp_path):
    compiled = torch.compile(
        attention, backend="cascade", options={"decide": "always", "dump": str(tmp_path)}
    )
    compiled(*inputs())
    folder = tmp_path / "000"
    assert "def call(" in (folder / "inductor_code.py").read_text()
    assert "handed out no" not in (tmp_path / "index.md").read_text()
    run = subprocess.run(
        [sys.executable, str(folder / "repro.py")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "before, compiled: right" in run.stdout and "after, compiled: right" in run.stdout

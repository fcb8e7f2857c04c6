"""Passes of others: registered, or installed as an entry point."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.shared_prefix import attention, inputs
from torch._dynamo.exc import BackendCompilerFailed

import torch_cascade
from torch_cascade import Pass, register_pass
from torch_cascade.compiler import pass_registry
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassError
from torch_cascade.compiler.pipeline import Pipeline
from torch_cascade.compiler.record import Compilation


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """What a test registers is forgotten after it."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(pass_registry, "_registered", found)
    return found


@dataclass(frozen=True)
class Halve(Pass):
    """Halves every sine.

    More about it.
    """

    name: ClassVar[str] = "halve-sines"
    times: int = field(default=1, metadata={"meaning": "how often"})
    mode: Literal["mul", "div"] = "mul"

    def apply(self, graph, context):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            with graph.inserting_after(node):
                half = graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5**self.times))
            half.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(
                half, delete_user_cb=lambda user, half=half: user is not half
            )

    def uuid(self):
        return "halve 1"


def run(passes, **options):
    """sin(x) compiled with some passes, over sin(x)."""
    torch._dynamo.reset()
    x = torch.linspace(0.1, 1, 7)
    out = torch.compile(torch.sin, backend=eager_cascade(passes=passes, **options))(x)
    return (out / x.sin()).mean().item()


def test_a_registered_pass_runs_where_it_is_named_and_nowhere_else():
    register_pass(Halve)
    assert run("cascade,blend") == pytest.approx(1)
    assert run("cascade,halve-sines") == pytest.approx(0.5)
    assert run("halve_sines{times=2},cascade", verify=True) == pytest.approx(0.25)
    with pytest.raises(ValueError, match=r"unknown option 'time'.*did you mean times"):
        Options.resolve({"passes": "halve-sines{time=2}"})
    with pytest.raises(ValueError, match=r"expected one of mul, div, got 'add'"):
        Options.resolve({"passes": "halve-sines{mode=add}"})


@pytest.mark.parametrize("fault", ["order", "shapes"])
def test_verify_names_the_pass_whose_graph_cannot_be_computed(fault):
    @dataclass(frozen=True)
    class Breaks(Pass):
        """Leaves a graph that cannot be run."""

        name: ClassVar[str] = "breaks"

        def apply(self, graph, context):
            (sine,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
            if fault == "order":
                graph.output_node().append(sine)
            else:
                sine.target, sine.args = torch.ops.aten.mm.default, (sine.args[0], sine.args[0])

    register_pass(Breaks)
    with pytest.raises(BackendCompilerFailed, match="GraphError: after pass breaks: "):
        run("cascade,breaks", verify=True)


def test_its_time_its_name_and_what_it_changed_are_in_the_report():
    register_pass(Halve)
    run("cascade,halve-sines{times=3},blend")
    record = last_compilation()
    names = ["capture", "cascade", "halve-sines", "blend", "lower", "cleanup"]
    assert list(record.seconds) == names
    assert "mul" in record.after and "mul" not in record.before
    report = json.loads(torch_cascade.last_report().to_json())["graphs"][-1]
    assert report["options"]["passes"] == "cascade,halve-sines{times=3},blend"
    assert report["seconds"]["halve-sines"] >= 0


def test_places_are_kept():
    register_pass(Halve, after=["cascade"], before=["blend"])
    Options.resolve({"passes": "cascade,halve-sines,blend"})
    Options.resolve({"passes": "halve-sines"})
    with pytest.raises(ValueError, match="expected halve-sines after cascade: it was registered"):
        Options.resolve({"passes": "halve-sines,cascade"})
    with pytest.raises(ValueError, match="expected halve-sines before blend: it was registered"):
        Options.resolve({"passes": "blend,halve-sines"})


def test_a_pass_after_lower_sees_no_op_of_ours():
    seen = []

    @dataclass(frozen=True)
    class Look(Pass):
        """Looks."""

        name: ClassVar[str] = "look"
        after: ClassVar[tuple[str, ...]] = ("lower",)

        def apply(self, graph, context):
            seen.extend(str(n.target) for n in graph.nodes)

    register_pass(Look)
    torch._dynamo.reset()
    backend = eager_cascade(passes="cascade,look", decide="always")
    torch.compile(attention, backend=backend)(*inputs())
    assert list(last_compilation().seconds)[-3:] == ["lower", "look", "cleanup"]
    assert seen and not any("cascade." in target for target in seen)
    with pytest.raises(ValueError, match="after lower, which follows all others"):
        Options.resolve({"passes": "look,cascade"})


def uuid(passes):
    return Pipeline(Options.resolve({"passes": passes})[0], Compilation()).uuid()


def test_the_cache_key_has_its_uuid_and_its_options():
    @dataclass(frozen=True)
    class Silent(Halve):
        """Says nothing about its code."""

        name: ClassVar[str] = "silent"

        def uuid(self):
            return None

    register_pass(Halve)
    register_pass(Silent)
    keys = {uuid(p) for p in ("cascade", "cascade,halve-sines", "cascade,halve-sines{times=2}")}
    assert len(keys) == 3 and None not in keys
    assert uuid("cascade,silent") is None, "not cached: nobody knows its code"


def test_another_uuid_is_another_key(monkeypatch):
    register_pass(Halve)
    before = uuid("halve-sines")
    assert uuid("halve-sines") == before
    monkeypatch.setattr(Halve, "uuid", lambda self: "halve 2")
    assert uuid("halve-sines") != before


def test_an_exception_of_a_pass_of_others_names_it():
    @dataclass(frozen=True)
    class Broken(Pass):
        """Fails."""

        name: ClassVar[str] = "broken"

        def apply(self, graph, context):
            raise KeyError("mine")

    register_pass(Broken)
    with pytest.raises(BackendCompilerFailed) as caught:
        run("cascade,broken")
    assert isinstance(caught.value.inner_exception, PassError)
    assert "pass broken (" in str(caught.value) and "KeyError: 'mine'" in str(caught.value)


# --- what is refused ------------------------------------------------------------------------------


@dataclass
class Mutable:
    name: ClassVar[str] = "mutable"


def a_pass(**members):
    """A frozen pass with other members, annotations included."""
    hints = members.pop("hints", {})
    body = {"name": "odd", "__doc__": "Odd.", "apply": lambda self, graph, context: None}
    body |= {"__annotations__": {"name": ClassVar[str]} | hints} | members
    return dataclass(frozen=True)(type("Odd", (Pass,), body))


def test_what_is_no_frozen_pass_is_refused():
    with pytest.raises(ValueError, match=r"expected a class derived from torch_cascade.Pass, got"):
        register_pass(Mutable)
    with pytest.raises(ValueError, match="expected a class derived"):
        register_pass(Halve())
    with pytest.raises(ValueError, match="Plain: expected a frozen dataclass"):
        register_pass(type("Plain", (Halve,), {}))
    with pytest.raises(ValueError, match="expected a method `apply"):
        register_pass(dataclass(frozen=True)(type("Idle", (Pass,), {"name": "idle"})))


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ({"name": "cascade"}, "the name 'cascade' is taken by this package"),
        ({"name": "lower"}, "the name 'lower' is taken"),
        ({"name": "none"}, "the name 'none' is taken"),
        ({"name": "Two Words"}, "expected `name: ClassVar.* got 'Two Words'"),
        ({"name": None}, "expected `name: ClassVar.* got None"),
        ({"hints": {"size": int}}, "expected a default for the field 'size'"),
        ({"hints": {"size": list}, "size": ()}, "the field 'size' is no option: expected bool"),
        ({"after": ("cascad",)}, "unknown pass 'cascad' in before or after; did you mean cascade"),
        ({"after": ("blend",), "before": ("blend",)}, "before and after blend"),
        ({"after": ("lower",), "before": ("blend",)}, "after lower it cannot stand before blend"),
    ],
)
def test_a_pass_that_does_not_keep_to_the_contract_is_refused(members, what, registered):
    with pytest.raises(ValueError, match=f"register_pass: Odd: .*{what}"):
        register_pass(a_pass(**members))
    assert not registered


def test_a_name_is_taken_once():
    register_pass(Halve)
    register_pass(Halve)  # as a notebook does that runs a cell again
    with pytest.raises(ValueError, match=r"the name 'halve-sines' is taken by .*Halve"):
        register_pass(a_pass(name="halve-sines"))


def test_types_of_options():
    hints = {"a": bool, "b": float, "c": str}
    register_pass(a_pass(hints=hints, a=False, b=0.5, c="x"))
    (spec,) = Options.resolve({"passes": 'odd{a=yes,b=1e-3,c="p, {q}"}'})[0].passes
    assert spec.options == (("a", True), ("b", 0.001), ("c", "p, {q}"))
    assert str(spec) == 'odd{a=1,b=0.001,c="p, {q}"}'
    with pytest.raises(ValueError, match="expected a number, got 'many'"):
        Options.resolve({"passes": "odd{b=many}"})


# --- entry points ---------------------------------------------------------------------------------

SOURCE = '''
from dataclasses import dataclass, field
from typing import ClassVar
from torch_cascade import Pass

@dataclass(frozen=True)
class Count(Pass):
    """Counts nodes."""
    name: ClassVar[str] = "count-nodes"
    after: ClassVar[tuple] = ("cascade",)
    most: int = field(default=9, metadata={"meaning": "the most nodes"})
    def apply(self, graph, context):
        context.record.seconds["counted"] = len(graph.nodes)
        context.record.seconds["most"] = self.most

@dataclass(frozen=True)
class Mutable:
    """No pass."""
'''
numbers = itertools.count()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a distribution of entry points: a dist-info and a module on sys.path."""

    def install(entries, distribution="other-passes", source=SOURCE):
        module = f"other_passes_{next(numbers)}"
        folder = tmp_path / module
        info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        lines = [f"{name} = {module}:{attribute}" for name, attribute in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[torch_cascade.passes]", *lines]))
        monkeypatch.syspath_prepend(str(folder))
        return module, folder

    return install


def test_an_installed_pass_is_loaded_when_it_is_named(installed):
    module, _ = installed({"count-nodes": "Count"})
    Options.resolve({"passes": "cascade,blend"})
    assert module not in sys.modules
    torch._dynamo.reset()
    backend = eager_cascade(passes="cascade,count-nodes{most=7}", decide="always")
    torch.compile(attention, backend=backend)(*inputs())
    record = last_compilation()
    assert record.seconds["counted"] > 5 and record.seconds["most"] == 7
    assert record.rewritten == 1 and "count-nodes" in record.seconds
    with pytest.raises(ValueError, match=r"count-nodes after cascade: .* by other-passes"):
        Options.resolve({"passes": "count-nodes,cascade"})
    with pytest.raises(ValueError, match="did you mean count-nodes"):
        Options.resolve({"passes": "count-node"})


@pytest.mark.parametrize(
    ("entries", "name", "what"),
    [
        ({"x": "Missing"}, "x", r"pass 'x' of other-passes .*: cannot be loaded: AttributeError"),
        ({"x": "Mutable"}, "x", "expected a class derived from torch_cascade.Pass"),
        ({"x": "Count"}, "x", "expected a pass of that name, its `name` is 'count-nodes'"),
    ],
)
def test_an_entry_point_that_is_no_pass_is_refused(entries, name, what, installed):
    installed(entries)
    with pytest.raises(ValueError, match=what):
        Options.resolve({"passes": name})


def test_one_name_of_two_distributions_is_refused(installed):
    installed({"count-nodes": "Count"})
    installed({"count-nodes": "Count"}, "more-passes")
    with pytest.raises(ValueError, match=r"of .*more-passes.*: one name for several"):
        Options.resolve({"passes": "count-nodes"})


def test_the_command_lists_what_there_is(installed):
    _, good = installed({"count-nodes": "Count"})
    _, bad = installed({"bad": "Missing"}, "bad-passes")
    code = f"import sys; sys.path[:0] = {[str(good), str(bad)]!r}\n"
    code += "import runpy; sys.argv = ['torch_cascade', 'passes', *sys.argv[1:]]\n"
    code += "runpy.run_module('torch_cascade', run_name='__main__')"

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
        )

    text = command()
    assert text.returncode == 0, text.stderr
    said = " ".join(text.stdout.split())
    for part in (
        "cascade attention over a shared prefix",
        "count-nodes Counts nodes. (other-passes; after cascade)",
        "most=9 the most nodes",
        "ratio=0.15 share of the cached tokens",
        "bad cannot be used: pass 'bad' of bad-passes",
    ):
        assert part in said, said
    listed = {p["name"]: p for p in json.loads(command("--json").stdout)["passes"]}
    assert listed["count-nodes"]["options"][0]["default"] == "9"
    assert listed["cascade"]["options"][0]["name"] == "levels"
    assert "AttributeError" in listed["bad"]["error"]


def test_a_dump_has_passes_of_others_where_they_ran(tmp_path):
    @dataclass(frozen=True)
    class Late(Halve):
        name: ClassVar[str] = "late-halves"
        after: ClassVar[tuple[str, ...]] = ("lower",)

    register_pass(Halve)
    register_pass(Late)
    chosen = {"passes": "cascade,halve-sines,late-halves", "decide": "always"}
    backend = eager_cascade(dump=str(tmp_path), **chosen)
    torch.compile(lambda q, *kv: attention(q.sin(), *kv), backend=backend)(*inputs())
    folder = tmp_path / "000"
    halves = {p.name: p.read_text().count(" 0.5)") for p in folder.glob("*.txt")}
    assert halves == {"before.txt": 0, "after.txt": 1, "lowered.txt": 2}
    repro = (folder / "repro.py").read_text()
    assert "after='02.halve-sines.after.py'" in repro
    assert "lowered='04.late-halves.after.py'" in repro
    assert "mul" in (folder / "graph.svg").read_text()

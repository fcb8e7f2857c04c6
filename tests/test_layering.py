"""Who may import whom, and how light the way to the backend is."""

import ast
import subprocess
import sys

import networkx as nx
import pytest
from support.source import ROOT, Module, modules

PACKAGE = "torch_cascade"
LEAVES = {
    f"compiler.{name}"
    for name in (
        "options",
        "report",
        "record",
        "break_even",
        "calibration",
        "cost",
        "cost_terms",
        "decide",
        "decide_reuse",
        "device",
        "device_table",
        "inductor_options",
        "option_values",
        "pass_list",
        "pass_options",
        "pass_registry",
        "pass_text",
        "price",
        "units",
        "work",
        "graph",
        "printing",
        "size_nodes",
        "pass_base",
    )
}
# layer -> the layers it may import from
MAY_IMPORT = {
    "kernels": {"kernels"},
    "runtime": {"kernels", "runtime"},
    "leaf": {"leaf"},
    "passes": {"kernels", "runtime", "leaf", "passes"},
    "compiler": {"kernels", "runtime", "leaf", "passes", "compiler"},
    "root": {"kernels", "runtime", "leaf", "compiler"},
    "demo": {"kernels", "runtime", "leaf", "passes", "compiler", "root", "demo"},
    "main": {"demo", "compiler"},
}
# The cost model asks the launch heuristics, pure functions of numbers, what a kernel would do.
MAY_ALSO = {("compiler.cost", "kernels.launch_config")}
# Files of kernels/ stand alone, but for these: what each may import of the others.
KERNELS = {
    "kernels.ops": {"kernels.register"},
    "kernels.register": {
        "kernels.checks",
        "kernels.cpu_attend",
        "kernels.linears",
        "kernels.merge",
        "kernels.sdpa",
        "kernels.triton_launch",
    },
    "kernels.cpu_attend": {"kernels.dense", "kernels.known"},
    "kernels.dense": {"kernels.known"},
    "kernels.triton_call": {"kernels.known", "kernels.launch_config"},
    "kernels.triton_launch": {
        "kernels.known",
        "kernels.launch_config",
        "kernels.launchable",
        "kernels.triton_attend",
        "kernels.triton_call",
        "kernels.triton_merge",
    },
    "kernels.linears_config": {"kernels.launch_config"},
    "kernels.linears_launch": {
        "kernels.launchable",
        "kernels.linears",
        "kernels.linears_config",
        "kernels.triton_launch",
        "kernels.triton_linears",
    },
    "kernels.triton_attend": {
        "kernels.triton_finish",
        "kernels.triton_quick",
        "kernels.triton_step",
    },
    "kernels.triton_quick": {"kernels.triton_step"},
    "kernels.triton_finish": {"kernels.triton_step"},
}
MODULES = {m.name: m for m in modules()}
everywhere = pytest.mark.parametrize("module", MODULES.values(), ids=lambda m: m.name or PACKAGE)


def layer(name: str) -> str:
    if name in LEAVES:
        return "leaf"
    return {"": "root", "__main__": "main"}.get(name, name.split(".")[0])


def own_imports(module: Module, *, on_import_only: bool = False) -> set[str]:
    """Modules of this package that a module imports, as names below it."""
    names = module.imports(on_import_only=on_import_only)
    return {_module(name) for name in names if name.split(".")[0] == PACKAGE}


def _module(dotted: str) -> str:
    """The module that `torch_cascade.a.b.name` is in."""
    name = dotted.removeprefix(PACKAGE).removeprefix(".")
    return name if name in MODULES else name.rpartition(".")[0]


def test_the_modules_were_found():
    assert {"", "compiler.options", "passes.site", "compiler.graph"} <= set(MODULES)
    assert own_imports(MODULES["passes.prefix"]) >= {"passes.site", "compiler.report"}


@everywhere
def test_imports_point_downwards(module):
    allowed = MAY_IMPORT[layer(module.name)]
    names = {name for name in own_imports(module) if (module.name, name) not in MAY_ALSO}
    wrong = {name for name in names if layer(name) not in allowed}
    assert not wrong, f"{module.path.name} ({layer(module.name)}) may import {sorted(allowed)}"


@everywhere
def test_kernel_files_stand_alone(module):
    imports = own_imports(module)
    assert "kernels.reference" not in imports, "the oracle is for tests"
    if layer(module.name) == "kernels":
        others = {name for name in imports if name.startswith("kernels.")}
        assert others <= KERNELS.get(module.name, set())


def test_nothing_imports_in_a_circle():
    edges = [
        (module.name, name)
        for module in MODULES.values()
        for name in own_imports(module, on_import_only=True)
    ]
    assert list(nx.simple_cycles(nx.DiGraph(edges))) == []


@everywhere
def test_subpackages_hold_a_docstring_only(module):
    if module.path.name == "__init__.py" and module.name:
        assert ast.get_docstring(module.tree)
        assert len(module.tree.body) == 1


@everywhere
def test_one_module_reads_the_environment(module):
    if module.name == "compiler.options":
        return
    used = {ast.unparse(n) for n in ast.walk(module.tree) if isinstance(n, ast.Attribute)}
    assert not used & {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    assert not {"os.environ", "os.getenv"} & set(module.imports())


LIGHT = """
import sys
import torch
before = set(sys.modules)
import torch_cascade
print("import", *sorted(set(sys.modules) - before))
import torch._dynamo
for name in ("inductor", "eager"):
    torch._dynamo.lookup_backend(name)
before = set(sys.modules)
assert "cascade" in torch._dynamo.list_backends(), "run pip install again: no entry point"
assert callable(torch._dynamo.lookup_backend("cascade"))
print("lookup", *sorted(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def loaded():
    """Modules loaded by importing the package, and by looking its backend up after torch's own."""
    run = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=ROOT.parent, check=False
    )
    assert run.returncode == 0, run.stderr
    return {line.split()[0]: set(line.split()[1:]) for line in run.stdout.splitlines()}


HEAVY = {"triton", "transformers", "accelerate", "gguf", "safetensors", "rich", "matplotlib"}


@pytest.mark.parametrize("step", ["import", "lookup"])
def test_import_and_lookup_load_nothing_heavy(step, loaded):
    assert any(name.startswith(PACKAGE) for name in loaded["import"])
    assert not HEAVY & {name.split(".")[0] for name in loaded[step]}


def test_the_import_leaves_the_compiler_alone(loaded):
    heavy = ("torch._inductor", "torch._dynamo", "torch._functorch", "sympy", "networkx")
    assert not [name for name in loaded["import"] if name.startswith(heavy)]

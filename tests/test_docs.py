"""Docstrings, tables, sizes: what the text promises; `test_pages` has the pages themselves."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess

import pytest
from support.source import ROOT, Module, modules

import torch_cascade
from torch_cascade.compiler.options import settings
from torch_cascade.compiler.report import EXPLANATIONS, Reason

MODULES = modules()
everywhere = pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name or "torch_cascade")


def full_name(module: Module) -> str:
    return ".".join(filter(None, ["torch_cascade", module.name]))


# --- docstrings -----------------------------------------------------------------------------------


def test_pkgutil_finds_the_same_modules():
    found = {m.name for m in pkgutil.walk_packages(torch_cascade.__path__, "torch_cascade.")}
    assert {full_name(m) for m in MODULES} - {"torch_cascade"} <= found


@everywhere
def test_examples_in_docstrings_run(module):
    if module.name == "__main__":
        pytest.skip("importing it runs the command line")
    # Never by path: a second copy of kernels/ops.py would define the ops twice.
    imported = importlib.import_module(full_name(module))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(imported):
        runner.run(example, clear_globs=False)  # Dynamo still holds names in those it compiled
    assert runner.failures == 0


def public(tree: ast.Module) -> list[ast.AST]:
    """The module, its public functions and classes, and the public methods of those."""
    found: list[ast.AST] = [tree]
    for node in found:
        inner = node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []
        kinds = (ast.FunctionDef, ast.ClassDef)
        found += [n for n in inner if isinstance(n, kinds) and not n.name.startswith("_")]
    return found


@everywhere
def test_every_public_name_has_a_docstring(module):
    bare = [n for n in public(module.tree) if not ast.get_docstring(n) and not _inherits_it(n)]
    assert not [getattr(n, "name", "the module") for n in bare]


def _inherits_it(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(d) in ("override", "typing.override") for d in decorators)


def test_what_the_root_exports_is_documented_there():
    for name in torch_cascade.__all__:
        assert getattr(torch_cascade, name).__doc__
        assert name in README


# --- tables of the README and of docs/options.md -------------------------------------------------

README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def test_the_table_of_options():
    for s in settings():
        default = f"`{s.default}`" if s.default else "unset"
        assert row(f"`{s.variable}`", f"`{s.name}`", default, s.meaning) in OPTIONS


def test_the_table_of_reasons():
    assert list(EXPLANATIONS) == list(Reason)
    for reason, text in EXPLANATIONS.items():
        assert row(f"`{reason.value}`", text.meaning, text.remedy) in README


def test_every_reason_is_given_by_some_code():
    sources = (m.path.read_text(encoding="utf-8") for m in MODULES if m.name != "compiler.report")
    given = set(re.findall(r"\bReason\.([A-Z0-9_]+)", " ".join(sources)))
    assert {reason.name for reason in Reason} == given


# --- size and hygiene -----------------------------------------------------------------------------

# Lines a file, and lines of code a function: kernels are long by nature.
LIMITS = {"kernels": (400, 80)}
LIMIT = (300, 40)


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its decorators and its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@everywhere
def test_files_and_functions_stay_small(module):
    file_limit, function_limit = LIMITS.get(module.name.split(".")[0], LIMIT)
    assert module.lines <= file_limit
    functions = (n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef))
    assert {f.name: code_lines(f) for f in functions if code_lines(f) > function_limit} == {}


def tracked_text() -> dict[str, str]:
    """Name and text of every file that git tracks."""
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if run.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in run.stdout.decode().split("\0") if name]
    return {
        str(f.relative_to(ROOT)): f.read_text(encoding="utf-8", errors="replace")
        for f in files
        if f.is_file()
    }


MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|farm|Users|mnt|opt|tmp)/[\w.]")
ADDRESS = re.compile(r"https?://([\w.-]+)")
KNOWN_HOSTS = {
    "arxiv.org",
    "docs.flashinfer.ai",
    "docs.pytorch.org",
    "github.com",
    "huggingface.co",
    "lightning.ai",
    "matplotlib.org",
    "www.apache.org",
    "www.w3.org",
}


def test_no_file_names_a_machine():
    texts = tracked_text()
    assert {"README.md", "compiler/options.py"} <= set(texts)
    assert {
        name: MACHINE_PATH.findall(t) for name, t in texts.items() if MACHINE_PATH.search(t)
    } == {}
    hosts = {host for text in texts.values() for host in ADDRESS.findall(text)}
    assert hosts <= KNOWN_HOSTS

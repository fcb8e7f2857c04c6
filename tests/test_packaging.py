"""pyproject.toml says what is true of the tree and of the installation."""

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from support.source import ROOT, packages

DISTRIBUTION = "torch-cascade"


def pyproject() -> str:
    file = ROOT / "pyproject.toml"
    if not file.exists():
        pytest.skip("installed without its source tree")
    return file.read_text(encoding="utf-8")


def test_every_folder_with_an_init_is_a_listed_package():
    listed = re.search(r"^packages = \[(.*?)^\]", pyproject(), re.DOTALL | re.MULTILINE)
    assert listed
    found = [".".join(["torch_cascade", *p.relative_to(ROOT).parts]) for p in packages()]
    assert re.findall(r'"([\w.]+)"', listed[1]) == found


def test_the_type_marker_is_there():
    assert (ROOT / "py.typed").exists()


def test_the_entry_point_resolves():
    (entry,) = (
        e
        for e in metadata.distribution(DISTRIBUTION).entry_points
        if e.group == "torch_dynamo_backends"
    )
    assert (entry.name, entry.value) == (
        "cascade",
        "torch_cascade.compiler.backend:cascade_backend",
    )
    assert callable(entry.load())


def test_extras_by_name():
    assert set(metadata.metadata(DISTRIBUTION).get_all("Provides-Extra")) == {"hf", "demo", "dev"}


def requirement(name: str) -> Requirement:
    (found,) = (
        r
        for r in map(Requirement, metadata.requires(DISTRIBUTION))
        if r.name == name and r.marker is None
    )
    return found


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0", "2.13.0+cpu", "2.15.1"])
def test_supported_torch_versions(version):
    assert requirement("torch").specifier.contains(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0"])
def test_unsupported_torch_versions(version):
    assert not requirement("torch").specifier.contains(version)


def test_the_base_installation_is_small():
    base = {r.name for r in map(Requirement, metadata.requires(DISTRIBUTION)) if r.marker is None}
    assert base == {"torch", "sympy", "networkx"}


@pytest.mark.parametrize("extra", ["dev", "demo", "hf"])
def test_the_demo_contains_the_extra_hf(extra):
    wanted = [r for r in map(Requirement, metadata.requires(DISTRIBUTION)) if r.marker]
    names = {r.name for r in wanted if r.marker.evaluate({"extra": extra})}
    if extra == "dev":
        assert {"pytest", "ruff", "mypy", "hypothesis", "expecttest"} <= names
        line = r'^  "triton>=3\.6; sys_platform == \'linux\'",$'
        assert re.search(line, pyproject(), re.MULTILINE)
    else:
        assert {"transformers", "safetensors"} <= names

"""README and docs: what they run prints what they say, and what they name is there."""

from __future__ import annotations

import importlib.util
import re

import pytest
from support import machines
from support.pages import Page, pages
from support.source import ROOT

from torch_cascade import __main__ as command_line
from torch_cascade.compiler import calibration

PAGES = pages()
RUN = [page for page in PAGES if page.name != "docs/gallery.md" and page.blocks("python")]
everywhere = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_the_pages_were_found():
    assert {"README.md", "docs/concepts.md", "docs/gallery.md"} <= {page.name for page in PAGES}
    assert len(RUN) >= 5


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_its_python_runs(page, monkeypatch, tmp_path):
    """What a report says of times is of the generic CPU with one thread."""
    monkeypatch.setattr(calibration, "_table", lambda device, threads: machines.CPU)
    monkeypatch.chdir(tmp_path)
    page.run()


@everywhere
def test_its_links_lead_somewhere(page):
    for link in page.links():
        name, _, anchor = link.partition("#")
        target = page.path.parent / name if name else page.path
        assert target.exists(), link
        assert not anchor or anchor in Page(target).anchors(), link


@everywhere
def test_the_files_it_names_exist(page):
    """By their path from the root; in docs and benchmarks also from there."""
    places = (ROOT, page.path.parent)
    missing = {f for f in page.files() if not any((place / f).exists() for place in places)}
    assert missing <= NOT_IN_THE_REPOSITORY


# Made by a reader, or inside of torch.
NOT_IN_THE_REPOSITORY: set[str] = set()


@everywhere
def test_its_commands_exist(page, capsys):
    shown = "\n".join(block.text for block in page.blocks("sh"))
    for line in re.findall(r"python -m torch_cascade (.*?)(?:#|$)", shown, re.MULTILINE):
        command, *arguments = line.split()
        with pytest.raises(SystemExit):
            command_line.main([command, "--help"])
        known = capsys.readouterr().out
        assert {a for a in arguments if a.startswith("--")} <= set(re.findall(r"--[\w-]+", known))
    for module in re.findall(r"python -m (torch_cascade\.[\w.]+)", shown):
        assert importlib.util.find_spec(module), module
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", shown, re.MULTILINE)) <= set(targets)

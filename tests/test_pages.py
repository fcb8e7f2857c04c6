"""README and docs: what they run prints what they say, and what they name is there."""

from __future__ import annotations

import contextlib
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


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_every_output_is_compared(page):
    """A block of text stands right behind the Python that prints it, or nobody would notice."""
    compared = [block.printed for block in page.blocks("python") if block.printed is not None]
    assert compared == [block.text for block in page.blocks("text")]


@everywhere
def test_its_links_lead_somewhere(page):
    assert list(page.broken_links()) == []


@everywhere
def test_the_files_it_names_exist(page):
    """By their path from the root; in docs and benchmarks also from there."""
    places = (ROOT, page.path.parent)
    missing = {f for f in page.files() if not any((place / f).exists() for place in places)}
    assert missing == set()


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


# --- what the tests above would notice ------------------------------------------------------------


def page_of(folder, text):
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return Page(path)


@pytest.mark.parametrize(("printed", "right"), [("5", True), ("...", True), ("6", False)])
def test_another_output_is_noticed(tmp_path, printed, right):
    page = page_of(tmp_path, f"```python\nprint(2 + 3)\n```\n\n```text\n{printed}\n```\n")
    with contextlib.nullcontext() if right else pytest.raises(AssertionError, match="printed:\n5"):
        page.run()


def test_broken_links_are_noticed(tmp_path):
    text = "# One, two\n[a](#one-two) [b](page.md#one-two) ![c](c.svg) [d](#three) [e](https://arxiv.org/x)"
    assert list(page_of(tmp_path, text).broken_links()) == ["c.svg", "#three"]

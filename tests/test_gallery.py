"""The gallery is what `python docs/gallery` makes now."""

from __future__ import annotations

import runpy

import pytest
from support.source import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def made():
    """(versions, files) of the gallery made anew."""
    gallery = runpy.run_path(str(DOCS / "gallery" / "__main__.py"))
    return gallery["versions"](), gallery["files"](gallery["exhibits"]())


def test_every_program_is_shown(made):
    programs = {path.stem for path in (DOCS / "gallery").glob("*.py")} - {"__main__"}
    assert {f"gallery/{name}.svg" for name in programs} <= set(made[1])


def test_it_shows_what_it_promises(made):
    _, files = made
    for name in ("beams", "llama", "padded", "levels"):
        assert " 0 of " not in files[f"gallery/{name}.txt"].splitlines()[0]
    assert "0 of 3 attention sites" in files["gallery/declined.txt"]
    assert "3 of 4 layers reuse" in " ".join(files["gallery/blend.txt"].split())


def test_it_names_no_machine(made):
    for name, text in made[1].items():
        assert "site-packages" not in text, name
        assert "the passes took" not in text, name


def test_it_is_up_to_date(made):
    """If this fails: `python docs/gallery`, then read what has changed."""
    versions, files = made
    if versions not in (DOCS / "gallery.md").read_text(encoding="utf-8"):
        pytest.skip(f"the gallery was made with other versions than {versions}")
    for name, text in files.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, name

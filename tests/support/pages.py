"""The pages of the documentation: their code, run as a reader would, their links and commands."""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .source import ROOT

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FILE = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|json|yml))`")
_PROGRAM = "example.py"  # what reports call the program that a page's blocks make up


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: "python", "text", "sh" or "".
        text: what stands in it.
        printed: what the page says that it prints, the block of text right behind it; else None.
    """

    language: str
    text: str
    printed: str | None = None


@dataclass(frozen=True)
class Page:
    """One Markdown file of the repository."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def blocks(self, language: str) -> list[Block]:
        found = list(_FENCE.finditer(self.text))
        pairs = itertools.zip_longest(found, found[1:])
        return [Block(*m.groups(), _output(self.text, m, n)) for m, n in pairs if m[1] == language]

    @property
    def prose(self) -> str:
        """The page without its fenced blocks."""
        return _FENCE.sub("", self.text)

    def broken_links(self) -> Iterator[str]:
        """Targets of its links that are no files of the repository, or no places in them."""
        for link in _LINK.findall(self.prose):
            name, _, anchor = link.partition("#")
            target = self.path.parent / name if name else self.path
            if re.match(r"https?:", link):
                continue
            if not target.exists() or (anchor and anchor not in Page(target).anchors()):
                yield link

    def files(self) -> set[str]:
        """Files of the repository that it names: `passes/views.py`."""
        return set(_FILE.findall(self.prose))

    def anchors(self) -> set[str]:
        """What a link may name behind #, as GitHub makes it from the headings."""
        return {_anchor(heading) for heading in _HEADING.findall(self.prose)}

    def run(self) -> None:
        """Run its Python, block after block in one namespace; compare what they print."""
        names: dict[str, Any] = {"__name__": "example"}
        program = ""
        for block in self.blocks("python"):
            lines = program.count("\n")
            program += block.text
            whole = program.splitlines(keepends=True)
            linecache.cache[_PROGRAM] = (len(program), None, whole, _PROGRAM)
            code = compile("\n" * lines + block.text, _PROGRAM, "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, names)
            if block.printed is not None:
                _compare(block.printed, printed.getvalue())


def pages() -> list[Page]:
    """Every page that a reader may open, the README first."""
    folders = ("*.md", "docs/*.md", "benchmarks/*.md")
    return [Page(path) for folder in folders for path in sorted(ROOT.glob(folder))]


def _output(text: str, block: re.Match[str], following: re.Match[str] | None) -> str | None:
    if block[1] != "python" or following is None or following[1] != "text":
        return None
    between = text[block.end() : following.start()]
    return None if between.strip() else following[2]


def _compare(expected: str, printed: str) -> None:
    """`...` in what is expected stands for anything, as in doctests."""
    same = doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)
    assert same, f"expected:\n{expected}\nprinted:\n{printed}"


def _anchor(heading: str) -> str:
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return plain.replace(" ", "-")

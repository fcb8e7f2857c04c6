"""Makes the gallery again: `python docs/gallery`, from a checkout that is installed.

Each program beside this file is run as it is. What it reports becomes NAME.txt, the picture of the
graph after the passes NAME.svg, and all of them together docs/gallery.md. Times, folders and the
machine's own speed are left out, so that the files change only where programs or package do.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import torch_cascade
from torch_cascade.compiler import calibration
from torch_cascade.compiler.device_table import cpu_device
from torch_cascade.compiler.picture import svg
from torch_cascade.compiler.summary import Report

HERE = Path(__file__).parent
PROGRAMS = ("beams", "llama", "padded", "levels", "declined", "blend")
TIMES = re.compile(r";\s+the\s+passes\s+took\s+[\d.]+\s+s\s+of\s+[\d.]+\s+s")
PACKAGE = re.escape(str(Path(torch_cascade.__file__).parent))  # a checkout has any name
INSTALLED = re.compile(rf"(?:.*/site-packages|{PACKAGE})/(.*\.py):\d+:")

INTRODUCTION = """\
# Gallery

Programs, what `explain` says of them, and its picture of the graph after the passes, in which
layers that are alike stand once. Made by `python docs/gallery` with {versions};
`tests/test_gallery.py` makes it again and compares. Times are those of a CPU of which nothing is
known, with one thread, so decisions are the same on every machine.

[concepts.md](concepts.md) explains the terms, [inspecting.md](inspecting.md) how to get such a
report of your own program.
"""


@dataclass(frozen=True)
class Exhibit:
    """One program of the gallery and what it left.

    Attributes:
        name: of its file.
        source: the program.
        text: its reports, as printed.
        picture: SVG text.
    """

    name: str
    source: str
    text: str
    picture: str

    @property
    def title(self) -> str:
        """The first line of the program."""
        return (ast.get_docstring(ast.parse(self.source)) or self.name).splitlines()[0]

    def section(self) -> str:
        """Its part of the page."""
        return (
            f"## {self.title.rstrip('.')}\n\n"
            f"[{self.name}.py](gallery/{self.name}.py):\n\n```python\n{_body(self.source)}```\n\n"
            f"![{self.title}](gallery/{self.name}.svg)\n\n```text\n{self.text}```\n"
        )


def versions() -> str:
    """What the gallery depends on, without the patch level."""
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    return ", ".join(f"{name} {'.'.join(v.split('.')[:2])}" for name, v in found.items())


def exhibits() -> list[Exhibit]:
    """Run every program, in the order of the page."""
    return [_exhibit(name) for name in PROGRAMS]


def files(shown: list[Exhibit]) -> dict[str, str]:
    """Text of every file of the gallery, by its path below docs."""
    made = {f"gallery/{each.name}.txt": each.text for each in shown}
    made |= {f"gallery/{each.name}.svg": each.picture for each in shown}
    parts = [INTRODUCTION.format(versions=versions()), *(each.section() for each in shown)]
    return made | {"gallery.md": "\n".join(parts)}


def _exhibit(name: str) -> Exhibit:
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    torch._dynamo.reset()
    torch.manual_seed(0)
    with _same_machine(), contextlib.redirect_stdout(io.StringIO()):
        report = _run(f"{name}.py", source)["report"]
    assert isinstance(report, Report), f"{name}.py: expected a Report called report, got {report!r}"
    (record,) = report.compilations
    pictures = record.pictures
    assert pictures is not None and pictures.after is not None, f"{name}.py: nothing was drawn"
    return Exhibit(name, source, _text(report), svg(pictures.after, "the graph after the passes"))


def _run(file: str, source: str) -> dict[str, Any]:
    """Run a program under a name without folders, which is what its report then says."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec", dont_inherit=True), names)
    return names


@contextlib.contextmanager
def _same_machine() -> Iterator[None]:
    """Decide as on a CPU of which nothing is known, whatever this one is or was calibrated to."""
    generic = mock.patch.object(calibration, "_table", lambda *_: cpu_device("", threads=1))
    nowhere = mock.patch.object(calibration, "default_path", lambda _: HERE / "no-calibration")
    with generic, nowhere:
        yield


def _text(report: Report) -> str:
    """The report as printed, without times and the folders of installed packages."""
    for record in report.compilations:
        record.sites = [replace(site, where=_short(site.where)) for site in record.sites]
        if record.blend is not None:
            record.blend = replace(record.blend, where=_short(record.blend.where))
    return TIMES.sub("", str(report)) + "\n"


def _short(where: str) -> str:
    """A place in an installed package without its folder and its line, which change."""
    return INSTALLED.sub(r"\1:", where)


def _body(source: str) -> str:
    """A program without its docstring, which the page has as a heading."""
    first = ast.parse(source).body[0]
    return "".join(source.splitlines(keepends=True)[first.end_lineno :]).lstrip("\n")


def main() -> int:
    """Write the files; say which have changed."""
    for name, text in files(exhibits()).items():
        path = HERE.parent / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(text, encoding="utf-8")
        print(f"{'same   ' if old == text else 'changed'} {path.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The option `dump`: every compiled graph in a folder of its own, and one report of them all.

    index.md             what every file is, and a line a graph (`compiler.dump_index`)
    report.json          all graphs of the folder; `compiler.summary` describes it. Its graphs have
                         "folder" and "notes" instead of "before" and "after"
    report.html          the same for people, in one file that loads nothing (`compiler.page`)
    000/before.txt       the functional graph before the passes that rewrite it
    000/after.txt        after them
    000/lowered.txt      after all passes: what Inductor generates code from
    000/NN.PASS.before.py, NN.PASS.after.py, constants.pt, repro.py
                         what can be run: see `compiler.dump_modules`
    000/inductor_code.py what Inductor generated
    000/graph.svg        picture of the graph after the passes (if it has attention)
    000/graph.json       its entry in report.json
    000/section.html     its part of report.html

Numbers go on from what is there. Texts are written as the passes run, so that they are there even
if code generation fails; a graph whose passes do not run has its entry and its part only.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from torch_cascade.compiler.dump_index import INDEX, index
from torch_cascade.compiler.dump_modules import Modules
from torch_cascade.compiler.graph import show
from torch_cascade.compiler.journal import Place
from torch_cascade.compiler.markup import Markup
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.page import page, section
from torch_cascade.compiler.picture import Pictures, svg
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.runnable import describe_all
from torch_cascade.compiler.summary import graph_object, report_object


@dataclass(frozen=True)
class Dump:
    """Where one compilation is written.

    Attributes:
        root: the folder of the option.
        folder: the folder in it that is this compilation's alone.
        place: the compilation.
        modules: writes what can be run.
    """

    root: Path
    folder: Path
    place: Place
    modules: Modules

    _last: ClassVar[Dump | None] = None

    @classmethod
    def claim(cls, root: Path, inputs: Sequence[Any] = (), options: Options | None = None) -> Dump:
        """Take the next number, or that of the attempt which this one repeats.

        Args:
            root: the folder of the option.
            inputs: those of the graph; of their numbers only what random ones need is kept.
            options: those of the compilation.

        Raises:
            ValueError: the folder cannot be made or written to.
        """
        place, last = Place.current(), cls._last
        if last is not None and last.root == root and place.repeats(last.place):
            folder = last.folder
            with _explained(root):
                _empty(folder)
        else:
            with _explained(root):
                folder = _next_folder(root)
        modules = Modules(
            write=lambda name, content: _write(root, folder / name, content),
            graph=f"Graph {place.compile_id or folder.name}",
            known=describe_all(inputs),
            options={} if options is None else {"batch_invariant": options.batch_invariant},
        )
        cls._last = cls(root, folder, place, modules)
        return cls._last

    def see(self, stage: str, graph: fx.Graph, state: str = "") -> None:
        """Write what there is to see of a graph.

        Args:
            stage: "before" the passes, or the name of the one that has run.
            graph: as it is there.
            state: the text that it is, "before", "after" or "lowered"; "" for none of them. The
                last graph of a state stays.
        """
        if state:
            path = self.folder / f"{state}.txt"
            _write(self.root, path, show(graph, renamed=False) + "\n")
        self.modules.see(stage, graph)

    def draw(self, pictures: Pictures | None) -> None:
        """Write the picture of the graph after the passes, if there is one."""
        if pictures is not None and pictures.after is not None:
            drawn = svg(pictures.after, "the graph after the passes")
            _write(self.root, self.folder / "graph.svg", drawn)

    def finish(self, record: Compilation, codes: Sequence[str] = ()) -> None:
        """Write the entry of the compilation and its part, and the reports of all.

        Args:
            record: the compilation.
            codes: what Inductor generated.
        """
        notes = [*self.modules.notes]
        if codes:
            _write(self.root, self.folder / "inductor_code.py", "\n\n".join(codes))
        else:
            notes.append("Inductor handed out no generated code")
        entry = graph_object(record, with_text=False)
        entry |= {"folder": self.folder.name, "notes": notes}
        _write(self.root, self.folder / "graph.json", _text(entry))
        part = section(graph_object(record), self.folder.name, record.pictures)
        _write(self.root, self.folder / "section.html", part)
        self._report()

    def _report(self) -> None:
        """Write the reports of all graphs in the folder, those of other processes included.

        Again where another process has finished a graph meanwhile: it may have written its reports
        before these, without which the graph would be missing.
        """
        written: list[Path] | None = None
        while (found := self._finished()) != written:
            self._write_reports(found)
            written = found

    def _finished(self) -> list[Path]:
        return sorted(self.root.glob("*/graph.json"), key=lambda p: _number(p.parent))

    def _write_reports(self, found: Sequence[Path]) -> None:
        with _explained(self.root):
            graphs = [json.loads(path.read_text(encoding="utf-8")) for path in found]
        report = report_object(graphs)
        _write(self.root, self.root / "report.json", _text(report))
        parts = [(g["folder"], _part(self.root, g)) for g in graphs]
        _write(self.root, self.root / "report.html", page(report, parts))
        _write(self.root, self.root / INDEX, index(self.root, graphs))


def _part(root: Path, graph: dict[str, Any]) -> Markup:
    """What a compilation wrote of itself; made anew where an older version wrote none."""
    name = graph["folder"]
    return Markup(_read(root, root / name / "section.html")) or section(graph, name)


def _read(root: Path, path: Path) -> str:
    """The text of a file, "" if there is none."""
    with _explained(root):
        return path.read_text(encoding="utf-8") if path.exists() else ""


def _next_folder(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max(map(_number, root.iterdir()), default=-1)
    while True:
        folder = root / f"{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:  # another process took it
            number += 1
        else:
            return folder


def _number(path: Path) -> int:
    return int(path.name) if path.name.isdecimal() else -1


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _empty(folder: Path) -> None:
    """Remove what an attempt in vain has left."""
    for path in folder.iterdir():
        path.unlink()


def _write(root: Path, path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: others may be reading it."""
    with _explained(root):
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"option 'dump' (variable TORCH_CASCADE_DUMP): cannot write to {root}"
        raise ValueError(f"{what}: {error.strerror or error}") from error

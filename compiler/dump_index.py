"""`index.md` of a dump: what every file is, and a line a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INDEX = "index.md"

_FILES = """\
| file | what it is |
|---|---|
| `report.html` | the report of all graphs for people: open it in a browser |
| `report.json` | the same for tools; `torch_cascade.compiler.summary` describes it |
| `NNN/` | one compiled graph, in the order of compilation |
| `NNN/before.txt` | the functional graph before the passes that rewrite it |
| `NNN/after.txt` | after them |
| `NNN/lowered.txt` | after all passes: what Inductor generates code from |
| `NNN/MM.PASS.before.py`, `.after.py` | the graph around each pass, as Python to run or import |
| `NNN/constants.pt` | tensors that the graph itself holds |
| `NNN/repro.py` | runs the graph alone, before and after; status 1 if a result is wrong |
| `NNN/inductor_code.py` | the code that Inductor generated |
| `NNN/graph.svg` | a picture of the graph after the passes |
| `NNN/graph.json`, `NNN/section.html` | its parts of the reports |

Inputs are random: a dump holds no weights and no tokens, only sizes, of floats the mean and the
spread, and of integers the range and the order. Tensors with one or two different values, and
tensors that the graph itself holds, are kept as they are.
"""


def index(root: Path, graphs: list[dict[str, Any]]) -> str:
    """The text.

    Args:
        root: folder of the dump.
        graphs: the entries of `report.json`.
    """
    lines = ["# Graphs compiled by torch_cascade", "", _FILES]
    lines += ["| graph | id | attention sites | files | notes |", "|---|---|---|---|---|"]
    lines += [_row(root, graph) for graph in graphs]
    told = {graph["folder"] for graph in graphs}
    folders = (path for path in root.iterdir() if path.is_dir() and path.name.isdecimal())
    lines += [
        f"| `{path.name}` | | | {_files(path)} | did not finish, or not yet |"
        for path in sorted(folders)
        if path.name not in told
    ]
    return "\n".join(lines) + "\n"


def _row(root: Path, graph: dict[str, Any]) -> str:
    name = graph["folder"]
    notes = "; ".join([*_state(graph), *graph.get("notes", [])]).replace("|", "\\|")
    cells = (f"`{name}`", graph["id"], _sites(graph), _files(root / name), notes)
    return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"


def _sites(graph: dict[str, Any]) -> str:
    sites = graph["sites"]
    said = f"{sum(site['rewritten'] for site in sites)} of {len(sites)} rewritten"
    blend = graph["blend"]
    if blend is None:
        return said
    return f"{said}, {blend['reused']} of {len(blend['layers'])} layers reuse"


def _state(graph: dict[str, Any]) -> list[str]:
    return ["compiled for training, the passes did not run"] if graph["training"] else []


def _files(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return ", ".join(f"[{name}]({folder.name}/{name})" for name in names)

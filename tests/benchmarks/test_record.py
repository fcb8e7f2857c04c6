"""What a run leaves behind: the JSON file, the table, the picture."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from torch_cascade.benchmarks import plots, record, tables
from torch_cascade.benchmarks.record import Line, Record, Result
from torch_cascade.benchmarks.rows import Ceilings, Floor
from torch_cascade.benchmarks.spread import Spread

WORK = Floor(1e6, 2e6, 1e-5, "bytes")


def timed(median: float, **details) -> Result:
    return Result(record.OK, time=Spread.of([median]), details=details)


@pytest.fixture
def made() -> Record:
    made = Record("attention", "us", "B,T", {"flush": "read"}, Ceilings(4e12, 8e14), "a device")
    results = {
        "ours": timed(14.0),
        "slow": timed(250.0, captured=False, capture_refusal="it waits"),
        "bad": Result(record.WRONG, "error 1"),
        "gone": Result(record.MISSING, "not installed"),
        "big": Result(record.OUT_OF_MEMORY, "OutOfMemoryError: 3 GiB"),
    }
    made.lines.append(Line("4,4", 10.0, 16.5, WORK, results))
    made.lines.append(Line("8,4", 10.0, 16.5, WORK, {"ours": timed(17.0), "bad": results["bad"]}))
    return made


def test_the_file(made, tmp_path):
    path = tmp_path / "deep" / "run.json"
    made.write(path)
    content = json.loads(path.read_text())
    assert list(path.parent.iterdir()) == [path]
    assert set(content) == {
        "schema",
        "benchmark",
        "unit",
        "columns",
        "settings",
        "ceilings",
        "lines",
        "device",
        "date",
        "versions",
        "command",
    }
    assert content["versions"]["torch"] == torch.__version__
    assert content["ceilings"] == {"read": 4e12, "matmul": 8e14, "empty_us": 0.0}
    first = content["lines"][0]
    assert set(first) == {"label", "floor", "goal", "work", "results", "details"}
    assert first["results"]["ours"]["time"] == {
        "median": 14.0,
        "low": 14.0,
        "high": 14.0,
        "least": 14.0,
        "count": 1,
    }
    assert first["results"]["bad"] == {
        "status": "wrong",
        "reason": "error 1",
        "time": None,
        "details": {},
    }
    assert {r["status"] for r in first["results"].values()} <= set(record.STATUSES)


def test_the_table(made):
    text = io.StringIO()
    console = Console(file=text, width=150)
    console.print(tables.table(made, ["ours", "slow", "bad", "gone", "big"], ["ours"]))
    lines = text.getvalue().splitlines()
    (row,) = (line for line in lines if line.strip().startswith("4,4"))
    cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
    assert cells == [
        "4,4",
        "10.0",
        "16.5",
        "14.0 (1.40)",
        "250* (25.0)",
        "wrong",
        "-",
        "no memory",
    ]


def test_the_scores(made):
    assert tables.scores(made, ["ours", "gone"], ["slow", "bad"], "others") == [
        "ours: goal reached at 1 of 2; faster than all others at 1 of 1 "
        "(least 17.9 x at 4,4, most 17.9 x at 4,4)"
    ]
    assert tables.scores(made, ["ours"], ["bad"], "others") == ["ours: goal reached at 1 of 2"]


def test_the_title(made):
    assert tables.title(made) == (
        "attention on a device: us (times the floor); read 4.00 TB/s, matmul 800 TFLOP/s"
    )


def test_ours_is_green_where_the_goal_is_reached(made):
    cells = [tables.cell(line, line.results["ours"], ours=True) for line in made.lines]
    assert cells == ["[green]14.0 (1.40)[/]", "[yellow]17.0 (1.70)[/]"]


def test_complaints_name_the_sizes(made):
    assert tables.complaints(made) == [
        "slow: no graph (*) at 4,4: it waits",
        "bad: wrong at 4,4 8,4: error 1",
        "gone: missing at 4,4: not installed",
        "big: out of memory at 4,4: OutOfMemoryError: 3 GiB",
    ]


def test_the_picture(made, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "run.png"
    plots.write(made, ["ours", "slow", "bad"], path)
    assert image.imread(path).std() > 0.01
    made.lines.clear()
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.write(made, ["ours"], path)


def test_the_picture_shows_what_was_timed(made):
    pytest.importorskip("matplotlib")
    figure = plots.draw(made, ["ours", "slow", "bad"])
    drawn = {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].get_lines()}
    assert drawn["ours"] == [1.4, 1.7] and drawn["slow"] == [25.0] and "bad" not in drawn
    assert drawn["goal"] == [1.65, 1.65]


def test_out_of_memory_is_seen_through_wrappers():
    def wrapped():
        try:
            raise torch.OutOfMemoryError("3 GiB")
        except torch.OutOfMemoryError as error:
            raise ValueError("backend failed") from error

    with pytest.raises(ValueError) as caught:
        wrapped()
    assert record.is_out_of_memory(caught.value)
    assert record.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not record.is_out_of_memory(RuntimeError("illegal address"))


def test_the_fastest_of_some():
    results = {"a": timed(3.0), "b": timed(2.0), "c": timed(1.0), "d": Result(record.WRONG)}
    assert record.fastest(results, ["a", "b", "d"]) == "b"
    assert record.fastest(results, ["d", "e"]) is None


def test_where_results_go():
    path = record.default_path("attention", torch.device("cpu"))
    assert path.parent == record.RESULTS and path.name.startswith("attention-cpu-2")


def test_a_command_names_no_folder_of_the_machine():
    ran = ["/somewhere/benchmarks/ttft.py", "--json", "/elsewhere/a b.json", "--model", "a/b"]
    assert record.command(ran) == "ttft.py --json 'a b.json' --model a/b"

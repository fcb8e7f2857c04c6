"""The regret benchmark without its device: grid, strategies, rules, table, map, files."""

from __future__ import annotations

import io
import json
from dataclasses import asdict

import pytest
import torch
from rich.console import Console
from support.interpreter import interpreted
from support.machines import CPU as GENERIC

from torch_cascade.benchmarks import (
    grid,
    record,
    regret,
    regret_fit,
    regret_measure,
    regret_report,
    rules,
    strategies,
)
from torch_cascade.benchmarks.grid import Shape
from torch_cascade.benchmarks.record import Line, Record, Result
from torch_cascade.benchmarks.rows import Ceilings, Floor, Heads
from torch_cascade.benchmarks.spread import Spread
from torch_cascade.compiler.device_table import GPUS

CPU = torch.device("cpu")
SMALL = Heads(4, 2, 32, 4)
# Requests, branches, root, prefix, queries, suffix: every combination of levels.
SHAPES = [
    Shape(2, 3, 16, 20, 4, 7, SMALL),
    Shape(2, 3, 0, 21, 1, 5, SMALL),
    Shape(1, 4, 0, 20, 2, 0, SMALL),
    Shape(3, 2, 0, 19, 1, 0, SMALL),
    Shape(2, 1, 0, 20, 1, 6, SMALL),
]


# --- the grid -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_grid(kind):
    shapes = grid.grid(kind)
    assert len(shapes) == len(set(shapes)) >= 200 and shapes == grid.grid(kind)
    assert all(grid.fits(shape, kind) for shape in shapes)
    for name, least, most in (("branches", 1, 64), ("prefix", 16, 4096), ("requests", 1, 64)):
        values = {getattr(shape, name) for shape in shapes}
        assert min(values) == least and max(values) >= most, name
    assert {shape.heads for shape in shapes} == set(grid.HEADS[kind])
    assert sum(shape.root > 0 for shape in shapes) >= 25
    assert any(strategies.is_view(shape) for shape in shapes)


def test_each_beginning_of_the_grid_is_a_mixture():
    for start in range(0, 200, 50):
        some = grid.grid("cuda")[start : start + 50]
        assert len({shape.heads for shape in some}) >= 4
        assert len({shape.branches for shape in some}) >= 5


# --- strategies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_strategy_on_a_gpu_is_right(shape, monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    from torch_cascade.benchmarks.expand_kernel import expand_join

    if isinstance(expand_join, triton.JITFunction):
        monkeypatch.setattr(strategies, "_kernel", lambda: InterpretedFunction(expand_join.fn))
    inputs = strategies.draw(shape, CPU, torch.float32)
    with interpreted():
        calls = strategies.gpu_calls(inputs)
        for name, call in calls.items():
            result = regret_measure.checked(inputs, name, call, _eager(inputs))
            assert result.status == record.OK, (name, result.reason)
        copied = strategies._copied(inputs)
    for actual, expected in zip(copied, strategies.expanded(inputs), strict=True):
        assert torch.equal(actual, expected)
    assert (strategies.LEVELS in calls) == strategies.is_shared(shape)
    assert (strategies.JOIN_ROOT in calls) == (shape.root > 0)


def _eager(inputs):
    return lambda: strategies.program(*strategies.arguments(inputs))


def test_a_wrong_strategy_is_found():
    inputs = strategies.draw(SHAPES[1], CPU, torch.float32)

    def without_the_last_key() -> torch.Tensor:
        q, *keys = strategies.arguments(inputs)
        return strategies.program(q, *keys[:-2], *(k[:, :, :-1] for k in keys[-2:]))

    result = regret_measure.checked(inputs, "bad", without_the_last_key, _eager(inputs))
    assert result.status == record.WRONG and "worst row" in result.reason


# --- rules ----------------------------------------------------------------------------------------

H200 = GPUS["H200"]
LONG = Shape(1, 64, 0, 4096, 1, 16, Heads())


def test_always_never_and_the_model():
    for shape in (LONG, SHAPES[0]):
        assert rules.always(shape, H200) and not rules.never(shape, H200)
    single = Shape(4, 1, 0, 4096, 1, 16, Heads())
    assert not rules.always(single, H200) and rules.model(single, H200) == strategies.NAIVE
    assert rules.model(LONG, H200) == strategies.LEVELS


def test_vllms_rule():
    """From 256 keys and 8 sequences; of 32 heads over 8 on 132 processors from 32 sequences."""
    on = [rules.vllm(Shape(1, n, 0, 1024, 1, 5, Heads()), H200) for n in (4, 16, 32, 64)]
    assert on == [False, False, True, True]
    assert not rules.vllm(Shape(1, 64, 0, 255, 1, 5, Heads()), H200)
    assert rules.vllm(Shape(1, 8, 0, 256, 4, 5, Heads()), H200), "no decoding kernel: always"
    assert rules.vllm(Shape(1, 8, 0, 256, 1, 5, Heads(16, 16)), H200), "no groups: always"


def test_pats_rule():
    assert rules.pat(LONG, H200) and rules.pat(Shape(1, 2, 0, 16, 1, 5, Heads()), H200)
    assert not rules.pat(Shape(1, 2, 0, 4, 1, 5, Heads()), H200), "a partial costs 4 keys"
    assert rules.pat(Shape(1, 17, 0, 4096, 1, 5, Heads()), H200), "one of 17 leaves, 16 stay"


def test_fasttrees_rule():
    assert rules.fasttree(LONG, H200)
    assert not rules.fasttree(Shape(1, 1, 0, 4096, 1, 16, Heads()), H200)


# --- what is said ---------------------------------------------------------------------------------


def line(shape: Shape, **us: float) -> Line:
    results = {name: Result(record.OK, time=Spread.of([time])) for name, time in us.items()}
    floor = Floor(1e6, 2e6, 1e-5, "bytes")
    return Line(str(shape), 10.0, 10.0, floor, results, vars(shape) | {"heads": vars(shape.heads)})


@pytest.fixture
def made() -> Record:
    made = Record("regret", "us", grid.COLUMNS, {}, Ceilings(4e12, 8e14), "a device")
    first, second, third = (Shape(1, n, 0, 4096, 1, 16, grid.HEADS["cpu"][0]) for n in (2, 4, 8))
    made.lines = [
        line(first, naive=100.0, cascade=50.0),
        line(second, naive=30.0, cascade=40.0),
        line(third, naive=90.0, cascade=30.0),
        line(Shape(2, 1, 0, 64, 1, 3, SMALL), naive=10.0),
    ]
    return made


def test_regrets(made):
    found = {each.rule: each for each in regret_report.regrets(made.lines, GENERIC)}
    assert set(found) == set(rules.RULES)
    always, never = found["always"], found["never"]
    assert (always.mean, always.cascades) == (pytest.approx(1 / 9), 3)
    assert always.worst == (pytest.approx(1 / 3), made.lines[1].label)
    assert never.worst[0] == never.p95 == 2.0 and never.cascades == 0
    assert regret_report.regrets(made.lines[3:], GENERIC) == [], "nothing to choose there"


def test_joined_levels_count_as_the_best_where_they_are(made):
    results = made.lines[0].results
    results[strategies.JOIN_ROOT] = Result(record.OK, time=Spread.of([40.0]))
    results[strategies.COPY] = Result(record.OK, time=Spread.of([1.0]))
    found = {each.rule: each for each in regret_report.regrets(made.lines[:1], GENERIC)}
    assert found["always"].worst[0] == pytest.approx(0.25)


def test_the_table_and_the_summary(made):
    found = regret_report.regrets(made.lines, GENERIC)
    text = io.StringIO()
    Console(file=text, width=160).print(regret_report.table(found))
    always = next(x for x in text.getvalue().splitlines() if "always" in x)
    assert always.split()[1:7] == ["11.1", "%", "33.3", "%", "33.3", "%"]
    assert made.lines[1].label in always and "3 of 3" in always
    assert regret_report.summary(found)["never"]["worst"] == 2.0


def test_the_map_shows_measured_ratios_and_our_choice(made):
    pytest.importorskip("matplotlib")
    left, _ = regret_report.draw_map(made.lines, GENERIC).axes[:2]
    ratios = [text.get_text() for text in left.texts]
    assert ratios == ["2.0", "0.8", "3.0"]
    colours = [drawn.get_color() for drawn in left.lines[:3]]
    assert colours == ["tab:green", "tab:red", "tab:green"]
    markers = [drawn.get_marker() for drawn in left.lines[:3]]
    chosen = [rules.model(regret_report.shape_of(each), GENERIC) for each in made.lines[:3]]
    assert markers == ["x" if way == strategies.NAIVE else "o" for way in chosen]


def test_a_file_is_read_back(made, tmp_path):
    made.write(tmp_path / "regret.json")
    kept = regret._kept(tmp_path / "regret.json")
    assert [asdict(each) for each in kept] == [asdict(each) for each in made.lines]
    assert regret._kept(tmp_path / "none.json") == []


def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    """Shapes that are in the file are not measured again; the report covers all."""
    shapes = SHAPES[:2]
    monkeypatch.setattr(grid, "grid", lambda kind: shapes)
    monkeypatch.setattr(regret_measure, "ceilings_of", lambda device: Ceilings(1e10, 1e11))
    monkeypatch.setattr(strategies, "cpu_calls", _interpreted_calls)
    path = tmp_path / "regret.json"
    base = ["--device", "cpu", "--json", str(path), "--repeat", "2"]
    assert regret.main([*base, "--shapes", "1"]) == 0
    assert regret.main([*base, "--resume"]) == 0
    assert "1 shapes measured before, 1 to go" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert [each["label"] for each in content["lines"]] == [str(shape) for shape in shapes]
    assert content["settings"]["regret"]["model"]["shapes"] == 2
    assert regret.main([*base, "--limit-seconds", "-1"]) == 0
    assert "out of time" in capsys.readouterr().out


def _interpreted_calls(inputs):
    eager = _eager(inputs)
    return {strategies.NAIVE: eager, strategies.LEVELS: eager}


def test_a_fit_finds_figures_that_explain_the_times():
    """Times that the model itself gives with other figures: the loss falls to almost nothing."""
    true = GENERIC.with_values({"copy": 4e9, "launch": 6e-5}, "a test")
    found = []
    for topk in (2, 8, 32):
        for prefix in (16, 256, 4096):
            shape = Shape(1, topk, 0, prefix, 1, 16, SMALL)
            facts = rules.facts_of(shape, true)
            times = facts.plain.seconds, facts.cascade.seconds
            found.append(regret_fit.Sample(shape, *times))
    assert regret_fit.loss(found, true, 0.0) == pytest.approx(0.0, abs=1e-9)
    before = regret_fit.loss(found, GENERIC, 0.0)
    values, _ = regret_fit.fit(found, GENERIC, ["copy", "launch"], steps=80)
    fitted = GENERIC.with_values(values, "fitted")
    assert regret_fit.loss(found, fitted, 0.0) < before / 10
    assert values["launch"] == pytest.approx(6e-5, rel=0.1)


def test_the_fit_says_what_it_changed(made, tmp_path, capsys):
    made.write(tmp_path / "regret.json")
    arguments = [str(tmp_path / "regret.json"), "--steps", "5", "--figures", "copy", "launch"]
    assert regret_fit.main(arguments) == 0
    said = capsys.readouterr().out
    assert "before: mean" in said and "after: mean" in said and "launch: 1.5e-05 -> " in said


@pytest.mark.parametrize(
    ("name", "device"), [("regret-cpu", GENERIC), ("regret-nvidia-h200-2026-11-30", H200)]
)
def test_the_measured_grids_meet_the_goal(name, device):
    """What is in `results/`, decided by the table's figures: a change of either is noticed."""
    path = record.RESULTS / f"{name}.json"
    lines = [record.line_of(each) for each in json.loads(path.read_text())["lines"]]
    found = {each.rule: each for each in regret_report.regrets(lines, device)}
    assert len(found["model"].losses) >= 200
    assert found["model"].mean <= 0.02 and found["model"].worst[0] <= 0.10
    assert all(found["model"].mean < each.mean for n, each in found.items() if n != "model")


def test_times_are_judged_again(made, tmp_path, capsys):
    """What was measured stays; what rules make of it, and the map, are new."""
    path = tmp_path / "regret.json"
    made.write(path)
    before = json.loads(path.read_text())
    assert regret.main(["--again", str(path)]) == 0
    after = json.loads(path.read_text())
    assert after["lines"] == before["lines"] and after["date"] == before["date"]
    assert set(after["settings"]["regret"]) == set(rules.RULES)
    assert "FastTree" in capsys.readouterr().out

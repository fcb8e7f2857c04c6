"""The tuning benchmark without its device: the field, the regret, the table, the file, mistakes."""

from __future__ import annotations

import io
import json
import threading

import pytest
import torch
from rich.console import Console
from support.interpreter import interpreted

from torch_cascade.benchmarks import (
    candidates,
    ceilings,
    command,
    contest,
    inputs,
    peers,
    record,
    rows,
    tune,
)
from torch_cascade.benchmarks.record import Line, Record, Result
from torch_cascade.benchmarks.rows import Ceilings, Floor, Heads, Row
from torch_cascade.benchmarks.spread import Spread
from torch_cascade.kernels.launch_config import DeviceLimits, LaunchConfig, SlotConfig

CPU = torch.device("cpu")
H200 = DeviceLimits(processors=132, shared_memory=232448)
SMALL = DeviceLimits(processors=20, shared_memory=99 * 1024)
ROW = Row(4, 4, 2000, 5, 5)
SLOT = SlotConfig(64, 64, 3, 2)
CONFIGS = {
    name: LaunchConfig((SLOT, SlotConfig(64, keys, 3, 1)), tail=True)
    for name, keys in (("mine", 32), ("fast", 64), ("slow", 16), ("bad", 128))
}
FIELD = tune.Field(CONFIGS, "mine", ["large"])


def timed(*us: float) -> Result:
    return Result(record.OK, time=Spread.of(us), details={"captured": True})


def line(label: str, results: dict[str, Result]) -> Line:
    return tune.judged(Line(label, 10.0, 16.5, Floor(1e6, 2e6, 1e-5, "bytes"), results), FIELD)


@pytest.fixture
def made() -> Record:
    made = Record("tune", "us", "B,T,L,S,X", {}, Ceilings(4e12, 8e14), "a device")
    first = {
        "mine": timed(20.0, 22.0, 24.0),
        "fast": timed(20.0),
        "slow": timed(30.0),
        "bad": Result(record.FAILED, "OutOfResources: shared memory"),
    }
    made.lines.append(line("4,4", first))
    made.lines.append(line("8,4", {"mine": timed(15.0), "fast": timed(16.0)}))
    return made


def test_the_regret(made):
    first, second = (each.details for each in made.lines)
    assert first["regret_percent"] == pytest.approx(10.0)
    assert (first["chosen"], first["best"], first["left_out"]) == ("mine", "fast", ["large"])
    assert (second["regret_percent"], second["best"]) == (0.0, "mine")
    assert tune.regret({"mine": Result(record.WRONG), "fast": timed(1.0)}, "mine") is None


def test_what_is_said_of_a_line(made):
    assert [tune.summary(each) for each in made.lines] == [
        "3 of 4 timed, 1 left out; the choice takes 10.0 % longer than fast",
        "2 of 2 timed, 1 left out; the choice is the best: mine",
    ]
    lost = line("1,1", {"mine": Result(record.FAILED, "x"), "fast": timed(1.0)})
    assert tune.summary(lost) == "1 of 2 timed, 1 left out; the choice mine was not timed"


def test_the_regret_over_all_rows(made):
    assert tune.overall(made) == [
        "the choice takes 4.9 % longer than the best (geometric mean of 2 rows), "
        "most at 4,4: 10.0 %"
    ]
    made.lines.clear()
    assert tune.overall(made) == []


def drawn(made: Record, show: int) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=160).print(tune.table(made, show))
    lines = [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in text.getvalue().splitlines()
    ]
    return [cells for cells in lines[2:] if cells and not cells[0].startswith("─")]


def test_the_table(made):
    first = ["4,4", "16.5", "1", "fast", "20.0 (2.00)", "20.0 to 20.0", "0.0 %"]
    mine = ["2", "mine (chosen)", "22.0 (2.20)", "21.0 to 23.0", "10.0 %"]
    slow = ["3", "slow", "30.0 (3.00)", "30.0 to 30.0", "50.0 %"]
    best = ["8,4", "16.5", "1", "mine (chosen)", "15.0 (1.50)", "15.0 to 15.0", "0.0 %"]
    other = ["2", "fast", "16.0 (1.60)", "16.0 to 16.0", "6.7 %"]
    assert drawn(made, 5) == [first, mine, slow, best, other]
    assert drawn(made, 1) == [first, mine, best]  # the chosen one wherever it stands


def test_the_exit_status(made):
    assert tune.status(made) == 0  # a candidate may fail
    made.lines.append(line("1,1", {"mine": timed(1.0), "bad": Result(record.WRONG, "error 1")}))
    assert tune.status(made) == 1
    made.lines[-1] = line("1,1", {"mine": Result(record.FAILED, "x"), "fast": timed(1.0)})
    assert tune.status(made) == 1


def test_what_does_not_fit_is_left_out():
    field = tune.Field.of(ROW, Heads(), SMALL)
    assert field.left_out and not set(field.left_out) & set(field.configs)
    assert all(candidates.fits(config, Heads(), SMALL) for config in field.configs.values())
    everything = {candidates.name(c) for c in candidates.enumerate_all(ROW, Heads(), SMALL)}
    assert everything <= {*field.left_out, *field.configs}
    assert tune.Field.of(ROW, Heads(), H200).left_out == []


def test_some_candidates_and_always_the_chosen_one():
    field = tune.Field.of(ROW, Heads(), H200, only="suffix")
    chosen, *others = field.configs
    assert chosen == field.chosen and "tail" in chosen
    assert others and all("suffix" in name for name in others)


def test_compiling_side_by_side_leaves_failures_to_the_check():
    meet = threading.Barrier(2, timeout=60)
    called = []

    def fail():
        called.append("fail")
        raise RuntimeError("does not compile")

    def together():
        meet.wait()
        called.append("together")

    tune.compile_all([fail, together, together], 2, CPU)
    assert sorted(called) == ["fail", "together", "together"]


def as_called(call):
    return contest.timing.Prepared(call, None)


def test_configurations_compute_what_float64_does(monkeypatch):
    """Some of each kind, interpreted: tails with one and more splits, programs of their own."""
    pytest.importorskip("triton")
    heads = Heads(query=4, kv=2, dim=16, element=4)
    row = Row(2, 3, 150, 2, 5)
    field = tune.Field.of(row, heads, DeviceLimits(processors=4, shared_memory=232448))
    wanted = ("splits 1, tail 16x3", "splits 3, tail 64x2", "splits 2, suffix 16x16x2, splits 1")
    names = [next(name for name in field.configs if name.endswith(end)) for end in wanted]
    engines = [engine for engine in field.engines() if engine.name in (*names, field.chosen)]
    plain = inputs.draw(row, heads, CPU, torch.float32, 0)
    monkeypatch.setattr(contest.timing, "prepare", as_called)
    with interpreted():
        results, prepared = contest.prepare(engines, contest.cases(plain), CPU)
    assert {name: result.reason for name, result in results.items()} == dict.fromkeys(prepared)
    assert set(prepared) == {*names, field.chosen}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "1,2"], "B,T,L,S,X"),
        (["--repeat", "0"], "argument --repeat: must be at least 1, got 0"),
        (["--show", "none"], "argument --show: must be at least 1, got none"),
        (["--jobs", "-1"], "argument --jobs: must be at least 1, got -1"),
        (["--engines", "kernel"], "unrecognized arguments: --engines"),
    ],
)
def test_mistakes_on_the_command_line(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        tune.main(options)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_what_it_needs(capsys):
    assert tune.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_the_whole_command_on_a_stand_in(tmp_path, monkeypatch, capsys):
    """Everything but the device: a naive kernel, and figures in the order of the candidates."""
    pytest.importorskip("triton")
    wrong = "64x32x2"

    def kernel(given, configs):
        (config,) = configs
        scale = 2.0 if candidates.name(config).startswith(wrong) else 1.0
        return lambda: scale * peers.naive(*given.tensors())

    def clock(prepared, flush, repeat):
        assert (flush.kind, repeat) == ("none", 4)
        return {name: [30.0 - place] * repeat for place, name in enumerate(prepared)}

    monkeypatch.setattr(peers, "kernel", kernel)
    monkeypatch.setattr(command, "cuda_device", lambda: CPU)
    monkeypatch.setattr(contest.timing, "prepare", as_called)
    monkeypatch.setattr(contest.timing, "interleaved", clock)
    monkeypatch.setattr(ceilings, "measure", lambda *_: Ceilings(4.44e12, 780e12))
    monkeypatch.setattr(rows, "Heads", lambda: Heads(query=4, kv=2, dim=16))
    monkeypatch.setattr(tune, "Heads", rows.Heads)
    file = tmp_path / "run.json"
    options = ["--rows", "1,20,70,1,5", "2,20,40,1,5", "--repeat", "4", "--flush", "none"]
    options += ["--only", "tail 32", "--show", "2", "--jobs", "2", "--json", str(file)]
    assert tune.main(options) == 1  # one is wrong
    content = json.loads(file.read_text())
    assert (content["benchmark"], content["unit"]) == ("tune", "us")
    assert content["settings"]["only"] == "tail 32"
    assert content["settings"]["limits"] == H200._asdict()
    assert [made["label"] for made in content["lines"]] == ["1,20,70,1,5", "2,20,40,1,5"]
    for made in content["lines"]:
        results, details = made["results"], made["details"]
        statuses = {name: result["status"] for name, result in results.items()}
        assert set(statuses.values()) == {"ok", "wrong"}
        assert all((s == "wrong") == n.startswith(wrong) for n, s in statuses.items())
        right = [name for name, status in statuses.items() if status == "ok"]
        assert (details["chosen"], details["best"]) == (right[0], right[-1])
        chosen, best = (results[details[key]] for key in ("chosen", "best"))
        assert chosen["time"]["median"] == 30.0 and best["time"]["count"] == 4
        expected = 100 * (30 / best["time"]["median"] - 1)
        assert details["regret_percent"] == pytest.approx(expected)
        fields = {"slots", "warps", "direct", "tail", "quick"}
        assert set(chosen["details"]["config"]) == fields
    said = capsys.readouterr().out
    assert "(chosen)" in said and f"{wrong}, 4 warps" in said and "wrong at" in said
    assert "the choice takes" in said and f"written: {file}" in said.replace("\n", "")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_whole_command(tmp_path):
    file = tmp_path / "tune.json"
    options = ["--rows", "1,2,300,1,7", "--repeat", "3", "--only", "64x2, 4 warps, splits 1,"]
    assert tune.main([*options, "--json", str(file)]) == 0
    (line,) = json.loads(file.read_text())["lines"]
    assert all(r["status"] == "ok" and r["time"]["count"] == 3 for r in line["results"].values())

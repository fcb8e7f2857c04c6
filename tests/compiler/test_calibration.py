"""Calibration files: written, found, refused; the device table; the command."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

from torch_cascade import __main__ as command_line
from torch_cascade.compiler import calibrate, calibration, measure_cpu
from torch_cascade.compiler.calibration import CalibrationError, device_for
from torch_cascade.compiler.device import CPU_FIGURES, GPU_FIGURES
from torch_cascade.compiler.device_table import GENERIC_GPU, GPUS, cpu_device, gpu_device

CPU = torch.device("cpu")
FIGURES = {"read": 1.25e10, "launch": 3e-6}


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """Where this machine's calibration is looked for."""
    path = tmp_path / "caches" / "calibration.json"
    monkeypatch.setattr(calibration, "default_path", lambda device: path)
    return path


def written(path: Path, **changes: object) -> Path:
    calibration.write(path, CPU, FIGURES, "2026-11-30")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))
    return path


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [*GPUS.values(), GENERIC_GPU, cpu_device("", 3)])
def test_every_figure_is_there_with_its_source(found):
    assert set(found.figures) == set(GPU_FIGURES if found.kind == "cuda" else CPU_FIGURES)
    assert all(figure.value > 0 and figure.source for figure in found.figures.values())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB SXM"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA B200", "NVIDIA B200"),
    ],
)
def test_gpus_are_known_by_their_drivers_names(model, name):
    assert gpu_device(model).name == name and not gpu_device(model).is_generic


def test_what_is_not_in_the_table_says_so():
    for found in (gpu_device("NVIDIA L4"), gpu_device("Tesla T4"), cpu_device("a CPU", 2)):
        assert found.is_generic and "not calibrated" in str(found)
        generic = ("read", "cache")
        assert all("generic" in found.figures[name].source for name in generic)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9004"),
        ("AMD EPYC 9755 128-Core Processor", "AMD EPYC 9005"),
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7003"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Intel Xeon, 4th and 5th generation"),
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "Intel Xeon, 3rd generation"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "AMD Ryzen 7000 and 9000"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", "Intel Core, 12th to 14th"),
    ],
)
def test_cpus_are_known_by_their_model_names(model, name):
    assert cpu_device(model, 4).name == name


def test_threads_share_a_sockets_memory():
    rates = [cpu_device("AMD EPYC 9654 96-Core Processor", n)["read"] for n in (1, 8, 64, 96)]
    assert rates[0] < rates[1] < rates[2] == rates[3] == 460.8e9


# --- files ----------------------------------------------------------------------------------------


def test_a_calibration_is_used_once_it_is_there(path):
    before = device_for(CPU)
    assert not before.is_measured
    written(path)
    found = device_for(CPU)
    assert found.is_measured and "(calibrated)" in str(found)
    assert found["read"] == FIGURES["read"] and found["copy"] == before["copy"]
    assert "measured" in found.figures["read"].source
    assert device_for(CPU) is found, "one object, so that prices are remembered"
    assert not device_for(CPU, "none").is_measured
    assert device_for(CPU, str(path))["launch"] == FIGURES["launch"]


def test_a_new_calibration_changes_the_key(path):
    keys = {calibration.key(), calibration.key("none")}
    assert len(keys) == 1
    written(path)
    assert calibration.key() not in keys and calibration.key("none") in keys
    assert calibration.key(str(path)) not in keys


BAD = [
    ({"schema": 1}, "schema: expected 2, got 1"),
    (
        {"machine": {"kind": "cpu", "name": "other", "threads": 1}},
        "machine.name: expected .*'other'",
    ),
    ({"machine": {"kind": "cuda", "name": "x", "threads": 0}}, "machine.kind: expected 'cpu'"),
    ({"machine": None}, "machine: expected kind cpu or cuda, got None"),
    ({"figures": {}}, "figures: expected an object of numbers, got {}"),
    ({"figures": {"speed": 1.0}}, "figures: expected some of read, .* got 'speed'"),
    ({"figures": {"read": -1.0}}, "figures.read: expected a number above 0, got -1.0"),
    ({"figures": {"read": True}}, "figures.read: expected a number above 0, got True"),
    ({"figures": {"read": float("inf")}}, "figures.read: expected a number above 0, got inf"),
    ({"figures": {"read": "fast"}}, "figures.read: expected a number above 0, got 'fast'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_and_foreign_files_are_refused(changes, message, path):
    written(path, **changes)
    with pytest.raises(CalibrationError, match=message) as error:
        device_for(CPU, str(path))
    assert str(path) in str(error.value)
    with pytest.warns(UserWarning, match=f"{message}.*; the table of devices is used"):
        assert not device_for(CPU).is_measured
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device_for(CPU)  # said once


@pytest.mark.parametrize("text", ["", "[1]", "{", "{}"])
def test_what_is_no_calibration_at_all_is_refused(text, path):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(CalibrationError, match="expected"):
        calibration.read(path, CPU)


def test_a_missing_file_that_was_asked_for_is_an_error(tmp_path):
    with pytest.raises(CalibrationError, match="No such file"):
        device_for(CPU, str(tmp_path / "nothing.json"))


def test_the_threads_are_in_the_name(monkeypatch):
    monkeypatch.undo()
    name = calibration.default_path(CPU).name
    assert re.fullmatch(r"calibration-cpu-[a-z0-9-]+-\d+-threads\.json", name)


# --- measuring ------------------------------------------------------------------------------------


def test_two_attentions_give_two_rates():
    streamed, flops = [1000, 3000], [10, 900]
    seconds = [s / 50 + f / 7 for s, f in zip(streamed, flops, strict=True)]
    assert measure_cpu.solved(streamed, flops, seconds) == pytest.approx(
        {"stream": 50.0, "attend": 7.0}
    )
    noisy = measure_cpu.solved(streamed, flops, [20.0, 1.0])
    assert noisy["attend"] == 900 / 1.0 and noisy["stream"] > 0


def test_the_command_measures_writes_and_shows(path, monkeypatch, capsys):
    steps = [("one", lambda: {"read": 2e10}), ("two", lambda: {"launch": 1e-6})]
    monkeypatch.setattr(measure_cpu, "steps", lambda: steps)
    assert command_line.main(["calibrate", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "calibrated, " in said and str(path) in said
    assert re.search(r"read +2e\+10 .*byte/s: streaming read", said)
    assert re.search(r"copy +- ", said) and "table: " in said
    assert device_for(CPU)["read"] == 2e10
    before = path.read_text()
    assert command_line.main(["calibrate", "--device", "cpu", "--show"]) == 0
    assert path.read_text() == before


def test_showing_where_nothing_was_measured(path, capsys):
    assert command_line.main(["calibrate", "--device", "cpu", "--show"]) == 0
    assert "not calibrated, figures of" in capsys.readouterr().out and not path.exists()


def test_mistakes_are_one_line(path, capsys):
    assert command_line.main(["calibrate", "--device", "mps"]) == 2
    assert "--device: expected cpu or cuda, got mps" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert command_line.main(["calibrate", "--device", "cuda"]) == 2
        assert "finds no CUDA device" in capsys.readouterr().err
    written(path, schema=9)
    assert command_line.main(["calibrate", "--device", "cpu", "--show"]) == 2
    assert "schema: expected 2, got 9" in capsys.readouterr().err


def test_what_is_measured_is_what_the_model_needs(monkeypatch):
    """Every figure of a CPU that is no fact of it, each above zero; small sizes, one repeat."""
    monkeypatch.setattr(measure_cpu, "_REPEAT", 1)
    monkeypatch.setattr(measure_cpu, "_LARGE", 2**20)
    monkeypatch.setattr(measure_cpu, "_FLUSH", 2**20)
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: fn)
    found = {name: value for _, step in measure_cpu.steps() for name, value in step().items()}
    assert set(found) == set(CPU_FIGURES) - calibration.NOT_MEASURED
    assert all(value > 0 for value in found.values())


def test_progress_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    assert list(calibrate._progress(["a", "b"])) == ["a", "b"]
    assert capsys.readouterr().out == "1/2 a\n2/2 b\n"

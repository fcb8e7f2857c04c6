"""`python -m torch_cascade doctor`: it finds what is wrong, and fails for what is needed only."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config, cpp_builder

from torch_cascade.__main__ import main
from torch_cascade.compiler import calibration, checks, trial


def examined(capsys, *arguments, works=True):
    """Every check by name, as the command gives it to tools."""
    assert main(["doctor", "--json", *arguments]) == (0 if works else 1)
    content = json.loads(capsys.readouterr().out)
    assert content["works"] is works
    return {check["name"]: check for check in content["checks"]}


def bad(found):
    return [name for name, check in found.items() if check["state"] == "bad"]


def test_a_machine_that_works(capsys):
    found = examined(capsys)
    assert not bad(found)
    assert torch.__version__ in found["torch"]["found"] and found["torch"]["state"] == "ok"
    assert sys.executable in found["Python"]["found"]
    assert found["backend 'cascade'"]["found"].endswith(":cascade_backend")
    assert found["options"]["found"] == "all as by default"
    assert found["calibration"]["state"] == "absent"
    assert "python -m torch_cascade calibrate" in found["calibration"]["advice"]
    for check in found.values():
        assert {*check} == {"name", "state", "found", "advice"} and check["found"]


@pytest.mark.parametrize("plain", [False, True], ids=["rich", "plain"])
def test_the_same_for_people(capsys, monkeypatch, plain):
    if plain:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        pytest.importorskip("rich")
    monkeypatch.setenv("TORCH_CASCADE_DECIDE", "always")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "TORCH_CASCADE_DECIDE=always" in said and "torch_cascade works here" in said
    assert torch.__version__ in said and "C++ compiler" in said and "-> " in said
    monkeypatch.setenv("TORCH_CASCADE_DECIDE", "[bold]perhaps")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "[bold]perhaps" in said
    assert "cannot work here before this is put right: options" in said


@pytest.mark.parametrize(
    "version, asked, meets",
    [
        ("2.13.0+cpu", "<2.16,>=2.11", True),
        ("2.9.1", "<2.16,>=2.11", False),
        ("2.16.0", "<2.16,>=2.11", False),
        ("2.11.0", ">=2.11,<2.16", True),
        ("3.10.2", ">=3.10", True),
        ("1.0", "", True),
    ],
)
def test_versions(version, asked, meets):
    assert checks._within(version, asked) is meets


def test_what_is_asked_is_what_the_package_declares():
    assert "2.11" in checks._asked("torch") and "2.16" in checks._asked("torch")
    assert checks._asked("transformers").startswith(">=5") and checks._asked("numpy") == ""


def test_a_torch_of_another_version(capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    found = examined(capsys, works=False)
    assert bad(found) == ["torch"] and "2.11" in found["torch"]["advice"]


def points(*values):
    group = checks._GROUP
    return lambda **selected: [metadata.EntryPoint("cascade", value, group) for value in values]


OURS = "torch_cascade.compiler.backend:cascade_backend"


@pytest.mark.parametrize(
    "values, said",
    [
        ((), "no entry point cascade"),
        (("torch_cascade.compiler.backend:gone",), "gone"),
        ((OURS, "other:backend"), "several"),
    ],
)
def test_a_backend_that_torch_does_not_find(capsys, monkeypatch, values, said):
    monkeypatch.setattr(checks.metadata, "entry_points", points(*values))
    found = examined(capsys, works=False)
    (name,) = bad(found)
    assert name == "backend 'cascade'" and said in found[name]["found"]


def test_the_same_entry_point_twice_is_no_fault(monkeypatch):
    monkeypatch.setattr(checks.metadata, "entry_points", points(OURS, OURS))
    assert checks._entry_point().state == "ok"


@pytest.mark.parametrize("name", ["no-such-compiler", "false"])
def test_no_cpp_compiler(capsys, name):
    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (name,)}):
        found = examined(capsys, works=False)
    cpp_builder.cpp_compiler_search.cache_clear()
    assert bad(found) == ["C++ compiler"] and "g++" in found["C++ compiler"]["advice"]


def test_optional_packages(monkeypatch):
    def version(package):
        if package == "rich":
            raise metadata.PackageNotFoundError(package)
        return "4.57.1"

    monkeypatch.setattr(checks.metadata, "version", version)
    rich, old = checks._optional("rich", "x", "demo"), checks._optional("transformers", "x", "hf")
    assert (rich.state, rich.found) == ("absent", "not installed")
    assert (old.state, old.found) == ("absent", "4.57.1, but >=5.17 is needed")
    assert "torch-cascade[hf]" in old.advice


def gpu(monkeypatch, major, minor):
    about = SimpleNamespace(name="Some GPU", major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
    checks.no_kernel.__globals__["_no_triton_kernel"].cache_clear()


@pytest.mark.parametrize("capability, state", [((7, 5), "absent"), ((9, 0), "ok")])
def test_gpus(monkeypatch, capability, state):
    pytest.importorskip("triton")
    gpu(monkeypatch, *capability)
    (check,) = checks._gpus()
    checks.no_kernel.__globals__["_no_triton_kernel"].cache_clear()
    assert (check.name, check.state) == ("GPU 0", state)
    assert "Some GPU, compute capability {}.{}".format(*capability) in check.found
    assert ("below 8.0" in check.advice) is (state == "absent")


@pytest.mark.parametrize("has_gpu, state", [(False, "absent"), (True, "bad")])
def test_without_triton_a_gpu_is_of_no_use(monkeypatch, has_gpu, state):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert checks._triton().state == state


# --- options, calibration, caches -----------------------------------------------------------------


def test_options_that_are_set(capsys, monkeypatch):
    monkeypatch.setenv("TORCH_CASCADE_STRICT", "1")
    monkeypatch.setenv("TORCH_CASCADE_MIN_TOKENS", "17")
    said = examined(capsys)["options"]["found"]
    assert said == "TORCH_CASCADE_MIN_TOKENS=17  TORCH_CASCADE_STRICT=1"


@pytest.mark.parametrize("variable", ["TORCH_CASCADE_STRIKT", "TORCH_CASCADE_STRICT"])
def test_an_option_that_is_wrong(capsys, monkeypatch, variable):
    monkeypatch.setenv(variable, "perhaps")
    found = examined(capsys, works=False)
    assert bad(found) == ["options"] and variable in found["options"]["found"]


FIGURES = {"read": 1.25e10}


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setattr(calibration, "default_path", lambda device: path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return path


def test_a_calibration_in_use(calibrated):
    calibration.write(calibrated, torch.device("cpu"), FIGURES, "today")
    check = checks._calibrated("auto")
    assert check.state == "ok" and str(calibrated) in check.found and "calibrated" in check.found
    assert checks._calibrated("none").found != check.found


def test_a_calibration_that_cannot_be_used(calibrated, tmp_path):
    calibrated.write_text("{}")
    check = checks._calibrated("auto")  # the table is used, with a warning
    assert check.state == "absent" and "schema" in check.found
    check = checks._calibrated(str(tmp_path / "none.json"))  # asked for: an error when compiling
    assert check.state == "bad" and "none.json" in check.found


def test_caches_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = examined(capsys, works=False)
    assert bad(found) == ["Inductor's cache"] and found["our cache"]["state"] == "absent"
    assert "TORCHINDUCTOR_CACHE_DIR" in found["Inductor's cache"]["advice"]


def test_caches_that_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = examined(capsys)
    assert found["Inductor's cache"]["found"] == str(tmp_path / "new")
    own = found["our cache"]["found"]
    assert own == f"{tmp_path / 'torch_cascade'} (not made yet)"
    assert not (tmp_path / "torch_cascade").exists()


# --- compiling ------------------------------------------------------------------------------------


def compiled_by(monkeypatch, function):
    monkeypatch.setattr(torch, "compile", lambda fn, **given: function)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (check,) = trial.trials()
    assert check.name == "compiling for cpu"
    return check


def test_it_compiles(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check = examined(capsys, "--compile")["compiling for cpu"]
    assert check["state"] == "ok" and "1 of 1 attention sites rewritten" in check["found"]


def test_it_does_not_compile(monkeypatch):
    def fail(*args, **keywords):
        raise RuntimeError("no header\nand more")

    check = compiled_by(monkeypatch, fail)
    assert (check.state, check.found) == ("bad", "RuntimeError: no header")


def test_what_the_backend_raises_is_said(monkeypatch):
    def fail(*args, **keywords):
        raise OSError("no header\nand more")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (check,) = trial.trials()
    assert (check.state, check.found) == ("bad", "OSError: no header")


def test_it_compiles_to_something_else(monkeypatch):
    check = compiled_by(monkeypatch, lambda q, prefix, suffix: trial._attention(q, suffix, suffix))
    assert check.state == "bad" and "not close" in check.found


def test_it_compiles_without_a_rewrite(monkeypatch):
    check = compiled_by(monkeypatch, trial._attention)
    assert check.state == "absent" and "not rewritten: no attention was analysed" in check.found

"""The benchmark of products without its device: sizes, floors, checks, candidates, both tables."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from support.interpreter import interpreted

from torch_cascade.benchmarks import (
    ceilings,
    command,
    contest,
    linears,
    linears_contest,
    linears_work,
    peers,
    record,
)
from torch_cascade.benchmarks.linears_work import Row
from torch_cascade.benchmarks.rows import Ceilings
from torch_cascade.kernels.launch_config import DeviceLimits
from torch_cascade.kernels.linears import linears_torch
from torch_cascade.kernels.linears_config import LinearsConfig, linears_config

CPU = torch.device("cpu")
MEASURED = Ceilings(4e12, 800e12)
LIMITS = DeviceLimits(processors=132, shared_memory=232448)
H200 = LIMITS.shared_memory
ROW = Row(5, 192, (96, 32, 48))


def given(row: Row = ROW, bias: bool = True, dtype=torch.bfloat16) -> linears_work.Inputs:
    return linears_work.draw(row, bias, CPU, dtype, 0)


def as_called(call):
    return contest.timing.Prepared(call, None)


# --- sizes ----------------------------------------------------------------------------------------


def test_rows_are_read_as_they_are_written():
    assert linears_work.parse_row("16,4096,4096+1024+1024") == Row(16, 4096, (4096, 1024, 1024))
    assert linears_work.parse_row("3,64,16") == Row(3, 64, (16,))
    assert all(linears_work.parse_row(str(row)) == row for row in linears_work.DEFAULT_ROWS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("16,4096", "expected whole numbers, M,K,N or M,K,N"),
        ("16,4096,+16", "expected whole numbers"),
        ("16,4096,16+", "expected whole numbers"),
        ("16,4096,16,16", "expected whole numbers"),
        ("-1,64,16", "expected whole numbers"),
        ("1.5,64,16", "expected whole numbers"),
        ("0,64,16", "expected rows"),
        ("1,0,16", "expected rows"),
        ("1,64,0", "expected rows"),
        ("1,96,16", "K in steps of 64"),
        ("1,64,16+24", "N in steps of 16"),
        ("1,64,16+16+16+16", "up to 3 N"),
    ],
)
def test_rows_that_are_none(text, said):
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        linears_work.parse_row(text)
    assert said in str(raised.value) and repr(text) in str(raised.value)


def test_the_default_rows_are_the_layers_of_two_models():
    layers = ["4096,4096+1024+1024", "4096,4096", "4096,14336+14336", "14336,4096"]
    assert [str(row) for row in linears_work.DEFAULT_ROWS] == [
        *(f"{rows},{layer}" for rows in (16, 4, 64) for layer in layers),
        "16,3584,3584+512+512",
        "16,3584,3584",
        "16,3584,18944+18944",
        "16,18944,3584",
    ]


def test_bytes_and_operations():
    """2 bytes times 3 x 64 of x, 48 x 64 of weights, 3 x 48 of results, 48 of biases."""
    row = Row(3, 64, (16, 32))
    assert linears_work.moved_bytes(row, False, 2) == 2 * (192 + 3072 + 144) == 6816
    assert linears_work.moved_bytes(row, True, 2) == 6816 + 96
    assert linears_work.moved_bytes(row, True, 4) == 2 * (6816 + 96)
    assert linears_work.flops(row) == 2 * 3 * 64 * 48 == 18432


def test_few_rows_are_bound_by_the_weights_and_many_by_arithmetic():
    """Llama-3-8B's queries, keys and values: 25,165,824 weights, 163,840 numbers beside them."""
    few = linears_work.floor(Row(16, 4096, (4096, 1024, 1024)), False, 2, MEASURED)
    assert (few.bytes, few.bound) == (50_659_328, "bytes")
    assert few.seconds == pytest.approx(12.664832e-6)
    many = linears_work.floor(Row(4096, 4096, (4096,)), False, 2, MEASURED)
    assert many.bound == "flops" and many.seconds == pytest.approx(2 * 4096**3 / 800e12)


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["cublas", "cublas-joined", "inductor"])
def test_every_engine_computes_the_same(name, bias, monkeypatch):
    asked = []

    def compiled(function, mode):
        asked.append(mode)
        return function

    monkeypatch.setattr(peers, "compiled", compiled)
    (peer,) = (peer for peer in linears_contest.PEERS if peer.name == name)
    drawn = given(bias=bias)
    assert (drawn.biases is not None) == bias
    found = contest.verdict(peer, [linears_contest.Case(drawn)])
    assert found.status == record.OK, found.reason
    outs = peer.make(drawn)()
    assert [tuple(out.shape) for out in outs] == [(5, 96), (5, 32), (5, 48)]
    assert asked == (["max-autotune-no-cudagraphs"] * 2 if name == "inductor" else [])


@pytest.mark.parametrize("bias", [True, False])
def test_our_kernel_is_called_as_it_wants(bias):
    pytest.importorskip("triton")
    peer = linears_contest.PEERS[0]
    assert (peer.name, peer.missing(CPU)) == ("kernel", "needs a CUDA device, this is cpu")
    with interpreted():
        found = contest.verdict(peer, [linears_contest.Case(given(bias=bias))])
    assert found.status == record.OK, found.reason


def _swap(outs):
    return [outs[0], *reversed(outs[1:])]


def _zero_element(outs):
    outs[1][4, 31] = 0.0
    return outs


def _zero_column(outs):
    outs[0][:, 8191] = 0.0
    return outs


def _not_a_number(outs):
    outs[2][0, 0] = float("nan")
    return outs


@pytest.mark.parametrize("broken", [_swap, _zero_element, _zero_column, _not_a_number])
def test_what_is_broken_is_found(broken):
    """One element of thousands, too."""
    row = Row(5, 192, (8192, 32, 32))
    case = linears_contest.Case(given(row))
    drawn = case.inputs
    results = linears_torch(drawn.x, drawn.weights, drawn.biases)
    assert case.judge(results).right
    assert not case.judge(broken(results)).right


@pytest.mark.parametrize("lost", ["features", "bias"])
def test_what_is_left_out_is_found(lost):
    """A step of 64 among Llama's longest features; a bias."""
    drawn = given(Row(4, 14336, (64, 32)))
    case = linears_contest.Case(drawn)
    x, biases = drawn.x.clone(), drawn.biases
    if lost == "features":
        x[:, -64:] = 0.0
    else:
        biases = [torch.zeros_like(bias) for bias in biases]
    assert case.judge(linears_torch(drawn.x, drawn.weights, drawn.biases)).right
    assert not case.judge(linears_torch(x, drawn.weights, biases)).right


def test_an_output_that_a_replay_leaves_unwritten_is_found():
    case = linears_contest.Case(given())
    drawn = case.inputs
    right = linears_torch(drawn.x, drawn.weights, drawn.biases)
    outs = [torch.empty_like(each) for each in right]

    def replay(count):
        return lambda: [o.copy_(r) for o, r in list(zip(outs, right, strict=True))[:count]]

    fine = record.Result(record.OK)
    for count, status in ((3, record.OK), (2, record.WRONG)):
        ready = contest.timing.Prepared(replay(count), outs)
        assert contest.replayed(ready, case, fine).status == status


# --- configurations -------------------------------------------------------------------------------


def test_candidates_divide_the_sizes():
    """192 = 3 x 64 features; 48 columns are no multiple of 32: one tile in 7 depths, 3 warps."""
    found = linears_contest.candidates(ROW)
    assert len(found) == len(set(found)) == 7 * 3
    assert {(c.block_m, c.block_n, c.block_k) for c in found} == {(16, 16, 64)}
    assert {c.stages for c in found} == {2, 3, 4, 5, 6, 7, 8}
    assert {c.warps for c in found} == {1, 2, 4}
    wide = linears_contest.candidates(Row(64, 4096, (4096, 1024, 1024)))
    assert len(wide) == 3 * 4 * 7 * 3 and {c.block_m for c in wide} == {64}
    assert {c.block_k for c in wide} == {64, 128, 256, 512}


def test_what_fits():
    """(16 + 32) x 512 x 2 bytes a stage are 48 KiB: 4 stages of 227 KiB, not 5."""
    assert linears_contest.fits(LinearsConfig(16, 32, 512, 4, 2), 2, H200)
    assert not linears_contest.fits(LinearsConfig(16, 32, 512, 5, 2), 2, H200)
    assert not linears_contest.fits(LinearsConfig(16, 32, 512, 4, 2), 4, H200)
    assert linears_contest.name(LinearsConfig(16, 32, 512, 4, 2)) == "32x512x4, warps 2"


def test_the_field_has_the_chosen_one_and_leaves_out_what_does_not_fit():
    row = Row(16, 4096, (4096, 1024, 1024))
    field = linears.field(row, 2, LIMITS)
    assert field.configs[field.chosen] == linears_config(16, 4096, row.columns, 132)
    assert next(iter(field.configs)) == field.chosen
    assert len(field.configs) + len(field.left_out) == 252
    assert "32x512x4, warps 2" in field.configs and "32x512x5, warps 2" in field.left_out
    some = linears.field(row, 2, LIMITS, only="64x64x")
    assert set(some.configs) - {some.chosen} == {n for n in field.configs if "64x64x" in n}


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "1,2"], "argument --rows: expected whole numbers"),
        (["--rows", "1,2,3"], "argument --rows: expected rows"),
        (["--engines", "magic"], "argument --engines: unknown engine 'magic'"),
        (["--engines", "kernel", "--sweep"], "argument --engines: not with --sweep"),
        (["--only", "x"], "argument --only: not without --sweep"),
        (["--dtype", "float32"], "argument --dtype: invalid choice: 'float32'"),
        (["--jobs", "0"], "argument --jobs: must be at least 1, got 0"),
    ],
)
def test_mistakes_on_the_command_line(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        linears.main(options)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_what_it_needs(capsys):
    assert linears.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.fixture
def stand_in(monkeypatch):
    """Everything but the device; `stand_in` has the dtypes whose ceilings were measured."""
    dtypes = []

    def measure(device, dtype):
        dtypes.append(dtype)
        return MEASURED

    monkeypatch.setattr(command, "cuda_device", lambda: CPU)
    monkeypatch.setattr(contest.timing, "FLUSH_BYTES", 64)
    monkeypatch.setattr(contest.timing, "prepare", as_called)
    monkeypatch.setattr(ceilings, "measure", measure)
    return dtypes


def test_the_whole_command_on_a_stand_in(tmp_path, monkeypatch, capsys, stand_in):
    """The clock's figures are given."""
    with_bias = []

    class Case(linears_contest.Case):
        def __init__(self, drawn):
            super().__init__(drawn)
            with_bias.append(drawn.biases is not None)

    monkeypatch.setattr(linears_contest, "Case", Case)
    given_us = {"cublas": [30.0, 20.0, 25.0], "cublas-joined": [9.0, 11.0, 10.0]}

    def clock(prepared, flush, repeat):
        assert flush.kind == "write" and repeat == 3 and set(prepared) == set(given_us)
        return {name: given_us[name] for name in prepared}

    monkeypatch.setattr(contest.timing, "interleaved", clock)
    file = tmp_path / "run.json"
    options = ["--rows", "5,192,96+32+48", "3,64,16", "--repeat", "3", "--flush", "write"]
    options += ["--bias", "--dtype", "float16", "--json", str(file)]
    assert linears.main(options) == 0
    content = json.loads(file.read_text())
    assert (content["benchmark"], content["unit"]) == ("linears", "us")
    assert content["columns"] == "M,K,N[+N+N]"
    settings = content["settings"]
    assert (settings["bias"], settings["dtype"], settings["flush"]) == (
        True,
        "torch.float16",
        "write",
    )
    assert with_bias == [True, True]
    assert "heads" not in settings and stand_in == [torch.float16]
    assert [line["label"] for line in content["lines"]] == ["5,192,96+32+48", "3,64,16"]
    first, second = content["lines"]
    assert first["details"] == {"rows": 5, "features": 192, "columns": [96, 32, 48]}
    assert second["work"]["bytes"] == 2 * (3 * 64 + 16 * 64 + 3 * 16 + 16)
    assert second["goal"] == pytest.approx(1.15 * second["floor"] + 5)
    for line in (first, second):
        results = line["results"]
        assert list(results) == ["kernel", "cublas", "cublas-joined"]
        assert results["kernel"]["status"] == "missing"
        assert results["cublas"]["time"]["median"] == 25.0
        assert results["cublas-joined"]["time"]["least"] == 9.0
        assert [v["right"] for v in results["cublas"]["details"]["verdicts"]] == [True]
    said = capsys.readouterr().out
    assert "5,192,96+32+48: cublas 25.0, cublas-joined 10.0" in said
    assert "kernel: missing at 5,192,96+32+48 3,64,16: needs a CUDA device" in said


def test_a_whole_sweep_on_a_stand_in(tmp_path, monkeypatch, capsys, stand_in):
    """A kernel of torch's products, wrong where a program has one warp; given figures."""
    pytest.importorskip("triton")

    def kernel(drawn, config):
        scale = 2.0 if config.warps == 1 else 1.0
        x = drawn.x * scale
        return lambda: linears_torch(x, drawn.weights, drawn.biases)

    def clock(prepared, flush, repeat):
        return {name: [30.0 - place] * repeat for place, name in enumerate(prepared)}

    monkeypatch.setattr(linears_contest, "kernel", kernel)
    monkeypatch.setattr(contest.timing, "interleaved", clock)
    file = tmp_path / "run.json"
    options = ["--rows", "5,192,96+32+48", "--sweep", "--only", "64x3", "--repeat", "4"]
    assert linears.main([*options, "--jobs", "2", "--json", str(file)]) == 1  # one is wrong
    content = json.loads(file.read_text())
    assert content["benchmark"] == "linears-sweep"
    assert (content["settings"]["only"], content["settings"]["bias"]) == ("64x3", False)
    assert content["settings"]["limits"]["shared_memory"] == H200
    (line,) = content["lines"]
    statuses = {name: result["status"] for name, result in line["results"].items()}
    assert statuses == {
        "16x64x4, warps 2": "ok",
        "16x64x3, warps 1": "wrong",
        "16x64x3, warps 2": "ok",
        "16x64x3, warps 4": "ok",
    }
    details = line["details"]
    assert (details["chosen"], details["best"]) == ("16x64x4, warps 2", "16x64x3, warps 4")
    assert details["regret_percent"] == pytest.approx(100 * (30 / 28 - 1))
    config = line["results"]["16x64x3, warps 4"]["details"]["config"]
    assert config == {"block_m": 16, "block_n": 16, "block_k": 64, "stages": 3, "warps": 4}
    said = capsys.readouterr().out
    assert "16x64x4, warps 2 (chosen)" in said and "16x64x3, warps 1: wrong at" in said
    assert "the choice takes 7.1 % longer than" in said


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [[], ["--bias", "--sweep", "--only", "16x64x3"]])
def test_the_whole_command(options, tmp_path):
    file = tmp_path / "numbers.json"
    options = [*options, "--rows", "5,192,96+32+48", "--repeat", "3", "--json", str(file)]
    assert linears.main(options) == 0
    (line,) = json.loads(file.read_text())["lines"]
    assert all(r["status"] == "ok" and r["time"]["count"] == 3 for r in line["results"].values())

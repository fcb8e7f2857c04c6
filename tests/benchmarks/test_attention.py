"""The attention benchmark without its device: floors, checks, peers, tables, files, mistakes."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import types

import pytest
import torch

from torch_cascade.benchmarks import (
    attention,
    ceilings,
    check,
    command,
    contest,
    flashinfer_peer,
    inputs,
    peers,
    record,
    rows,
)
from torch_cascade.benchmarks.rows import Ceilings, Heads, Row
from torch_cascade.benchmarks.spread import Spread

CPU = torch.device("cpu")
HEADS = Heads(query=6, kv=3, dim=16, element=4)
ROW = Row(2, 3, 33, 2, 5)
MEASURED = Ceilings(4.44e12, 780e12)


def given(needles: bool = False, row: Row = ROW) -> inputs.Inputs:
    drawn = inputs.draw(row, HEADS, CPU, torch.float32, 0)
    return inputs.with_needles(drawn) if needles else drawn


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("4,4,2000,5,5", 7.7),
        ("8,4,4096,4,4", 30.8),
        ("1,8,32768,4,4", 30.4),
        ("16,8,8192,4,4", 123),
        ("4,16,4096,1,256", 30.5),
        ("1,64,8192,1,128", 15.4),
        ("32,4,2048,4,4", 62.8),
    ],
)
def test_floors_are_those_measured_before(text, us):
    floor = rows.floor(rows.parse_row(text), Heads(), MEASURED)
    assert floor.bound == "bytes"
    assert f"{1e6 * floor.seconds:.3g}" == f"{us:.3g}" or round(1e6 * floor.seconds, 1) == us


def test_the_default_rows_are_those_measured_before():
    assert [str(row) for row in rows.DEFAULT_ROWS] == [
        "4,4,2000,5,5",
        "8,4,4096,4,4",
        "1,8,32768,4,4",
        "16,8,8192,4,4",
        "4,16,4096,1,256",
        "1,64,8192,1,128",
        "32,4,2048,4,4",
    ]


def test_many_queries_are_bound_by_arithmetic():
    floor = rows.floor(Row(1, 64, 8192, 16, 16), Heads(), MEASURED)
    assert floor.bound == "flops"
    assert floor.seconds == pytest.approx(4 * 64 * 16 * 32 * 128 * (8192 + 16) / 780e12)


def test_the_goal():
    assert [round(rows.goal_us(floor), 1) for floor in (7.74, 123.3)] == [13.9, 146.8]


@pytest.mark.parametrize("text", ["1,2,3,4", "1,2,3,4,0", "1,2,3,4,x", "", "1,2,3,4,5,6"])
def test_rows_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected 5 whole numbers .*B,T,L,S,X"):
        rows.parse_row(text)


def test_engines_keep_their_order():
    assert rows.choose(("a", "b", "c"), "c, a", ()) == ["a", "c"]
    assert rows.choose(("a", "b", "c"), None, ("b",)) == ["b"]


@pytest.mark.parametrize(("asked", "said"), [("a,x", "unknown engine 'x'"), (",", "no engine")])
def test_engines_that_are_none(asked, said):
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        rows.choose(("a", "b"), asked, ())


def test_spread():
    spread = Spread.of([4.0, 1.0, 3.0, 2.0, 100.0])
    assert (spread.median, spread.low, spread.high, spread.least, spread.count) == (3, 2, 4, 1, 5)
    assert Spread.of([7.0]).high == 7.0
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def test_the_reference_is_attention_over_the_expanded_prefix():
    for case in (given(), given(needles=True)):
        doubled = [t.double() for t in case.tensors()]
        torch.testing.assert_close(inputs.reference(case), peers.naive(*doubled))


@pytest.mark.parametrize("place", ["last prefix token", "first suffix key", "last suffix key"])
def test_a_needle_that_is_not_read_is_found(place):
    case = given(needles=True)
    judged = contest.Case(case)
    k_prefix, k_suffix = case.prefix_k.clone(), case.suffix_k.clone()
    if place == "last prefix token":
        k_prefix[:, :, -1] = -30.0 * k_prefix[:, :, -1]
    else:
        k_suffix[:, :, 0 if place.startswith("first") else -1] *= -30.0
    blind = peers.naive(case.q, k_prefix, case.prefix_v, k_suffix, case.suffix_v)
    assert not judged.judge(blind).right


def test_a_missing_block_of_a_long_prefix_is_found():
    row = Row(1, 2, 4096, 1, 4)
    case = inputs.draw(row, HEADS, CPU, torch.bfloat16, 0)
    judged = contest.Case(case)
    assert judged.judge(peers.naive(*case.tensors())).right
    short = [case.prefix_k[:, :, :-16], case.prefix_v[:, :, :-16]]
    assert not judged.judge(peers.naive(case.q, *short, case.suffix_k, case.suffix_v)).right


def test_not_a_number_is_wrong_and_shapes_must_agree():
    right = torch.randn(4, 8)
    reference = right.double()
    assert check.judge(right, right, reference).right
    broken = right.clone()
    broken[2, 3] = float("nan")
    assert not check.judge(broken, right, reference).right
    with pytest.raises(ValueError, match=r"\[4, 7\]"):
        check.judge(right[:, :7], right, reference)


def test_one_wrong_row_is_found():
    reference = torch.randn(5000, 8, dtype=torch.float64)
    eager = reference.bfloat16()
    actual = eager.clone()
    actual[17] *= 1.1
    judged = check.judge(actual, eager, reference)
    assert judged.error <= judged.bound and not judged.right


def flash_attn_func(q, k, v, num_splits=1, return_attn_probs=False):
    """FlashAttention 3's interface: tokens before heads; lse [batch, heads, tokens]."""
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    out = (scores.softmax(-1) @ v).transpose(1, 2).contiguous()
    return (out, scores.logsumexp(-1)) if return_attn_probs else out


class Wrapper:
    """FlashInfer's MultiLevelCascadeAttentionWrapper, in the most obvious code."""

    def __init__(self, levels, workspace, layout):
        assert (levels, layout, workspace.dtype) == (2, "NHD", torch.uint8)

    def plan(self, starts, indptr, indices, last, heads, kv_heads, dim, page, *, q_data_type):
        assert (heads, kv_heads, dim, q_data_type) == (6, 3, 16, torch.float32)
        self.levels, self.page = list(zip(starts, indptr, indices, last, strict=True)), page
        assert all(t.dtype == torch.int32 for level in self.levels for t in level)

    def keys(self, level, token, pool):
        starts, indptr, indices, last = self.levels[level]
        row = int((starts <= token).sum()) - 1
        chosen = pool[indices[indptr[row] : indptr[row + 1]]].transpose(0, 1).flatten(1, 2)
        return chosen[:, : chosen.shape[1] - self.page + int(last[row])]

    def run(self, q, pool):
        group = q.shape[1] // pool.shape[3]
        out = torch.empty_like(q)
        for token in range(q.shape[0]):
            k, v = torch.cat([self.keys(level, token, pool) for level in (0, 1)], 1)
            k, v = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
            scores = (k @ q[token].unsqueeze(-1)).squeeze(-1) / q.shape[-1] ** 0.5
            out[token] = (scores.softmax(-1).unsqueeze(1) @ v).squeeze(1)
        return out


class LevelWrapper(Wrapper):
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper: one level, and its log2-sum-exp2."""

    def __init__(self, workspace, layout, *, backend):
        assert (layout, workspace.dtype, backend) == ("NHD", torch.uint8, "fa2")

    def plan(self, starts, indptr, indices, last, *sizes, q_data_type):
        super().plan([starts], [indptr], [indices], [last], *sizes, q_data_type=q_data_type)

    def run(self, q, pool, *, return_lse):
        assert return_lse
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for token in range(q.shape[0]):
            k, v = (t.repeat_interleave(2, 1).transpose(0, 1) for t in self.keys(0, token, pool))
            scores = (k @ q[token].unsqueeze(-1)).squeeze(-1) / q.shape[-1] ** 0.5
            out[token] = (scores.softmax(-1).unsqueeze(1) @ v).squeeze(1)
            lse[token] = scores.logsumexp(-1) / math.log(2)
        return out, lse


def merge_state_in_place(v, s, v_other, s_other):
    """FlashInfer's, of results [tokens, heads, D] with log2-sum-exp2 [tokens, heads]."""
    share = torch.sigmoid((s_other - s) * math.log(2)).unsqueeze(-1)
    v.lerp_(v_other, share)


@pytest.fixture
def installed(monkeypatch):
    """Packages of others by their interfaces, and no compiler."""
    flash3, flashinfer = types.ModuleType(peers.FLASH3[0]), types.ModuleType("flashinfer")
    flash3.flash_attn_func = flash_attn_func
    flashinfer.MultiLevelCascadeAttentionWrapper = Wrapper
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = LevelWrapper
    flashinfer.merge_state_in_place = merge_state_in_place
    for module in (flash3, flashinfer):
        module.__spec__ = types.SimpleNamespace()
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flashinfer_peer, "WORKSPACE", 64)
    monkeypatch.setattr(peers, "compiled", lambda function, backend="inductor": function)


@pytest.mark.parametrize("row", [ROW, Row(1, 4, 32, 1, 16), Row(3, 2, 17, 3, 1)], ids=str)
@pytest.mark.parametrize("name", [name for name in peers.NAMES if name != "kernel"])
def test_every_peer_computes_the_same(name, row, installed):
    (peer,) = (peer for peer in peers.PEERS if peer.name == name)
    cases = [contest.Case(given(needles, row)) for needles in (False, True)]
    found = contest.verdict(peer, cases)
    assert found.status == record.OK, found.reason
    assert peer.make(cases[0].inputs)().shape == cases[0].inputs.q.shape


def test_the_whole_path_is_rewritten_and_right():
    (peer,) = (peer for peer in peers.PEERS if peer.name == "cascade")
    torch._dynamo.reset()
    assert contest.verdict(peer, [contest.Case(given(needles=True))]).status == record.OK


INTERPRETED = """
import torch
from torch_cascade.benchmarks import contest, inputs, peers, rows
heads = rows.Heads(query=4, kv=2, dim=16, element=4)
drawn = inputs.draw(rows.Row(2, 3, 40, 2, 5), heads, torch.device("cpu"), torch.float32, 0)
cases = [contest.Case(drawn), contest.Case(inputs.with_needles(drawn))]
(kernel,) = (peer for peer in peers.PEERS if peer.name == "kernel")
print(contest.verdict(kernel, cases).status, kernel.make(drawn)().stride() == drawn.q.stride())
"""


def test_our_kernel_is_called_as_it_wants():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["ok", "True"], done.stderr[-2000:]


def test_what_is_missing_says_so(monkeypatch):
    by_name = {peer.name: peer for peer in peers.PEERS}
    assert by_name["kernel"].missing(CPU) == "needs a CUDA device, this is cpu"
    assert by_name["sdpa-expanded"].missing(CPU) is None
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    said = by_name["fa3-cascade"].missing(torch.device("cuda"))
    assert said == "fa3_fwd_interface or flash_attn_interface is not installed"


def test_wrong_and_failing_engines_are_not_timed(monkeypatch):
    def fail(message):
        def make(_inputs):
            raise RuntimeError(message)

        return make

    engines = (
        peers.Peer("ours", lambda i: lambda: peers.naive(*i.tensors())),
        peers.Peer("zero", lambda i: lambda: torch.zeros_like(i.q)),
        peers.Peer("full", fail("CUDA out of memory. Tried to allocate")),
        peers.Peer("broken", fail("first\nsecond")),
        peers.Peer("elsewhere", fail("never called"), cuda_only=True),
    )
    monkeypatch.setattr(contest.timing, "prepare", _as_called)
    results, prepared = contest.prepare(engines, contest.cases(given()), CPU)
    assert list(prepared) == ["ours"]
    assert {name: result.status for name, result in results.items()} == {
        "ours": record.OK,
        "zero": record.WRONG,
        "full": record.OUT_OF_MEMORY,
        "broken": record.FAILED,
        "elsewhere": record.MISSING,
    }
    assert results["broken"].reason == "RuntimeError: first"
    assert "error 1.0e+00" in results["zero"].reason


def _as_called(call):
    return contest.timing.Prepared(call, None)


def test_a_replay_that_leaves_something_unwritten_is_wrong():
    case = contest.Case(given())
    out = peers.naive(*case.inputs.tensors())
    complete = contest.timing.Prepared(lambda: out.copy_(case.eager), out)
    partial = contest.timing.Prepared(lambda: out[1:].copy_(case.eager[1:]), out)
    fine = record.Result(record.OK)
    assert contest.replayed(complete, case, fine) is fine
    assert contest.replayed(partial, case, fine).status == record.WRONG


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "1,2"], "B,T,L,S,X"),
        (["--engines", "magic"], "unknown engine 'magic'"),
        (["--repeat", "0"], "must be at least 1, got 0"),
        (["--flush", "hope"], "invalid choice: 'hope'"),
    ],
)
def test_mistakes_on_the_command_line(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        attention.main(options)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_what_it_needs(capsys):
    assert attention.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_the_whole_command_on_a_stand_in(tmp_path, monkeypatch, capsys, installed):
    """Everything but the device: the clock's figures are given."""
    given_us = {"cascade": [30.0, 20.0, 25.0], "sdpa-expanded": [200.0, 100.0, 300.0]}

    def timed(prepared, flush, repeat):
        assert flush.kind == "write" and repeat == 3 and set(prepared) == set(given_us)
        return {name: given_us[name] for name in prepared}

    monkeypatch.setattr(command, "cuda_device", lambda: CPU)
    monkeypatch.setattr(contest.timing, "FLUSH_BYTES", 64)
    monkeypatch.setattr(contest.timing, "prepare", _as_called)
    monkeypatch.setattr(contest.timing, "interleaved", timed)
    monkeypatch.setattr(ceilings, "measure", lambda *_: MEASURED)
    file = tmp_path / "run.json"
    options = ["--rows", "2,3,33,2,5", "1,2,40,1,3", "--repeat", "3", "--flush", "write"]
    engines = ["--engines", "sdpa-expanded,cascade,kernel"]
    assert attention.main([*options, *engines, "--json", str(file), "--no-plot"]) == 0
    content = json.loads(file.read_text())
    assert content["settings"]["flush"] == "write"
    assert [line["label"] for line in content["lines"]] == ["2,3,33,2,5", "1,2,40,1,3"]
    for line in content["lines"]:
        results = line["results"]
        assert results["kernel"]["status"] == "missing"
        assert results["cascade"]["time"]["median"] == 25.0
        assert results["sdpa-expanded"]["time"]["least"] == 100.0
        assert [v["right"] for v in results["cascade"]["details"]["verdicts"]] == [True, True]
    said = capsys.readouterr().out
    assert "kernel: missing at 2,3,33,2,5 1,2,40,1,3: needs a CUDA device" in said


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_whole_command(tmp_path):
    file = tmp_path / "numbers.json"
    options = ["--rows", "1,2,300,1,7", "--repeat", "3", "--engines", "sdpa-expanded,inductor"]
    assert attention.main([*options, "--json", str(file), "--no-plot"]) == 0
    (line,) = json.loads(file.read_text())["lines"]
    assert all(r["status"] == "ok" and r["time"]["count"] == 3 for r in line["results"].values())

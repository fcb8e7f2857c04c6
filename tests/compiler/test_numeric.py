"""`verify=numeric`: right rewrites are called right, wrong ones wrong, and the call is as ever."""

from __future__ import annotations

import html
import io
import json
import logging
import math
import re

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.lowering import fused_on_the_cpu
from support.shared_prefix import D, M, P, S, attention, inputs, joined, stack, unshared

import torch_cascade
from torch_cascade.compiler import numeric, numeric_run
from torch_cascade.compiler.backend import CascadeError
from torch_cascade.compiler.summary import Report
from torch_cascade.compiler.terminal import show
from torch_cascade.passes import cascade, emit, emit_merge

F32 = torch.float32


def run(fn=attention, args=None, dynamic=None, **options):
    """Compile with the check and call once; what was found, by site."""
    torch._dynamo.reset()
    options = {"verify": "numeric", "decide": "always", **options}
    with torch.no_grad():
        torch.compile(fn, backend=eager_cascade(**options), dynamic=dynamic)(*(args or inputs()))
    return [site.numeric for site in last_compilation().sites]


def by_hand(q, prefix, suffix):
    kv = joined(prefix, suffix)
    scores = q @ kv.mT / D**0.5 + torch.arange(P + S).to(q.dtype) / 99
    return torch.softmax(scores.float(), -1).to(q.dtype) @ kv


def masked(q, prefix, suffix):
    kv = joined(prefix, suffix)
    mask = torch.arange(P + S) <= torch.arange(M)[:, None] + P
    return torch.nn.functional.scaled_dot_product_attention(q, kv, kv, mask, scale=0.3).mT.relu()


@pytest.mark.parametrize("fn", [attention, by_hand, masked, stack(3)])
@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, False),
        (torch.float64, False),
    ],
)
def test_right_rewrites_are_right(fn, dtype, dynamic):
    found = run(fn, inputs(dtype=dtype), dynamic, strict=True)
    assert found and all(f is not None and not f.unchecked and not f.wrong for f in found)
    # Bounds are some roundings: of the dtype, where `by_hand` computes in float32, of that.
    coarsest = torch.promote_types(dtype, torch.float32) if fn is not by_hand else torch.float32
    eps = max(torch.finfo(dtype).eps, torch.finfo(coarsest).eps)
    assert all(0 <= f.error <= f.bound < 600 * eps for f in found)


def test_rows_that_see_no_key_are_compared():
    def fn(q, prefix, suffix):
        kv = joined(prefix, suffix)
        scores = (q @ kv.mT).masked_fill(torch.arange(M)[:, None] == 2, -math.inf)
        return torch.softmax(scores, -1) @ kv

    (found,) = run(fn, strict=True)
    assert not found.unchecked and not found.wrong and math.isfinite(found.error)


def scaled_wrong(emitter, site, part, q, scale, sizes, real=emit._attend):
    return real(emitter, site, part, q, (scale or D**-0.5) * 1.001, sizes)


def less_precise(emitter, plan, parts, real=emit_merge.merged):
    """A merge of partial results that were rounded to bfloat16 on the way."""
    convert = torch.ops.prims.convert_element_type.default

    def short(node):
        return emitter.call(convert, emitter.call(convert, node, torch.bfloat16), torch.float32)

    rounded = [emit_merge.Partial(short(p.out), p.lse, p.mask) for p in parts]
    return real(emitter, plan, rounded)


def without_suffix(site, found, reader, sizes, real=cascade.plan):
    return real(site, found[:1], reader, sizes)


def not_a_number(emitter, plan, parts, real=emit_merge.merged):
    out, lse = real(emitter, plan, parts)
    return emitter.call(torch.ops.aten.div.Scalar, out, 0.0), lse


WRONG = {
    "the scale": (emit, "_attend", scaled_wrong),
    "a rounding to bfloat16": (emit, "merged", less_precise),
    "a segment is lost": (cascade, "plan", without_suffix),
    "infinities": (emit, "merged", not_a_number),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rewrites_are_wrong(name, monkeypatch, caplog):
    monkeypatch.setattr(*WRONG[name])
    args = inputs()
    with caplog.at_level(logging.WARNING, "torch_cascade"):
        (found,) = run(args=args)
    assert found.wrong and found.error > found.bound
    (warning,) = [r.getMessage() for r in caplog.records if "wrong result" in r.getMessage()]
    assert "wrong result of the attention sdpa at " in warning
    assert "shared_prefix.py" in warning and "return sdpa(q, kv, kv)" in warning
    assert f"error {found.error:.2g}" in warning and f"may be {found.bound:.2g}" in warning
    with pytest.raises(CascadeError) as caught:
        run(args=args, strict=True)
    assert str(caught.value) == f"strict: {warning}"


def test_a_wrong_site_does_not_make_those_below_it_wrong(monkeypatch):
    calls = []

    def once(*args):
        calls.append(args)
        return (less_precise if len(calls) == 3 else emit_merge.merged)(*args)

    monkeypatch.setattr(emit, "merged", once)  # the last site is emitted first
    assert [found.wrong for found in run(stack(3))] == [True, False, False]


def test_the_report_has_it(monkeypatch):
    run(stack(3))
    report = torch_cascade.last_report()
    (graph,) = json.loads(report.to_json())["graphs"][-1:]
    worst = max((site["numeric"] for site in graph["sites"]), key=lambda n: n["error"] / n["bound"])
    assert worst["wrong"] is False and worst["unchecked"] == ""
    assert f"numeric: right, error {worst['error']:.2g} against float64" in str(report)
    monkeypatch.setattr(*WRONG["infinities"])
    run()
    assert (
        json.loads(torch_cascade.last_report().to_json())["graphs"][-1]["sites"][0]["numeric"][
            "error"
        ]
        is None
    )
    assert "numeric: WRONG, error inf" in str(torch_cascade.last_report())


def test_explain_makes_the_check_too():
    compiled = torch.compile(
        attention, backend="cascade", options={"verify": "numeric", "decide": "always"}
    )
    report = torch_cascade.explain(compiled, *inputs())
    assert not report.sites[0].numeric.wrong and not report.sites[0].numeric.unchecked


def test_the_dump_has_it(tmp_path):
    run(dump=str(tmp_path))
    graph = json.loads((tmp_path / "report.json").read_text())["graphs"][0]
    assert graph["sites"][0]["numeric"]["wrong"] is False


def test_only_the_first_call_is_checked(monkeypatch):
    made = []

    class Counted(numeric_run.Original):
        def __init__(self, *args):
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(numeric, "Original", Counted)
    torch._dynamo.reset()
    backend = eager_cascade(verify="numeric", decide="always")
    compiled, args = torch.compile(attention, backend=backend), inputs()
    for _ in range(3):
        torch.testing.assert_close(compiled(*args), attention(*args))
    assert len(made) == 1


def test_inputs_that_are_written_are_written_once():
    def fn(q, prefix, suffix):
        out = attention(q, prefix, suffix)
        suffix.mul_(2)
        prefix[:, :, 0] += 1
        return out

    args, twins = inputs(), None
    twins = [x.clone() for x in args]
    (found,) = run(fn, args)
    assert not found.unchecked and not found.wrong
    fn(*twins)
    torch.testing.assert_close(args, twins)


def test_random_numbers_are_those_without_the_check():
    def fn(q, prefix, suffix):
        return attention(q + torch.rand_like(q), prefix, suffix)

    drawn = []
    for verify in ("1", "numeric"):
        args = [torch.ones_like(x) for x in inputs()]
        torch.manual_seed(3)
        run(fn, args, verify=verify)
        drawn.append(torch.rand(2))
    assert torch.equal(*drawn)
    (site,) = last_compilation().sites
    assert not site.numeric.unchecked and not site.numeric.wrong


def test_a_site_that_is_declined_has_no_numbers():
    assert run(unshared) == [None]
    assert run(decide="never") == [None]


def test_a_graph_with_cached_keys_and_values_is_not_checked():
    def fn(q, prefix, suffix):
        fresh = torch.tensor([[S - 1]]).expand(suffix.shape[0], 1)
        k, v = torch_cascade.reuse_kv(suffix, suffix, suffix.sin(), suffix.cos(), fresh)
        return attention(q, prefix, suffix), k + v

    (found,) = run(fn)
    assert "approximation by design" in found.unchecked and not found.wrong
    assert "not compared with the original" in str(torch_cascade.last_report())


def test_a_check_that_fails_is_said(monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr(numeric_run, "_compared", fail)
    with caplog.at_level(logging.WARNING, "torch_cascade"):
        (found,) = run()
    assert found.unchecked == "RuntimeError: no memory" and not found.wrong
    assert "not compared with the original: RuntimeError" in str(torch_cascade.last_report())
    assert any("the numeric check failed" in r.getMessage() for r in caplog.records)
    with pytest.raises(CascadeError, match="strict: the numeric check failed: no memory"):
        run(strict=True)


def test_equal_sites_that_are_joined_are_both_compared():
    def twice(q, prefix, suffix):
        return attention(q, prefix, suffix) - 2 * attention(q, prefix, suffix)

    found = run(twice)
    assert len(found) == 2 and not any(f.unchecked or f.wrong for f in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [False, True])
def test_one_kernel_that_does_more_is_compared_behind_it(dtype, wrong, monkeypatch):
    """As on a GPU: the kernel also writes the user's layout, which is where it is looked at."""

    def fn(q, prefix, suffix):
        return attention(q, prefix, suffix).transpose(1, 2).contiguous() + 1

    if wrong:
        monkeypatch.setattr(*WRONG["the scale"])
    with fused_on_the_cpu() as stand_in:
        (found,) = run(fn, inputs(dtype=dtype))
    assert {call["order"] for call in stand_in.calls} == {(0, 2, 1, 3)}
    assert not found.unchecked and found.wrong == (wrong and dtype == torch.float32)


def test_the_artefact_is_not_cached(tmp_path, monkeypatch):
    """A warm artefact has no graphs to compare: the passes run each time."""
    from torch._inductor.utils import fresh_cache

    args = inputs()
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            options = {"verify": "numeric", "decide": "always"}
            compiled = torch.compile(attention, backend="cascade", options=options)
            torch.testing.assert_close(compiled(*args), attention(*args))
            record = last_compilation()
            assert not record.cached and not record.sites[0].numeric.wrong
            assert not record.sites[0].numeric.unchecked


def test_page_and_terminal_say_it_once_for_layers_that_are_alike():
    found = run(stack(3))
    said = f"numeric: {max(found, key=lambda f: f.error / f.bound)}"
    report = Report((last_compilation(),))
    text = html.unescape(report.html())
    assert said in text and text.count("numeric: ") == len(kinds(report))

    pytest.importorskip("rich")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    show(report, file=terminal)
    assert terminal.getvalue().count("numeric: ") == len(kinds(report))


def kinds(report):
    """The blocks of the report: a layer like another has none of its own."""
    return re.findall(r"^\+ ", str(report), re.MULTILINE)

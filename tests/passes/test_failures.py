"""A bug of a pass costs the site it was at, is warned of once, and with strict is raised."""

from __future__ import annotations

import logging

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.shared_prefix import attention, inputs, stack
from support.tolerance import assert_close_to_reference
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from torch_cascade.compiler import capture_rules
from torch_cascade.compiler.report import Reason
from torch_cascade.passes import attention as finder
from torch_cascade.passes import cascade, eager_attention, emit, inline
from torch_cascade.passes.failures import Failures

LAYERS = stack(3)


def failing(function, *at):
    """`function`, but raising at the given calls (all for none)."""
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if not at or len(calls) in at:
            raise RuntimeError("broken on purpose\nwith details")
        return function(*args, **kwargs)

    return fail


def run(fn=LAYERS, **options):
    """Compile and call; the result must be right, and the graph what its metadata says."""
    args = inputs()
    actual = torch.compile(fn, backend=eager_cascade(verify=True, **options))(*args)
    assert_close_to_reference(actual, fn(*args), fn(*(x.double() for x in args)))
    return last_compilation()


# Where a pass can break: module, name, the call that fails, and the sites that it costs.
PLACES = {
    "reading a site": (finder, "sdpa_site", 2, [1]),
    "finding": (cascade, "find_attention", 1, None),
    "segments": (cascade, "resolve", 1, [0]),
    "planning": (cascade, "plan", 3, [2]),
    "deciding": (cascade, "decide", 2, [1]),
    "words": (cascade, "describe_segment", 5, [2]),
    "emitting, before anything": (cascade, "emit_cascade", 1, [2]),  # the last is emitted first
    "emitting, half way": (emit, "_attend", 2, [2]),
    "emitting, nearly done": (emit, "laid_out", 2, [1]),
}


@pytest.mark.parametrize("place", PLACES)
def test_other_sites_go_on(place, monkeypatch, caplog):
    module, name, call, cost = PLACES[place]
    monkeypatch.setattr(module, name, failing(getattr(module, name), call))
    record = run()
    refused = [site.declined for site in record.sites if not site.rewritten]
    assert [d.reason for d in refused] == [Reason.PASS_FAILED]
    assert refused[0].detail == "RuntimeError: broken on purpose"
    if cost is None:
        assert len(record.sites) == 1
    else:
        assert [i for i, site in enumerate(record.sites) if not site.rewritten] == cost
        assert record.rewritten == 2
        assert record.after.count("= cascade.attend(") == 4 and "cascade.sdpa(" in record.after
    assert counters["cascade"]["declined.pass-failed"] == 1
    (warned,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    said = warned.getMessage()
    assert said.startswith("pass cascade failed 1 time(s), first at ")
    assert "RuntimeError: broken on purpose" in said and "with details" not in said
    assert warned.exc_info[0] is RuntimeError  # the traceback, for the bug report
    assert cost is None or "shared_prefix.py" in said


def test_one_warning_for_all_sites_and_the_graph_stays_as_it_was(monkeypatch, caplog):
    monkeypatch.setattr(emit, "merged", failing(emit.merged))
    record = run()
    assert record.rewritten == 0 and record.before == record.after
    (warned,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "failed 3 time(s)" in warned.getMessage()


def test_hand_written_attention_that_breaks_the_matcher(monkeypatch):
    def by_hand(q, prefix, suffix):
        return torch.softmax(q @ suffix.mT, -1) @ suffix

    broken = failing(eager_attention.eager_site)
    monkeypatch.setattr(eager_attention, "eager_site", broken)
    (site,) = run(by_hand).sites
    assert site.declined.reason is Reason.PASS_FAILED and "test_failures.py" in site.where


def test_capture_that_breaks_captures_nothing(monkeypatch, caplog):
    monkeypatch.setattr(capture_rules, "legal_call", failing(capture_rules.legal_call, 2))
    record = run()
    assert [site.declined.reason for site in record.sites] == [Reason.PASS_FAILED]
    assert "cascade.sdpa" not in record.before
    assert any(r.getMessage().startswith("capture failed 1 time(s)") for r in caplog.records)


@pytest.mark.parametrize("name", ["plan", "emit_cascade", "find_attention"])
def test_strict_raises_it(name, monkeypatch):
    monkeypatch.setattr(cascade, name, failing(getattr(cascade, name)))
    with pytest.raises(BackendCompilerFailed, match="RuntimeError: broken on purpose"):
        run(strict=True)


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [(finder, "sdpa_site", 2), (capture_rules, "legal_call", 2), (emit, "merged", 1)],
)
def test_strict_raises_also_where_other_sites_were_fine(module, name, call, monkeypatch):
    monkeypatch.setattr(module, name, failing(getattr(module, name), call))
    with pytest.raises(BackendCompilerFailed, match="RuntimeError: broken on purpose"):
        run(strict=True)


def test_strict_raises_what_breaks_the_matcher(monkeypatch):
    def by_hand(q, prefix, suffix):
        return torch.softmax(q @ suffix.mT, -1) @ suffix

    monkeypatch.setattr(eager_attention, "eager_site", failing(eager_attention.eager_site))
    with pytest.raises(BackendCompilerFailed, match="RuntimeError: broken on purpose"):
        run(by_hand, strict=True)


def test_lowering_that_breaks_is_an_error(monkeypatch):
    """The ops it leaves behind would be run one by one, at best."""
    monkeypatch.setattr(inline, "trace", failing(inline.trace))
    with pytest.raises(BackendCompilerFailed, match="RuntimeError: broken on purpose"):
        run(attention)


def test_code_generation_that_breaks_is_not_ours_to_hide(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", failing(None))
    with pytest.raises(BackendCompilerFailed, match="RuntimeError: broken on purpose"):
        run(attention)


def test_a_failure_without_words_has_its_type():
    failures = Failures(strict=False)
    declined = failures.guarded(None, lambda: next(iter(())))
    assert declined.detail == "StopIteration" and declined.node == ""
    with pytest.raises(KeyboardInterrupt):
        failures.guarded(None, failing_with(KeyboardInterrupt))


def failing_with(error):
    def fail():
        raise error

    return fail

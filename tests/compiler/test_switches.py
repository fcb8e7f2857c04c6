"""Every variable of the table of options, from the environment to what the backend does."""

from __future__ import annotations

import re

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.shared_prefix import attention, inputs, unshared
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from torch_cascade.compiler import pipeline
from torch_cascade.compiler.backend import CascadeError
from torch_cascade.compiler.report import Reason
from torch_cascade.passes.cascade import CascadePass
from torch_cascade.passes.verify import GraphError


def switch(monkeypatch, name, value):
    monkeypatch.setenv(f"TORCH_CASCADE_{name}", value)


def run(fn=attention, args=None, **options):
    """Compile and call; the record."""
    torch._dynamo.reset()
    torch.compile(fn, backend=eager_cascade(**options))(*(args or inputs()))
    return last_compilation()


def raised_by(fn=attention, args=None):
    with pytest.raises(BackendCompilerFailed) as caught:
        run(fn, args)
    assert isinstance(caught.value.inner_exception, CascadeError)
    return str(caught.value.inner_exception)


# --- DISABLE and PASSES ---------------------------------------------------------------------------


def code(backend):
    """The code Inductor generates for attention over a shared prefix."""
    torch._dynamo.reset()
    _, sources = run_and_get_code(torch.compile(attention, backend=backend), *inputs())
    return [re.sub(r"#.*|cpp_fused\w*", "", source) for source in sources]


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [("DISABLE", "1", set()), ("PASSES", "none", {"capture", "lower"})],
)
def test_without_a_pass_the_code_is_that_of_inductor(name, value, seconds, monkeypatch):
    switch(monkeypatch, name, value)
    assert code("cascade") == code("inductor") != []
    record = last_compilation()
    assert record.sites == [] and not counters["cascade"]
    assert set(record.seconds) - {"cleanup"} == seconds
    assert getattr(record.options, name.lower()) in (True, ())


# --- DECIDE and GUARDS ----------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "pays"), [(3, False), (90, True)])
def test_decide(prefix, pays, monkeypatch):
    args = inputs(prefix)
    assert run(attention, args).rewritten == pays
    switch(monkeypatch, "DECIDE", "always")
    assert run(attention, args).rewritten == 1
    switch(monkeypatch, "DECIDE", "never")
    (site,) = run(attention, args).sites
    assert site.declined.reason is Reason.NEVER and len(site.segments) == 2
    assert (site.decision.cascade < site.decision.naive) == pays
    assert run(attention, args, decide="always").rewritten == 1, "an option beats its variable"


def test_guards(monkeypatch):
    def decision():
        args = inputs(90)
        torch._dynamo.mark_dynamic(args[1], 2)
        return run(attention, args).sites[0].decision

    assert decision().apply and decision().guard
    switch(monkeypatch, "GUARDS", "never")
    assert decision().apply and not decision().guard


# --- STRICT ---------------------------------------------------------------------------------------


def test_strict_is_an_error_where_nothing_was_rewritten(monkeypatch):
    switch(monkeypatch, "STRICT", "1")
    assert run().rewritten == 1
    said = raised_by(unshared)
    assert said.startswith("strict: none of 1 attention sites was rewritten: no-shared-prefix at ")
    assert raised_by(torch.cos, inputs()[:1]) == "strict: no attention was found in the graph"
    q, prefix, suffix = inputs()
    training = [q.requires_grad_(), prefix, suffix]
    assert "requires-grad" in raised_by(attention, training)
    assert "compiled for training" in raised_by(lambda q: q @ q.mT, training[:1])
    switch(monkeypatch, "PASSES", "none")
    assert "no pass was to run (passes=none)" in raised_by()
    switch(monkeypatch, "DISABLE", "1")
    assert run(unshared).sites == []


@pytest.mark.parametrize(
    ("options", "prefix", "said"),
    [
        ({"decide": "never"}, 90, "none of 1 attention sites was rewritten: decide-never at "),
        ({"passes": "cascade{decide=never}"}, 90, "decide-never at "),
        ({}, 3, "none of 1 attention sites was rewritten: not-profitable at "),
        ({"passes": "blend"}, 90, "no attention was found in the graph"),
    ],
)
def test_strict_is_an_error_whatever_the_reason(options, prefix, said):
    with pytest.raises(BackendCompilerFailed) as caught:
        run(attention, inputs(prefix), strict=True, **options)
    assert isinstance(caught.value.inner_exception, CascadeError)
    assert said in str(caught.value.inner_exception)


def test_strict_is_content_with_one_rewritten_attention():
    def both(q, prefix, suffix):
        return attention(q, prefix, suffix) + unshared(q, prefix, suffix)

    record = run(both, strict=True)
    assert (record.rewritten, len(record.sites)) == (1, 2)


def test_what_strict_refused_is_counted_and_recorded(monkeypatch):
    switch(monkeypatch, "STRICT", "1")
    raised_by(unshared)
    assert counters["cascade"] == {"sites": 1, "declined.no-shared-prefix": 1}
    assert last_compilation().sites[0].declined.reason is Reason.NO_SHARED_PREFIX


# --- VERIFY ---------------------------------------------------------------------------------------


def test_verify_finds_a_graph_that_is_not_what_it_says(monkeypatch):
    def spoil(self, graph, context):
        (node,) = (n for n in graph.nodes if "sdpa" in n.name)
        node.meta["val"] = node.meta["val"].double()

    monkeypatch.setattr(CascadePass, "apply", spoil)
    run()
    switch(monkeypatch, "VERIFY", "1")
    with pytest.raises(BackendCompilerFailed, match="after pass cascade: node") as caught:
        run()
    assert isinstance(caught.value.inner_exception, GraphError)


def test_verify_looks_after_every_pass(monkeypatch):
    looked = []
    monkeypatch.setattr(pipeline, "check_graph", lambda graph, after, earlier: looked.append(after))
    run()
    assert looked == []
    switch(monkeypatch, "VERIFY", "1")
    run()
    assert looked == ["cascade", "blend", "linears", "lower", "cleanup"]


# --- counters -------------------------------------------------------------------------------------


def test_counters():
    def both(q, prefix, suffix):
        rest = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return attention(q, prefix, suffix) + unshared(q, prefix, suffix) + rest

    run(both)
    run(attention)
    assert counters["cascade"] == {
        "sites": 4,
        "rewritten": 2,
        "declined.dropout": 1,
        "declined.no-shared-prefix": 1,
    }

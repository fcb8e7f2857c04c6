"""explain and last_report: what is said, and that saying it changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.backend import eager_cascade
from support.shared_prefix import (
    B,
    D,
    H,
    P,
    S,
    T,
    attention,
    inputs,
    joined,
    sdpa,
    stack,
    unshared,
)
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cascade
from torch_cascade.compiler import backend, summary
from torch_cascade.compiler.journal import Journal, Place
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.record import Compilation, SiteRecord
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.compiler.text import alike

explain = torch_cascade.explain
HERE = Path(__file__).name


def flat(text: object) -> str:
    """A report without its line breaks."""
    return " ".join(str(text).split())


# --- what is said ---------------------------------------------------------------------------------


def test_a_site_its_segments_and_the_decision():
    report = explain(attention, *inputs())
    (site,) = report.sites
    assert report.rewritten == 1 and site.rewritten
    assert re.fullmatch(r".*shared_prefix\.py:\d+: return sdpa\(q, kv, kv\)", site.where)
    assert [(s.keys, s.rows, s.branches, s.mask) for s in site.segments] == [
        (f"[0, {P})", f"n // {T}", str(T), "all visible"),
        (f"[{P}, {P + S})", "n", "1", "all visible"),
    ]
    assert f"[{B}, {H}, {P}, {D}]" in site.segments[0].base
    assert site.decision.naive == B * T * H * 2 * 4 * D * (P + S)
    assert flat(report).startswith(
        "torch_cascade: 1 of 1 attention sites rewritten (1 graph; the p"
    )
    for said in (
        site.where,
        site.shapes,
        site.segments[0].base,
        "shared by 4 branches",
        "decide=auto",
    ):
        assert said in flat(report)


def test_names_in_a_site_are_those_in_the_graphs():
    report = explain(attention, *inputs())
    (site,) = report.sites
    (line,) = [x for x in report.before.splitlines() if x.startswith(f"%{site.node}:")]
    assert "cascade.sdpa(" in line and f"-{line}" in report.diff()
    base = site.segments[0].base.split()[0]
    assert re.search(rf"= cascade\.attend\(.*%{base}, %{base}, .*branches={T}", report.after)
    assert "cascade.sdpa" not in report.after and "expand" not in report.after
    assert "+%merge" in report.diff() and "repeat" not in report.diff(0)


def test_layers_that_are_alike_are_one_block():
    report = explain(stack(3), *inputs())
    assert report.rewritten == len(report.sites) == 3
    assert str(report).count("q = q + sdpa(q.sin(), kv, kv)") == 1
    assert re.search(r"^\+ 3 x .*shared_prefix.py", str(report), re.MULTILINE)


def mixed(q, prefix, suffix):
    o = attention(q, prefix, suffix)
    torch._dynamo.graph_break()
    o = sdpa(o, suffix, suffix, dropout_p=0.25) + sdpa(q, suffix, suffix)
    torch._dynamo.graph_break()
    return o.cos()


def test_graph_breaks_make_several_graphs_and_declines_are_grouped():
    report = explain(mixed, *inputs())
    assert report.sites[0].rewritten
    reasons = [site.declined.reason for site in report.sites[1:]]
    assert reasons == [Reason.DROPOUT, Reason.NO_SHARED_PREFIX]  # dropout once, not twice
    assert len(report.compilations) == 3
    said = flat(report)
    assert "1 of 3 attention sites rewritten (3 graphs" in said
    assert "Graph 0/0: 1 of 1" in said and "Graph 1/0: 0 of 2" in said
    assert "Without attention: graph 2/0" in said
    assert "Not rewritten: dropout (1). The attention drops probabilities at random." in said
    assert "What you can do: Call `model.eval()`" in said
    heads = [line for line in report.before.splitlines() if line.startswith("#")]
    assert heads == ["# graph 0/0", "# graph 1/0", "# graph 2/0"]
    assert max(map(len, str(report).splitlines())) <= 100 + len(str(Path(__file__).parent))


def test_a_call_that_the_backend_takes_apart_is_one_site_with_its_rewrite():
    def pinned(q, prefix, suffix):
        with sdpa_kernel(SDPBackend.MATH):
            return attention(q, prefix, suffix)

    report = explain(pinned, *inputs())
    assert [site.form for site in report.sites] == ["eager"] and report.rewritten == 1


def test_no_attention_no_graph_nothing_to_do(monkeypatch):
    def plain(x):
        return x.cos()

    assert "no attention was found (1 graph" in flat(explain(plain, torch.ones(3)))
    assert "no graph was compiled" in flat(explain(lambda x: x, torch.ones(3)))
    monkeypatch.setenv("TORCH_CASCADE_PASSES", "none")
    assert "no pass was to run (passes=none" in flat(explain(attention, *inputs()))
    monkeypatch.setenv("TORCH_CASCADE_DISABLE", "1")
    said = flat(explain(attention, *inputs()))
    assert "plain Inductor, as disable is set (TORCH_CASCADE_DISABLE)" in said
    assert "disable=1 passes=none" in said


def by_hand(q, prefix, suffix):
    kv = joined(prefix, suffix)
    return torch.softmax(q @ kv.mT / 4, -1) @ kv


@pytest.mark.parametrize(("fn", "sites"), [(attention, 1), (by_hand, 0)])
def test_training_says_no_grad(fn, sites):
    q, prefix, suffix = inputs()
    q.requires_grad_()
    report = explain(fn, q, prefix, suffix)
    assert report.compilations[0].training and len(report.sites) == sites
    assert "torch.no_grad()" in flat(report) and report.rewritten == 0
    with torch.no_grad():
        assert explain(fn, q, prefix, suffix).rewritten == 1


def test_symbolic_sizes_and_their_guard():
    q, prefix, suffix = inputs()
    torch._dynamo.mark_dynamic(prefix, 2)
    report = explain(attention, q, prefix, suffix)
    (site,) = report.sites
    assert re.fullmatch(r"\[0, s\d+\)", site.segments[0].keys)
    assert site.decision.guard and f"guard: {site.decision.guard}" in flat(report)


# --- what it does ---------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("written", torch.zeros(2))

    def forward(self, q, prefix, suffix, *, fn=attention):
        self.calls += 1
        self.written.add_(1)
        return fn(q, prefix, suffix)


def test_the_call_is_made_once_and_no_code_is_generated(monkeypatch):
    def generate(*args, **kwargs):
        raise AssertionError("code generation")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", generate)
    model = Counting()
    report = explain(model, *inputs(), fn=attention)
    assert model.written.tolist() == [1, 1] and model.calls == 1 and report.rewritten == 1


def test_a_compiled_module_is_explained_with_its_own_options():
    model = Counting()
    compiled = torch.compile(model, backend="cascade", options={"decide": "never"})
    report = explain(compiled, *inputs())
    assert report.compilations[0].options == Options(decide="never")
    assert [site.declined.reason for site in report.sites] == [Reason.NEVER]
    assert "decide=never" in flat(report)
    dynamic = explain(torch.compile(model, dynamic=True), *inputs())
    assert dynamic.compilations[0].options == Options()
    assert "s" in dynamic.sites[0].segments[0].keys


@pytest.mark.parametrize("how", ["function", "bound method", "module.compile()", "forward"])
def test_options_of_what_is_no_compiled_module_count_too(how):
    never = {"backend": "cascade", "dynamic": True, "options": {"decide": "never"}}
    model = Counting()
    if how == "function":
        compiled = torch.compile(attention, **never)
    elif how == "bound method":
        compiled = torch.compile(model.forward, **never)
    elif how == "forward":
        model.forward = torch.compile(model.forward, **never)
        compiled = model
    else:
        model.compile(**never)
        compiled = model
    report = explain(compiled, *inputs())
    assert report.compilations[0].options == Options(decide="never")
    assert [site.declined.reason for site in report.sites] == [Reason.NEVER]
    assert "s" in report.sites[0].segments[0].keys


def test_a_decorated_method_keeps_its_options_and_its_module():
    class Model(torch.nn.Module):
        @torch.compile(backend="cascade", options={"decide": "never"})
        def forward(self, *args):
            return attention(*args)

    model = Model()
    for compiled in (model, model.forward):
        (site,) = explain(compiled, *inputs()).sites
        assert site.declined.reason is Reason.NEVER


def test_what_was_compiled_by_other_backends_is_explained_by_this_one():
    def other(gm, inputs):
        raise AssertionError("another backend")

    model = Counting()
    model.compile(backend=other)
    assert explain(model, *inputs()).rewritten == 1
    assert explain(torch.compile(attention, backend=other), *inputs()).rewritten == 1


def test_it_leaves_no_trace(monkeypatch):
    before = torch_cascade.last_report().compilations
    monkeypatch.setenv("TORCH_CASCADE_STRICT", "1")  # an error for those who compile
    assert explain(unshared, *inputs()).rewritten == 0
    assert not counters["cascade"]
    assert torch_cascade.last_report().compilations == before


def test_it_may_be_asked_any_number_of_times():
    def fn(x):
        return x.cos()

    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert len(explain(fn, torch.ones(3)).compilations) == 1


def test_caches_do_not_hide_the_passes(monkeypatch):
    on = {"fx_graph_cache": True, "autotune_local_cache": False}
    with torch._inductor.config.patch(on):
        assert all(explain(attention, *inputs()).rewritten == 1 for _ in range(2))


def test_a_compilation_that_starts_again_shows_once(monkeypatch):
    class Scaled(torch.nn.Module):
        def forward(self, q, prefix, suffix, factor):
            kv = joined(prefix, suffix)
            return sdpa(q, kv, kv, scale=factor)

    capture, calls = backend._capture, []
    monkeypatch.setattr(backend, "_capture", lambda *a: (calls.append(a), capture(*a))[1])
    report = explain(torch.compile(Scaled(), dynamic=True), *inputs(), 2.5)
    assert len(calls) == 2, "Dynamo no longer starts again: find another program"
    assert len(report.compilations) == 1 and report.rewritten == 1


# --- the journal ----------------------------------------------------------------------------------


def record(*reasons):
    declined = [None if r is None else Declined(r, "node") for r in reasons]
    return Compilation(sites=[SiteRecord("node", "", declined=d) for d in declined])


@pytest.fixture
def attempts(monkeypatch):
    """Adds records to a counted journal at (context, attempt)."""
    journal = Journal(3, counted=True)

    def add(context, attempt, *reasons):
        monkeypatch.setattr(Place, "current", lambda: Place(context, attempt, str(context)))
        journal.add(record(*reasons))
        return [r.compile_id for r in journal.records]

    return add


def test_a_later_attempt_takes_the_place_of_the_one_before(attempts):
    attempts("a", 0, None)
    attempts("b", 0, None, Reason.DROPOUT)
    assert attempts("b", 1, Reason.DROPOUT, Reason.RANK) == ["a", "b"]
    assert {k: n for k, n in counters["cascade"].items() if n} == {
        "sites": 3,
        "rewritten": 1,
        "declined.dropout": 1,
        "declined.rank": 1,
    }


def test_graphs_of_one_attempt_are_kept_apart_and_old_ones_forgotten(attempts):
    attempts("a", 1)
    assert attempts("a", 1) == ["a", "a"]
    assert attempts(None, 0) == ["a", "a", "None"]
    assert attempts(None, 1) == ["a", "None", "None"]
    assert attempts("a", 0) == ["None", "None", "a"]


# --- last_report ----------------------------------------------------------------------------------


def test_last_report_shows_what_was_compiled():
    seen = len(torch_cascade.last_report().compilations)
    assert seen < 64
    torch.compile(attention, backend=eager_cascade())(*inputs())
    last = torch_cascade.last_report().compilations[seen:]
    assert [r.rewritten for r in last] == [1] and last[0].total_seconds > 0
    assert counters["cascade"] == {"sites": 1, "rewritten": 1}


CACHED = """
import torch, torch_cascade
for _ in range(2):
    torch._dynamo.reset()
    torch.compile(lambda x: x @ x, backend="cascade")(torch.ones(3, 3))
print(torch_cascade.last_report())
"""


def test_caches_and_logs_in_a_process_of_its_own(tmp_path):
    """`TORCH_LOGS` is read when torch is imported, and so are the switches of its caches."""
    given = {k: v for k, v in os.environ.items() if not k.endswith("_CACHE")}
    given |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCH_LOGS": "+torch_cascade"}
    command = [sys.executable, "-c", CACHED]
    run = subprocess.run(command, capture_output=True, text=True, env=given, check=True)
    said = flat(run.stdout)
    assert "no attention was found (2 graphs" not in said  # one is from a cache: they differ
    assert "Graph 0/0: no attention was found\n" in run.stdout
    assert "Graph 0/0: no attention was found; from the cold compile of 20" in said
    assert re.search(r"^V.*pipeline\.py:\d+\] .*cascade: \d+\.\d ms$", run.stderr, re.MULTILINE)
    assert "graph 0/0: 0 of 0 attention sites rewritten" in run.stderr
    assert "graph 0/0 came from Inductor's cache: the passes did not run; from the" in run.stderr


# --- JSON -----------------------------------------------------------------------------------------


def test_json_has_what_its_documentation_says_and_what_the_text_says():
    report = explain(mixed, *inputs())
    content = json.loads(report.to_json())
    assert content["version"] == 1 and (content["sites"], content["rewritten"]) == (3, 1)
    graph = content["graphs"][0]
    site = graph["sites"][0]
    documented = re.findall(r"^ {4,12}(\w+)\??  +\S", summary.__doc__, re.MULTILINE)
    of_blend = {"layers", "reused", "ahead", "stages"}
    of_dump = {"folder", "notes"}  # `test_dump.py` has them
    assert {*documented} == {*content, *graph, *site, *of_blend, *of_dump}
    assert graph["blend"] is None
    assert graph["options"]["decide"] == "auto" and graph["seconds"]["total"] > 0
    assert (graph["before"], graph["after"]) == (
        report.compilations[0].before,
        report.compilations[0].after,
    )
    assert {*site["segments"][0]} == {"keys", "base", "rows", "branches", "mask"}
    numbers = {"naive_bytes", "cascade_bytes", "guard", "costs"}
    assert {*site["decision"]} == {"apply", "why", *numbers}
    costs = site["decision"]["costs"]
    assert {*costs} == {"device", "seconds", "formulas", "numbers", "break_even", "map"}
    assert costs["device"] in flat(report) and costs["numbers"]["N"] == str(B * T)
    assert {*costs["seconds"]} == {*costs["formulas"]} == {"plain", "cascade"}
    for line in costs["formulas"]["plain"] + costs["formulas"]["cascade"]:
        assert " ".join(line.split()) in flat(report)
    refused = content["graphs"][1]["sites"][0]
    assert refused["declined"]["reason"] == "dropout" and not refused["rewritten"]
    assert {*refused["declined"]} == {"reason", "meaning", "detail", "hint"}
    assert HERE in refused["where"]


# --- pieces ---------------------------------------------------------------------------------------


def test_alike_keeps_what_differs_between_symbols():
    assert alike("cat_2 [s5, s7]") == alike("cat [s7, s9]") == "cat [s#0, s#1]"
    assert alike("cat_2 [s5, s5]") != alike("cat_2 [s5, s7]")
    assert alike("[8, 3, 5]") != alike("[8, 3, 6]")
    assert alike("arg3_1") == alike("arg12_1") != alike("cat_1")


def test_public_names_load_on_first_use_and_no_others_exist():
    assert {*torch_cascade.__all__, "__version__"} <= {*dir(torch_cascade)}
    assert re.fullmatch(r"\d+\.\d+\.\d+", torch_cascade.__version__)
    with pytest.raises(AttributeError, match="'torch_cascade' has no attribute 'explane'"):
        _ = torch_cascade.explane


@pytest.mark.parametrize("wanted", ["SharedPrefixCache", "BlendCache", "ChunkStore"])
def test_a_missing_extra_is_one_line(monkeypatch, wanted):
    for name in [*sys.modules]:
        if name.startswith(("transformers", "torch_cascade.runtime")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(vars(torch_cascade), wanted, raising=False)
    with pytest.raises(ImportError) as caught:
        getattr(torch_cascade, wanted)
    assert str(caught.value) == f"{wanted} needs transformers: pip install 'torch-cascade[hf]'"


def test_what_cannot_be_called_is_an_error_that_names_the_argument():
    with pytest.raises(TypeError, match="fn must be a function or a module, got str"):
        torch_cascade.explain("abc")

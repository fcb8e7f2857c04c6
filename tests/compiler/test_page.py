"""`report.html`: well formed, escaped, complete, loads nothing."""

from __future__ import annotations

import json

import pytest
import torch
from support.backend import eager_cascade
from support.html_reader import Reader, checked
from support.shared_prefix import attention, inputs, joined, sdpa, stack, unshared

import torch_cascade
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.page_diff import diff_section, hunks
from torch_cascade.compiler.record import BlendRecord, Compilation, SiteRecord, StageRecord
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.compiler.summary import Report

EVIL = "</style></title><script>alert('1')</script><img src=x onerror=alert(2)>&amp;\"'"


def explained(fn, **options):
    compiled = torch.compile(fn, backend="cascade", options=options)
    return torch_cascade.explain(compiled, *inputs())


def graphs(reader):
    return [svg for svg in reader.all("svg") if svg["class"] == "graph"]


@pytest.mark.parametrize("tail", ["<p>", "<p></b></p>", "</p>", "<p id=a id=b></p>"])
def test_the_reader_finds_what_is_not_well_formed(tail):
    with pytest.raises(AssertionError):
        Reader(f"<html>{tail}</html>")


# --- content --------------------------------------------------------------------------------------


def test_a_rewritten_site_has_everything_the_report_has():
    report = explained(attention, decide="always")
    reader = checked(report.html())
    (site,) = report.sites
    assert site.rewritten and f"+ {site.where}" in reader.text
    for segment in site.segments:
        for said in (segment.keys, segment.base, segment.rows, segment.branches, segment.mask):
            assert said in reader.text
    decision = json.loads(report.to_json())["graphs"][0]["sites"][0]["decision"]
    assert decision is not None and f"applied: {decision['why']}" in reader.text
    for lines in (decision["costs"] or {"formulas": {}})["formulas"].values():
        assert all(line in reader.text for line in lines)
    assert "cascade.sdpa" in reader.text and "cascade.merge" in reader.text
    assert len(graphs(reader)) == 2
    assert "TORCH_CASCADE_DECIDE" in reader.text and "1 of 1 attention sites" in reader.text


def test_the_cost_model_is_shown_with_its_formulas_and_numbers():
    report = explained(attention)
    reader = checked(report.html())
    costs = json.loads(report.to_json())["graphs"][0]["sites"][0]["decision"]["costs"]
    assert costs["formulas"]["plain"] and costs["numbers"]
    assert all(line in reader.text for lines in costs["formulas"].values() for line in lines)
    assert all(f"{s}{number}" in reader.text for s, number in costs["numbers"].items())
    assert f"prefix of {costs['break_even']['prefix']} keys" in reader.text


def test_declines_are_grouped_by_reason_and_say_what_to_do():
    def three(q, prefix, suffix):
        one = unshared(q, prefix, suffix) + unshared(q.cos(), prefix, suffix)
        return one, sdpa(q, suffix, suffix, dropout_p=0.25)

    report = explained(three, decide="always")
    reader = checked(report.html())
    counts = [site.declined.reason.value for site in report.sites]
    assert sorted(counts) == ["dropout", "no-shared-prefix", "no-shared-prefix"]
    assert "Not rewritten: no-shared-prefix (2)" in reader.text
    assert "Not rewritten: dropout (1)" in reader.text
    assert reader.text.count("What you can do: Call `model.eval()`") == 1


def test_layers_alike_are_one_block_with_their_number():
    reader = checked(explained(stack(7), decide="always").html())
    assert "Rewritten (7)" in reader.text and "+ 7 x " in reader.text
    folds = reader.text[: reader.text.index("The graph before and after")]
    assert folds.count("shared_prefix.py") == 1
    assert "layers 1 to 6 are alike: 6 times" in reader.text


BLEND = BlendRecord(
    where="model.py:3: reuse_kv(...)",
    node="reuse_kv",
    layers=("computed", "checked", "reused", "reused", "reused"),
    tokens="411",
    fresh="13",
    selector="v",
    stages=(StageRecord(1, "0.15", "ceiling(0.15 * s0) + 13", 73),),
)


def test_a_blend_shows_layers_and_stages():
    reader = checked(Report((Compilation(blend=BLEND),)).html())
    assert "found, 4 of 5 layers reuse cached keys" in reader.text
    assert "4 of 5 layers reuse them; 411 tokens, 13 of them" in reader.text
    assert "layer 0 computed; layer 1 checked; layers 2 to 4 reused" in reader.text
    (bars,) = [svg for svg in reader.all("svg") if "bars" in svg["class"]]
    assert "layers 2 to 4 reused" in bars["aria-label"]
    heights = [float(rect["height"]) for rect in reader.all("rect")]
    reused = 80 * 73 / 411
    assert heights == pytest.approx([80, 80] + [80 - reused, reused] * 3, abs=0.06)
    for said in ("0.15, chosen by v", "ceiling(0.15 * s0) + 13", "73"):
        assert said in reader.text


def test_a_blend_that_was_declined_says_why():
    declined = Declined(Reason.CHECK_LAYER, "reuse_kv", "layer 9 of 2")
    record = BlendRecord("", "reuse_kv", ("computed",) * 2, declined=declined)
    reader = checked(Report((Compilation(blend=record),)).html())
    assert "0 of 2 layers" in reader.text and "Not reused: check-layer" in reader.text
    assert "layer 9 of 2" in reader.text and "What you can do: Name layers" in reader.text


@pytest.mark.parametrize(
    "record, said",
    [
        (Compilation(cached=True), "came from Inductor's cache"),
        (Compilation(training=True), "Compiled for training"),
        (Compilation(options=Options(disable=True)), "TORCH_CASCADE_DISABLE"),
        (Compilation(), "No attention was found"),
    ],
)
def test_a_graph_of_which_little_is_known(record, said):
    assert said in checked(Report((record,)).html()).text


def test_no_graph_is_a_page_as_well():
    assert "no attention was found" in Reader(Report().html()).text


# --- escaping -------------------------------------------------------------------------------------


def test_text_of_a_user_is_never_markup():
    evil = Declined(Reason.SPELLING, EVIL, f"{EVIL} detail", f"{EVIL} hint", EVIL)
    sites = [SiteRecord(EVIL, EVIL, EVIL, EVIL, EVIL, declined=evil), SiteRecord(EVIL, "")]
    blend = BlendRecord(EVIL, EVIL, ("computed",), EVIL, EVIL, EVIL, declined=evil)
    record = Compilation(
        sites, blend, before=f"{EVIL}\nkept", after=f"kept\n{EVIL}!", seconds={EVIL: 0.5}
    )
    record.compile_id = EVIL
    text = Report((record,)).html()
    reader = checked(text)
    assert reader.text.count(EVIL) >= 12 and "<script" not in text


def test_a_module_and_a_source_line_named_like_markup():
    class Named(torch.nn.Module):
        def forward(self, q, prefix, suffix):
            kv = joined(prefix, suffix)
            return sdpa(q, kv, kv)  # <script>alert(1)</script>

    Named.__name__ = Named.__qualname__ = "<script>alert(1)</script>"
    model = torch.nn.Module()
    model.add_module("<script>alert(1)</script>", Named())
    report = torch_cascade.explain(
        lambda *args: model.get_submodule("<script>alert(1)</script>")(*args), *inputs()
    )
    assert any("<script>" in site.where for site in report.sites)
    assert "# <script>alert(1)</script>" in checked(report.html()).text


def test_a_picture_that_fails_costs_the_picture_only(monkeypatch, caplog):
    def fail(graph):
        raise KeyError("a bug")

    monkeypatch.setattr("torch_cascade.compiler.picture.folded", fail)
    report = explained(attention, decide="always")
    assert report.rewritten == 1 and not graphs(checked(report.html()))
    assert "could not be drawn" in caplog.text and "a bug" in caplog.text


# --- the difference -------------------------------------------------------------------------------


def test_hunks_hold_every_change_and_only_some_of_the_rest():
    before = [f"line {n}" for n in range(50)]
    after = [*before[:20], "new", *before[21:40], *before[42:]]
    found = hunks("\n".join(before), "\n".join(after))
    changed = [row[1:] for rows in found for row in rows if row[0]]
    assert changed == [("line 20", "new"), ("line 40", ""), ("line 41", "")]
    assert [len(rows) for rows in found] == [7, 8]
    assert all(left == right for rows in found for same, left, right in rows if not same)


def test_alike_changes_are_shown_once():
    lines = [line for n in range(5) for line in (f"%sdpa_{n}: x", *(["%a"] * 9))]
    before, after = "\n".join(lines), "\n".join(lines).replace("%sdpa", "%merge")
    reader = Reader(diff_section(before, after))
    # The first has no line above it and is therefore not like the others.
    assert (
        reader.text.count("%merge") == 2
        and "before 1 line, after 1 line; alike in 4 places" in reader.text
    )
    assert "changed nothing" in Reader(diff_section(before, before)).text


# --- in the folder of the option dump -------------------------------------------------------------


def dumped(folder, *functions):
    for fn in functions:
        backend = eager_cascade(dump=str(folder), decide="always")
        torch.compile(fn, backend=backend)(*inputs())
        torch._dynamo.reset()
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_dump_has_all_graphs_and_their_pictures(tmp_path):
    reader = checked(dumped(tmp_path, attention, unshared))
    assert [a["href"] for a in reader.all("a")][:2] == ["#graph-000", "#graph-001"]
    assert len(graphs(reader)) == 4 and "1 of 2 attention sites" in reader.text
    assert "cascade.merge" in reader.text and "no-shared-prefix" in reader.text


def test_a_folder_that_an_older_version_wrote_to(tmp_path):
    dumped(tmp_path, attention)
    (tmp_path / "000/section.html").unlink()
    reader = checked(dumped(tmp_path, unshared))
    assert "Rewritten (1)" in reader.text and "no-shared-prefix (1)" in reader.text

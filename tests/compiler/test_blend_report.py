"""What reports say of cached keys and values."""

import json

import torch
from support.blend_plain import Plain, compiled, inputs
from torch._dynamo.utils import counters

from torch_cascade import explain
from torch_cascade.compiler.summary import Report


def reported(model=None, args=None, **options):
    fn = torch.compile(model or Plain(), backend="cascade", options=options)
    with torch.no_grad():
        return explain(fn, *(args or inputs()))


def flat(report: Report) -> str:
    """Without line breaks."""
    return " ".join(str(report).split())


def test_what_each_layer_does():
    report = reported(min_tokens=0, check_layers="0:.5,1:.25")
    text = flat(report)
    assert "2 of 3" not in text and "3 of 3 layers reuse cached keys and values" in text
    assert "14 tokens, 2 of them without a cached copy" in text
    assert "layers 0 to 1 checked; layer 2 reused" in text
    assert "from layer 0 on 8 tokens: recompute 0.5 of the cached tokens, chosen by v" in text
    assert "from layer 1 on 5 tokens: recompute 0.25" in text
    assert "applied: 12 cached tokens, min_tokens=0 cached tokens or more" in text
    where = report.compilations[0].blend.where
    assert "blend_plain.py" in where and where.endswith(
        "reuse_kv(k, v, *cached[number], fresh, chunks)"
    )


def test_full_reuse_and_a_length_that_is_a_symbol():
    args = inputs()
    torch._dynamo.mark_dynamic(args[0], 1)
    for pair in args[1]:
        for x in pair:
            torch._dynamo.mark_dynamic(x, 2)
    text = flat(reported(args=args, min_tokens=0))
    assert "(now 4): recompute 0.15" in text and "+ 2 tokens (now 4)" in text
    text = flat(reported(min_tokens=0, recompute_ratio=0))
    assert "layers 0 to 2 reused" in text
    assert "full reuse: 2 tokens computed, those without a cached copy" in text


def test_why_nothing_is_reused():
    text = flat(reported())
    assert "0 of 3 layers reuse cached keys and values" in text
    assert "not applied: 12 cached tokens, fewer than min_tokens=256" in text
    assert "not reused: min-tokens." in text and "Lower `min_tokens`" in text
    text = flat(reported(Plain(then=lambda x: x * 2), min_tokens=0))
    assert "not reused: all-tokens." in text and "all of them" in text and "applied" not in text
    assert "`logits_to_keep=1`" in text


def test_attention_of_a_blend_is_said_to_be_that():
    """Not that it shares nothing, which asks for a SharedPrefixCache; unless nothing blends."""
    for options in ({"min_tokens": 0}, {}):  # blended, and declined
        text = flat(reported(**options))
        assert "Not rewritten: of-blend (3)" in text and "no-shared-prefix" not in text
    assert "no-shared-prefix (3)" in flat(reported(passes="cascade"))


def test_json():
    blend = json.loads(reported(min_tokens=0).to_json())["graphs"][0]["blend"]
    assert blend["layers"] == ["computed", "checked", "reused"] and blend["reused"] == 2
    assert blend["stages"] == [{"layer": 1, "ratio": "0.15", "rows": "4", "now": 4}]
    assert (blend["tokens"], blend["fresh"], blend["selector"]) == ("14", "2", "v")
    assert blend["declined"] is None and blend["decision"]["apply"] is True
    blend = json.loads(reported().to_json())["graphs"][0]["blend"]
    assert blend["declined"]["reason"] == "min-tokens" and blend["reused"] == 0


def test_counters():
    compiled(Plain(), *inputs())
    compiled(Plain(), *inputs(), decide="auto")
    tally = counters["cascade"]
    assert (tally["blend.layers"], tally["blend.reused"]) == (6, 2)
    assert tally["blend.declined.min-tokens"] == 1


def test_dumped_graphs_are_those_after_both_passes(tmp_path):
    compiled(Plain(), *inputs(), dump=str(tmp_path))
    before, after = ((tmp_path / "000" / f"{n}.txt").read_text() for n in ("before", "after"))
    assert before.count("cascade.reuse_kv") == 3 and after.count("cascade.reuse_kv") == 2
    entry = json.loads((tmp_path / "report.json").read_text())["graphs"][0]
    assert entry["blend"]["reused"] == 2

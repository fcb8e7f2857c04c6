"""The benchmark of prefills on a tiny model: work, ways, stores, shares, mistakes."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from torch_cascade.benchmarks import models, prefill, prefill_contest, ttft  # noqa: E402
from torch_cascade.benchmarks.prefill_work import (  # noqa: E402
    Rows,
    Shapes,
    blend_work,
    full_work,
)
from torch_cascade.benchmarks.rows import Ceilings  # noqa: E402

RATES = ["--read", "0.01", "--matmul", "0.1", "--device", "cpu"]
SHORT = ["--model", "tiny", "--chunk", "16", "--question", "5", "--repeat", "2", *RATES]
LLAMA = Shapes(
    layers=32,
    weights=218_103_808,
    kv_weights=8_388_608,
    table=525_336_576,
    heads=32,
    kv_heads=8,
    dim=128,
    element=2,
)
H200 = Ceilings(4.44e12, 780e12)


@pytest.fixture
def asked(monkeypatch):
    """What torch.compile is asked for; the model runs as it is."""
    calls = []

    def compile(model, **options):
        calls.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    return calls


# --- work -----------------------------------------------------------------------------------------


def test_shapes_of_a_model():
    config = transformers.LlamaConfig(**models.SHAPES["llama-3-8b"], tie_word_embeddings=False)
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    found = Shapes.of(model)
    assert found == Shapes(**{**vars(LLAMA), "layers": 1})
    assert LLAMA.kv_bytes(1) == 131_072


def test_a_full_prefill():
    work = full_work(LLAMA, 8192, H200)
    linear = 2 * 32 * 218_103_808 * 8192 + 2 * 525_336_576
    attention = 4 * 32 * 32 * 128 * 8192 * 8193 // 2
    assert work.flops == linear + attention
    assert work.bytes == 2 * (32 * 218_103_808 + 525_336_576) + 8192 * 131_072
    assert work.bound == "flops"


def test_ratio_1_computes_all():
    rows = Rows(8192, 64, Fraction(1), 1)
    assert rows.kept == 8192
    assert blend_work(LLAMA, rows, H200).flops == full_work(LLAMA, 8192, H200).flops


def test_the_share_that_the_goal_allows_for():
    """15 % of the rows, a full layer, and the check layer's keys and values, of 32 layers."""
    rows = Rows(8192, 64, Fraction(3, 20), 1)
    assert rows.kept == 64 + 1220
    share = blend_work(LLAMA, rows, H200).flops / full_work(LLAMA, 8192, H200).flops
    assert 0.17 < share < prefill_contest.GOAL


def test_full_reuse_computes_the_question():
    rows = Rows(8192, 64, Fraction(0), -1)
    assert rows.kept == 64
    work = blend_work(LLAMA, rows, H200)
    seen = sum(range(8192 - 63, 8193))
    linear = 2 * 32 * 218_103_808 * 64 + 2 * 525_336_576
    assert work.flops == linear + 4 * 32 * 32 * 128 * seen


# --- prompts and stores ---------------------------------------------------------------------------


def test_a_prompt_is_chunks_and_a_question():
    prompt = prefill.Prompt.draw(50, 16, 5, 211, seed=3)
    assert [len(part) for part in prompt.parts] == [16, 16, 13, 5]
    assert prompt.tokens == 50
    assert prompt.ids.min() > 0
    assert torch.equal(prompt.ids, prefill.Prompt.draw(50, 16, 5, 211, seed=3).ids)


def test_a_store_keeps_chunks_in_one_place(tmp_path):
    model = models.load("tiny", None, torch.float32, torch.device("cpu")).model
    for source, place in (("cpu", "cpu"), ("disk", "disk")):
        store = prefill.make_store(model, source, tmp_path / source)
        store.add([5, 6, 7])
        assert f"3 of 3 tokens from {place}" in str(store.blend([[5, 6, 7], [8]]).report)
        if source == "disk":
            prefill.forget_files(tmp_path / source)
            assert f"3 of 3 tokens from {place}" in str(store.blend([[5, 6, 7], [8]]).report)


def test_ways_are_compiled_with_their_ratio(asked):
    every = prefill.ways([Fraction(3, 20), Fraction(0)], ["cpu", "disk"])
    assert [way.name for way in every] == [
        "eager",
        "full",
        *(f"blend {ratio} {source}" for source in ("cpu", "disk") for ratio in ("0.15", "0")),
    ]
    for way in every:
        way.forward("model", dynamic=True, mode=None)
    assert [call["backend"] for call in asked] == ["inductor", *["cascade"] * 4]
    blends = [call["options"] for call in asked[1:]]
    assert [options["recompute_ratio"] for options in blends] == ["3/20", "0"] * 2
    assert all(options["strict"] for options in blends)


def test_arms_are_ways_of_their_own(asked):
    """With their selector and check layers; nothing is chosen where nothing or all is computed."""
    model = models.load("tiny", None, torch.float32, torch.device("cpu")).model
    every = prefill.ways([Fraction(3, 20), Fraction(1)], ["cpu"], ["v", "question"])[2:]
    names = ["blend 0.15 cpu", "blend 1 cpu", "question 0.15 cpu", "question 1 cpu"]
    assert [way.name for way in every] == names
    assert [way.looks_ahead for way in every] == [False, False, True, False]
    for way in every:
        way.forward(model, dynamic=False, mode=None)
    chosen = asked[2]["options"]
    assert (chosen["selector"], chosen["check_layers"]) == ("question", {1: "3/20"})
    assert asked[3]["options"]["recompute_ratio"] == "1"


def test_what_runs_ahead_is_computed_twice():
    once, twice = (
        blend_work(LLAMA, Rows(8192, 64, Fraction(3, 20), 1, ahead), H200)
        for ahead in (False, True)
    )
    below = LLAMA.layers - 2
    pairs = 64 * (8192 - 64) + 64 * 65 / 2
    more = below * (2 * LLAMA.weights * 64 + 4 * LLAMA.heads * LLAMA.dim * pairs)
    assert twice.flops - once.flops == more
    assert twice.bytes - once.bytes == below * LLAMA.weights * LLAMA.element


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_writes_its_record(asked, tmp_path, capsys):
    path = tmp_path / "ttft.json"
    more = ["--lengths", "60", "93", "--ratios", "0.15", "--sources", "cpu", "disk"]
    assert ttft.main([*SHORT, *more, "--json", str(path)]) == 0
    made = json.loads(path.read_text())
    assert [line["label"] for line in made["lines"]] == ["60", "93"]
    # A ratio is compiled once, for all lengths and places.
    assert [call["dynamic"] for call in asked] == [True, True]
    for line in made["lines"]:
        assert list(line["results"]) == ["eager", "full", "blend 0.15 cpu", "blend 0.15 disk"]
        for name, result in line["results"].items():
            assert result["status"] == "ok", name
            assert result["time"]["count"] == 2
            # Nothing is compiled here, so that a blend is exact.
            assert result["details"]["kl"] == pytest.approx(0, abs=1e-9)
            assert result["details"]["same_token"]
        full, blend = (line["results"][name] for name in ("full", "blend 0.15 cpu"))
        assert line["goal"] == pytest.approx(0.22 * full["time"]["median"])
        share = blend["time"]["median"] / full["time"]["median"]
        assert blend["details"]["share_of_full"] == pytest.approx(share)
        assert blend["details"]["flops"] < full["details"]["flops"]
    said = capsys.readouterr().out
    assert "blend 0.15 cpu: " in said
    assert " of the full prefill" in said


def test_an_engine_that_fails_leaves_the_others(asked, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such place")

    monkeypatch.setattr(prefill, "make_store", broken)
    path = tmp_path / "ttft.json"
    assert ttft.main([*SHORT, "--lengths", "60", "--json", str(path)]) == 1
    (line,) = json.loads(path.read_text())["lines"]
    assert line["results"]["blend 0.15 cpu"]["reason"] == "RuntimeError: no such place"
    assert line["results"]["full"]["status"] == "ok"


def test_how_far_distributions_are():
    full = torch.tensor([0.0, 0.0]).log_softmax(-1)
    found = prefill_contest.distance(full, torch.tensor([3.0, 1.0]).log())
    assert found["kl"] == pytest.approx(0.5 * torch.tensor(4 / 3).log().item())
    assert not prefill_contest.distance(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]))[
        "same_token"
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--ratios", "1.5"], "argument --ratios: must be from 0 to 1, got 1.5"),
        (["--ratios", "a lot"], "argument --ratios: must be from 0 to 1, got a lot"),
        (["--lengths", "5"], "argument --lengths: must be above --question 5, got 5"),
        (["--sources", "gpu"], "argument --sources: gpu needs a CUDA device"),
        (["--repeat", "0"], "argument --repeat: must be at least 1, got 0"),
    ],
)
def test_mistakes(wrong, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        ttft.main([*SHORT, *wrong])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_model_without_so_many_positions(capsys):
    assert ttft.main([*SHORT, "--lengths", "5000"]) == 2
    assert "the model takes 4096" in capsys.readouterr().err

"""The quality benchmarks: budgets, windows, intervals, and a tiny model through the pass itself."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from support.blend_models import expected, model_of, prompt_of  # noqa: E402

from torch_cascade.benchmarks import (  # noqa: E402
    arms,
    bootstrap,
    deviations,
    models,
    quality,
    quality_record,
    windows,
)
from torch_cascade.benchmarks.blended import Blender  # noqa: E402
from torch_cascade.benchmarks.quality_record import Line, Quality  # noqa: E402

THIRD = Fraction(1, 3)


@pytest.mark.parametrize("name", arms.GRADUAL)
@pytest.mark.parametrize("ratio", [Fraction(x) for x in ("0.05", "0.15", "0.3", "0.5")])
def test_gradual_arms_compute_as_many_rows_as_a_single_check(name, ratio):
    made = arms.arm(name, ratio, 30).options["check_layers"]
    stages = {layer: Fraction(share) for layer, share in made.items()}
    assert arms.rows(stages, 30) == arms.rows({1: ratio}, 30) == 1 + 29 * ratio
    assert sorted(stages.values(), reverse=True) == [stages[layer] for layer in sorted(stages)]


def test_a_shallow_model_keeps_rows_for_its_last_layers():
    stages = arms.gradual({1: Fraction(7, 3), 3: None}, Fraction(1, 5), 6)
    assert stages == {1: Fraction(11, 40), 3: Fraction(3, 20)}
    assert arms.rows(stages, 6) == arms.rows({1: Fraction(1, 5)}, 6)
    with pytest.raises(ValueError, match="check layer 3 of a model of 3 layers"):
        arms.gradual({1: Fraction(2), 3: None}, THIRD, 3)


def test_a_budget_below_what_the_logits_take_is_an_error():
    arms.check_budget(arms.arm("v", Fraction(1, 10), 30), 38, 5)
    with pytest.raises(ValueError, match=r"v 0.1 keeps 4 of 38 cached rows, but logits of 6 tok"):
        arms.check_budget(arms.arm("v", Fraction(1, 10), 30), 38, 6)


def test_windows_hold_the_text_and_unrelated_ones_only_its_end():
    cut = windows.Cut(3, 5, 2)
    text = torch.arange(17 * 4 + 9)
    found = windows.cut_windows(text, cut, 4, seed=3)
    starts = [int(w.ids[0, 0]) for w in found["coherent"]]
    assert sorted(starts) == [0, 17, 34, 51]
    for run, mixed in zip(found["coherent"], found["unrelated"], strict=True):
        first = int(run.ids[0, 0])
        assert run.ids[0].tolist() == list(range(first, first + 17))
        assert mixed.fresh is run.fresh and mixed.chunks[-1] is run.chunks[-1]
        places = [int(chunk[0]) // 17 for chunk in mixed.chunks]
        assert len(set(places)) == 3
    with pytest.raises(models.UsageError, match="the text has 4 windows of 17 tokens, 5"):
        windows.cut_windows(text, cut, 5, seed=3)


def test_a_text_that_cannot_be_read_is_said_so(tmp_path):
    file = tmp_path / "text.gz"
    file.write_text("not gzipped")
    with pytest.raises(models.UsageError, match=r"--text .*text\.gz: Not a gzipped file"):
        windows.read_tokens(file, None)


def test_intervals_are_paired():
    generator = torch.Generator().manual_seed(1)
    worst = (1 + torch.rand(40, generator=generator)).tolist()
    third = [x / 3 for x in worst]
    found = bootstrap.removed(third, worst)
    assert found.value == pytest.approx(2 / 3) and found.high - found.low < 1e-12
    shifted = bootstrap.difference([x + 0.25 for x in worst], worst)
    assert (shifted.low, shifted.high) == pytest.approx((0.25, 0.25))


def test_an_interval_has_the_width_that_theory_says():
    x = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = bootstrap.mean(x.tolist())
    half = 1.96 * float(x.std()) / math.sqrt(400)
    assert found.high - found.value == pytest.approx(half, rel=0.1)
    assert found.value - found.low == pytest.approx(half, rel=0.1)


def test_figures_of_two_distributions():
    full = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.2, 0.5, 0.3]]).log()
    ours = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.2, 0.5, 0.3]]).log()
    got = quality_record.compare(ours, full, torch.tensor([2, 0, 1]))
    kl = 0.7 * math.log(0.7 / 0.2) + 0.2 * math.log(0.2 / 0.7)
    assert got["kl"] == pytest.approx(kl / 3)
    assert got["nll"] == pytest.approx((math.log(0.7) - math.log(0.2)) / 2)
    assert got["top1"] == pytest.approx(2 / 3)


@pytest.fixture(scope="module")
def tiny():
    return model_of("Llama")


def test_the_pass_computes_what_the_oracle_does(tiny):
    """An eager run whose cache substitutes keys, against the store and the compiled pass."""
    rows = [[7, 9, 4]]
    prompt = prompt_of(tiny, rows)
    chunks = [
        prompt.ids[0][prompt.chunks[0] == c] for c in prompt.chunks[0].unique().tolist() if c >= 0
    ]
    fresh = prompt.ids[0][prompt.chunks[0] < 0]
    assert torch.equal(torch.cat([*chunks, fresh]), prompt.ids[0])
    blender = Blender(tiny)
    exact = blender.eager(prompt.ids, 1)[0]
    reference, _ = expected(tiny, prompt, {1: THIRD})
    got = blender.compiled(arms.arm("v", THIRD, 9))([[*chunks, fresh]], 1)[0]
    torch.testing.assert_close(got, reference.logits[0])
    assert (got - exact).abs().max() > 1e-3


def test_the_whole_command(tiny, tmp_path, monkeypatch, capsys):
    class Words:
        def __call__(self, text, **options):
            return {"input_ids": [3 + len(word) % 40 for word in text.split()]}

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (90,), generator=generator).tolist()
    text = tmp_path / "text"
    text.write_text(" ".join("x" * n for n in lengths))
    loaded = models.Loaded("tiny", tiny, Words())
    monkeypatch.setattr(models, "load", lambda *_: loaded)
    cut = ["--chunks", "2", "--tokens", "11", "--fresh", "5", "--windows", "3"]
    asked = ["--arms", "v", "--ratios", "0.4", "--kinds", "coherent"]
    file = tmp_path / "made.json"
    place = ["--text", str(text), "--json", str(file), "--device", "cpu"]
    assert quality.main([*place, *cut, *asked]) == 0
    made = json.loads(file.read_text())
    names = [line["arm"] for line in made["lines"]]
    assert names == ["reuse", "full", "v"]
    said = {line["arm"]: line for line in made["summary"]}
    assert said["reuse"]["kl"]["value"] > 0 and said["reuse"]["removed"]["value"] == 0
    assert abs(said["full"]["kl"]["value"]) < 1e-6 and said["full"]["top1"]["value"] == 1
    assert file.with_suffix(".svg").is_file()
    assert "against full recompute" in capsys.readouterr().out
    assert quality.main([*place, *cut[:-1], "30"]) == 2
    assert quality.main([*place, *cut, "--arms", "v", "--ratios", "0.1"]) == 2
    assert "--ratios: v 0.1 keeps 3 of 22 cached rows" in capsys.readouterr().err


def test_deviations_are_those_of_the_keys_after_rotation(tiny):
    """None in layer 0, none where a chunk stands first; a rotation keeps the distance."""
    ids = torch.arange(3, 3 + 7 + 9 + 4)
    window = windows.Window(tuple(ids[:16].split([7, 9])), ids[16:])
    k, v = deviations.deviations(tiny, window)
    assert k.shape == v.shape == (tiny.config.num_hidden_layers, 9)
    assert float(v[0].max()) < 1e-9 < float(v[1:].min())
    with torch.no_grad():
        whole = tiny(window.ids, use_cache=True).past_key_values
        alone = tiny(window.chunks[1][None], use_cache=True).past_key_values
    fresh = whole.layers[1].values[0, :, 7:16] - alone.layers[1].values[0]
    torch.testing.assert_close(v[1], fresh.square().sum((0, 2)))


def test_shares_and_ranks():
    x = torch.tensor([5.0, 1.0, 3.0, 1.5])
    assert deviations.top_share(x, 0.3) == pytest.approx(8 / 10.5)
    assert deviations.rank_correlation(x, x.exp()) == 1
    assert deviations.rank_correlation(x, -x) == -1


def test_a_line_is_found_by_its_ratio():
    lines = [Line("coherent", "v", share, {}, {"kl": [1.0]}) for share in ("3/20", "3/10")]
    made = Quality({}, "cpu", lines)
    assert made.of("coherent", "v", "3/10") is lines[1]
    assert made.of("unrelated", "v") is None

"""The decoding benchmark on a tiny model: floors, checks, engines, order, mistakes."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from torch_cascade.benchmarks import (  # noqa: E402
    cases,
    decode,
    decode_check,
    generate,
    measure,
    models,
    record,
)
from torch_cascade.benchmarks.cases import Case, Size  # noqa: E402
from torch_cascade.benchmarks.rows import Ceilings  # noqa: E402

CPU = torch.device("cpu")
MEASURED = Ceilings(4.44e12, 780e12)
RATES = ["--read", "0.01", "--matmul", "0.1", "--device", "cpu"]
SHORT = ["--model", "tiny", "--cases", "2,3,11", "--steps", "3", "--burst", "2", "--no-plot"]


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return models.load("tiny", None, torch.float32, CPU)


def run(path, *options):
    status = generate.main([*SHORT, *RATES, "--json", str(path), *options])
    return status, json.loads(path.read_text())


@pytest.fixture(scope="module")
def llama():
    """Sizes of Llama-3-8B without its sixteen gigabytes."""
    config = transformers.LlamaConfig(**models.SHAPES["llama-3-8b"], tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
        prefix = [(torch.empty(1, 8, 1, 128, dtype=torch.bfloat16),) * 2 for _ in range(32)]
    return model, prefix


@pytest.mark.parametrize(
    ("case", "shared", "expanded"),
    [
        (Case(1, 16, 4096), 3.50, 5.31),
        (Case(1, 16, 16384), 3.86, 11.1),
        (Case(1, 8, 32768), 4.35, 11.1),
        (Case(1, 64, 16384), 3.86, 34.3),
    ],
    ids=str,
)
def test_floors_are_those_measured_before(case, shared, expanded, llama):
    model, prefix = llama
    size = Size.of(model, prefix)
    assert (size.elements, size.token) == (7504924672, 131072)
    floors = [cases.floor(case, size, 0, MEASURED, which) for which in (True, False)]
    assert [f.bound for f in floors] == ["bytes", "bytes"]
    assert [1e3 * f.seconds for f in floors] == pytest.approx([shared, expanded], rel=5e-3)


def test_an_embedding_table_counts_where_it_is_the_output_layer(tiny):
    table = tiny.model.get_input_embeddings().weight.numel()
    everything = sum(p.numel() for p in tiny.model.parameters())
    assert models.weights_read(tiny.model) == (everything - table, 4 * (everything - table))
    config = transformers.LlamaConfig(**models.SHAPES["tiny"], tie_word_embeddings=True)
    tied = transformers.LlamaForCausalLM(config)
    assert models.weights_read(tied)[0] == sum(p.numel() for p in tied.parameters())


def test_many_rows_are_bound_by_arithmetic(llama):
    assert cases.floor(Case(16, 32, 100), Size.of(*llama), 0, MEASURED).bound == "flops"


@pytest.mark.parametrize("order", ["interleaved", "sequential"])
def test_the_whole_command(order, tmp_path, capsys, uncompiled):
    names = ",".join(decode.NAMES)
    status, content = run(tmp_path / "run.json", "--engines", names, "--order", order)
    assert status == 0
    (line,) = content["lines"]
    assert (line["label"], line["details"]["interleaved"]) == ("2,3,11", order == "interleaved")
    assert line["details"]["checked"] and line["goal"] == pytest.approx(1.4 * line["floor"])
    assert line["floor"] < line["details"]["floor_with_expanded_kv_ms"]
    assert set(line["results"]) == set(decode.NAMES)
    for result in line["results"].values():
        assert result["status"] == "ok", result["reason"]
        assert result["time"]["count"] == 3 and result["details"]["burst_ms"] > 0
        choices = (decode.WARM_UP + 3) * 6
        agreed = {"as": "eager-dynamic", "same": choices, "of": choices}
        assert result["details"]["same_choices"] == agreed
        assert result["details"]["choices"]["different"] == 0
    said = capsys.readouterr().out
    assert all(name in said for name in decode.NAMES)


def test_a_prompt_can_be_read_instead_of_drawn(tmp_path, uncompiled):
    options = ("--prefill", "prompt", "--engines", "cascade,eager-dynamic")
    status, content = run(tmp_path / "run.json", *options)
    assert status == 0 and content["settings"]["prefill"] == "prompt"


def test_when_time_is_over_no_engine_starts(tmp_path, monkeypatch, uncompiled):
    start = decode.Running.start
    late = []
    monkeypatch.setattr(decode.Running, "start", lambda *a: late.append(1) or start(*a))
    monkeypatch.setattr(measure.Measurement, "late", lambda _: len(late) > 1)
    options = ("--engines", "cascade,static,eager-dynamic", "--check-rows", "0")
    status, content = run(tmp_path / "run.json", *options, "--cases", "2,3,11", "1,2,5")
    (line,) = content["lines"]
    assert status == 0
    assert [r["status"] for r in line["results"].values()] == ["missing", "ok", "ok"]
    assert line["results"]["eager-dynamic"]["reason"] == "out of time"


@pytest.mark.slow
def test_the_whole_command_with_the_real_backends(tmp_path):
    torch._dynamo.reset()
    status, content = run(tmp_path / "run.json", "--engines", "cascade,inductor-shared,static")
    assert status == 0
    assert {r["status"] for r in content["lines"][0]["results"].values()} == {"ok"}


def test_a_read_prefix_is_what_the_model_leaves_in_a_cache(tiny):
    prefix = models.prompt_prefix(tiny, 2, 9, seed=3)
    assert [tuple(k.shape) for k, _ in prefix] == [(2, 3, 9, 8)] * 2
    assert not torch.equal(prefix[0][0][0], prefix[0][0][1])
    ids = models._prompt(tiny, 10, 4).roll(17, 1)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        tiny.model(ids[:, :9], past_key_values=cache, use_cache=True)
    for (keys, values), layer in zip(prefix, cache.layers, strict=True):
        torch.testing.assert_close(keys[1:], layer.keys)
        torch.testing.assert_close(values[1:], layer.values)


@pytest.mark.parametrize("fault", ["no last prefix token", "no suffix", "another's prefix"])
def test_a_cache_with_a_fault_is_found(fault, tiny):
    """Keys of random weights alone would not show it; drawn ones are larger."""
    prefix = models.random_prefix(tiny.model, 2, 12, seed=0)
    fed = decode.tokens_to_feed(6, 4, 211, CPU)
    watched = decode_check.watched_rows(4, 2, CPU)
    with torch.no_grad():
        known = decode_check.reference(tiny.model, prefix, 2, watched, fed)
        sound = logits_of(tiny.model, prefix, watched, fed, None)
        faulty = logits_of(tiny.model, prefix, watched, fed, fault)
    assert decode_check.judge(sound, known)[0].right
    assert not decode_check.judge(faulty, known)[0].right


def logits_of(model, prefix, watched, fed, fault):
    if fault == "no last prefix token":
        prefix = [(torch.cat([k[:, :, :-1], k[:, :, :1]], 2), v) for k, v in prefix]
    if fault == "another's prefix":
        prefix = [(k.flip(0), v.flip(0)) for k, v in prefix]
    way = decode.Way("ours", "shared")
    running = decode.Running.start(way, model, prefix, 2, len(fed), watched)
    for tokens in fed:
        running.step(tokens)
        if fault == "no suffix":
            for layer in running.cache.layers:
                layer.suffix_keys.zero_()
    return torch.stack(running.logits)


def test_watched_rows():
    assert decode_check.watched_rows(16, 2, CPU).tolist() == [0, 15]
    assert decode_check.watched_rows(16, 4, CPU).tolist() == [0, 5, 10, 15]
    assert decode_check.watched_rows(2, 4, CPU).tolist() == [0, 1]


def test_choices_and_how_far_behind_they_are():
    exact = torch.tensor([[1.0, 3.0, 2.5], [4.0, 0.0, 0.0]])
    ours = torch.tensor([[1.0, 2.0, 2.1], [4.0, 0.0, 0.0]])
    found = decode_check.choices_like(ours, exact)
    assert found == {"choices": 2, "different": 1, "farthest_margin": 0.5}


def test_the_expanded_caches_are_counted(tiny):
    prefix = models.random_prefix(tiny.model, 2, 12, seed=0)
    token = models.token_bytes(prefix)
    assert token == 2 * 2 * 3 * 8 * 4
    static = decode.make_cache("static", tiny.model, prefix, 3, 5)
    held = sum(t.numel() * 4 for layer in static.layers for t in (layer.keys, layer.values))
    assert decode.cache_bytes("static", 2, 3, 12, 5, token) == held
    shared = decode.make_cache("shared", tiny.model, prefix, 3, 5)
    suffix = [t for x in shared.layers for t in (x.suffix_keys, x.suffix_values)]
    assert decode.cache_bytes("shared", 2, 3, 12, 5, token) == sum(t.numel() * 4 for t in suffix)


def test_an_engine_without_room_leaves_and_the_others_go_on(tmp_path, monkeypatch, uncompiled):
    step = decode.Running.step

    def full(running, fed):
        if running.way.name == "eager-static" and len(running.seconds) == decode.WARM_UP + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        if running.way.name == "static":
            raise RuntimeError("broken")
        step(running, fed)

    monkeypatch.setattr(decode.Running, "step", full)
    options = ("--engines", "cascade,static,eager-static,eager-dynamic", "--check-rows", "0")
    status, content = run(tmp_path / "run.json", *options)
    results = content["lines"][0]["results"]
    assert status == 0
    assert {name: r["status"] for name, r in results.items()} == {
        "cascade": "ok",
        "static": "failed",
        "eager-static": "out of memory",
        "eager-dynamic": "ok",
    }
    assert results["static"]["reason"] == "RuntimeError: broken"
    assert content["lines"][0]["details"]["not_checked_because"] == "--check-rows 0"


def test_a_wrong_engine_has_no_time(tmp_path, monkeypatch, uncompiled):
    make_cache = decode.make_cache

    def shifted(kind, model, prefix, branches, suffix):
        if kind == "shared":
            prefix = [(k.roll(1, 2), v) for k, v in prefix]
        return make_cache(kind, model, prefix, branches, suffix)

    monkeypatch.setattr(decode, "make_cache", shifted)
    status, content = run(tmp_path / "run.json", "--engines", "cascade,eager-dynamic")
    assert status == 1
    results = content["lines"][0]["results"]
    assert results["cascade"]["status"] == record.WRONG and results["cascade"]["time"] is None
    assert results["eager-dynamic"]["status"] == record.OK


def test_engines_take_turns_only_where_they_fit(tiny, monkeypatch):
    options = argparse.Namespace(order="auto")
    measurement = measure.Measurement(tiny, MEASURED, options, print)
    prefix = models.random_prefix(tiny.model, 1, 12, seed=0)
    fed = decode.tokens_to_feed(5, 3, 211, CPU)
    size = Size.of(tiny.model, prefix)
    scene = measure.Scene(Case(1, 3, 12), prefix, size, fed, 0, torch.tensor([0]))
    needed = sum(
        decode.cache_bytes(way.cache, 1, 3, 12, 5, scene.size.token) for way in decode.WAYS
    )
    for spare, together in ((0, True), (-1, False)):
        free = needed + measure.WORKSPACE + spare
        monkeypatch.setattr(measure.memory, "free_bytes", lambda _, free=free: free)
        assert measurement._together(scene, decode.WAYS) is together


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cases", "1,2"], "B,T,L"),
        (["--engines", "magic"], "unknown engine 'magic'"),
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--check-rows", "-1"], "argument --check-rows: must be at least 0, got -1"),
        (["--read", "4"], "give both or none"),
        (["--device", "cpu"], "no ceiling can be measured"),
    ],
)
def test_mistakes_on_the_command_line(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        generate.main(options)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--model", "nowhere"],
            "--model nowhere: no such folder, and none of llama-3-8b, smollm2-135m, tiny",
        ),
        (["--model", "tiny", "--cases", "1,2,4096"], "4148, the model takes 4096"),
    ],
)
def test_mistakes_about_the_model(options, said, capsys):
    assert generate.main([*RATES, *options]) == 2
    assert said in capsys.readouterr().err

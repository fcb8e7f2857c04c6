"""`chosen_tokens`: what the compiled graph itself chooses, and the page of it."""

from __future__ import annotations

import re

import pytest
import torch
from support.backend import eager_cascade
from support.html_reader import Reader, checked
from transformers import LlamaConfig, LlamaForCausalLM

import torch_cascade
from torch_cascade.compiler import chosen as module
from torch_cascade.compiler.backend import CascadeError
from torch_cascade.compiler.chosen import ChosenTokens, Part, Stage, chosen_tokens

LAYERS, DOCUMENTS = 3, (19, 23)
OPTIONS = {"decide": "always", "check_layers": "0:0.5,1:0.2"}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def blend(model):
    torch.manual_seed(6)
    store = torch_cascade.ChunkStore(model)
    first, second = (torch.randint(3, 97, (n,)).tolist() for n in DOCUMENTS)
    store.add(first)
    store.add(second)
    return lambda: store.blend([[7, 8, 9], second, first, [11, 12]])


def compiled(model, **options):
    return torch.compile(model, backend="cascade", options=OPTIONS | options)


@pytest.fixture
def interpreted(monkeypatch):
    """Graphs are interpreted instead of compiled: seconds instead of a minute."""

    def inner(gm, inputs, **options):
        def run(args):
            return gm(*args)

        run._boxed_call = True
        return run

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", inner)


def rewritten(forward, blended, rotated):
    """The tokens whose keys of a layer are not the cached ones after a prefill."""
    with torch.no_grad():
        forward(**blended, logits_to_keep=1)
    pairs = zip(blended.past_key_values.layers, rotated, strict=True)
    return [(layer.keys != keys).any(-1).any(1)[0].nonzero()[:, 0] for layer, (keys, _) in pairs]


def test_they_are_those_of_the_compiled_graph(model, blend):
    """Keys that a plain compiled prefill leaves behind are computed where they were chosen only."""
    forward = compiled(model)
    blended = blend()
    rotated = [blended.past_key_values.rotated(layer) for layer in range(LAYERS)]
    found = rewritten(forward, blended, rotated)
    chosen = chosen_tokens(forward, blend(), logits_to_keep=1)
    assert [stage.layer for stage in chosen.stages] == [0, 1]
    first, second = (stage.rows[0] for stage in chosen.stages)
    assert len(first) == 5 + 21 and len(second) == 5 + 9  # 42 are cached
    assert torch.equal(found[1], first) and torch.equal(found[2], second)


@pytest.mark.parametrize(("side", "first"), [("left", 14), ("right", 0)])
def test_parts_of_a_padded_batch(model, interpreted, side, first):
    """A part is where its tokens are, whichever side padding is on."""
    torch.manual_seed(6)
    store = torch_cascade.ChunkStore(model)
    document = torch.randint(3, 97, (20,)).tolist()
    store.add(document)
    rows = [[document, [7] * 16, [11, 12]], [[7, 8], document, [13] * 2]]
    blended = store.blend(rows, padding_side=side)
    chosen = chosen_tokens(compiled(model), blended, logits_to_keep=1)
    for part, ids in zip(chosen.parts[1], rows[1], strict=True):
        assert chosen.ids[1, part.start : part.end].tolist() == ids
    assert chosen.parts[1][0].start == first
    assert all(counts[1][0] == 2 for counts in chosen.counts()), "without a cached copy"


def test_parts_and_counts(model, blend, interpreted):
    chosen = chosen_tokens(compiled(model), blend(), logits_to_keep=1)
    assert [(p.start, p.end, p.reused) for p in chosen.parts[0]] == [
        (0, 3, 0),
        (3, 26, 23),
        (26, 45, 19),
        (45, 47, 0),
    ]
    for (counts,), stage in zip(chosen.counts(), chosen.stages, strict=True):
        assert counts[0] == 3 and counts[3] == 2 and sum(counts) == stage.rows.shape[1]
    assert chosen.ids.tolist() == blend().input_ids.tolist()
    lines = str(chosen).splitlines()
    assert lines[0] == "from layer 0 on: 26 of 47 tokens"
    assert lines[1] == "  prompt 0, part 0: 3 of 3 tokens, not cached"
    assert re.fullmatch(r"  prompt 0, part 1: \d+ of 23 tokens, 23 of them cached", lines[2])


def test_ratio_0_computes_fresh_tokens_only(model, blend, interpreted):
    chosen = chosen_tokens(
        compiled(model, check_layers="1", recompute_ratio="0"), blend(), logits_to_keep=1
    )
    (stage,) = chosen.stages
    assert stage.layer == -1 and stage.rows.tolist() == [[0, 1, 2, 45, 46]]
    assert str(chosen).startswith("before all layers: 5 of 47 tokens")


def test_prompts_of_a_batch_with_padding(model, interpreted):
    store = torch_cascade.ChunkStore(model)
    store.add([5, 6, 7, 8, 9, 10])
    blended = store.blend([[[5, 6, 7, 8, 9, 10], [11]], [[20, 21, 22], [5, 6, 7, 8, 9, 10], [12]]])
    chosen = chosen_tokens(compiled(model), blended, logits_to_keep=1)
    starts = [[part.start for part in row] for row in chosen.parts]
    assert starts == [[3, 9], [0, 3, 9]]
    reader = checked(chosen.html())
    assert "prompt 0" in reader.text and "prompt 1" in reader.text


# --- what does not go -----------------------------------------------------------------------------


def test_what_is_no_blended_prompt(model):
    with pytest.raises(TypeError, match=r"blended: expected .*ChunkStore.blend.*, got Tensor"):
        chosen_tokens(model, torch.zeros(1, 3))


def test_a_prompt_is_prefilled_once(model, blend):
    blended = blend()
    with torch.no_grad():
        model(**blended, logits_to_keep=1)
    with pytest.raises(ValueError, match="before their prefill"):
        chosen_tokens(model, blended, logits_to_keep=1)


def test_a_graph_that_does_not_blend_says_why(model, blend, interpreted):
    with pytest.raises(ValueError, match=r"does not blend: min-tokens.*42 cached"):
        chosen_tokens(compiled(model, decide="auto"), blend(), logits_to_keep=1)
    with pytest.raises(ValueError, match="got no graph with cached keys"):
        chosen_tokens(lambda **_: torch.zeros(3) + 1, blend())
    with pytest.raises(CascadeError, match="all-tokens"):
        chosen_tokens(compiled(model), blend())


# --- the page -------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of bytes: a letter of two bytes is two tokens."""

    def decode(self, ids, **_):
        return bytes(ids).decode("utf-8", errors="replace")


def of_text(text, reused, *stages):
    """Choices in a prompt of which the first tokens are cached."""
    ids = torch.tensor([list(text.encode())])
    length = ids.shape[1]
    parts = ((Part(0, reused, reused), Part(reused, length, 0)),)
    rows = (Stage(layer, torch.tensor([kept])) for layer, kept in stages)
    return ChosenTokens(ids, parts, tuple(rows))


def marked(text):
    """Of each mark: its class and its text."""
    return re.findall(r'<(?:mark|span) class="(again|fresh|dropped|reused)">([^<]*)<', text)


def test_the_page_marks_tokens_by_what_becomes_of_them():
    chosen = of_text("abcdef?", 6, (1, [1, 2, 4, 6]), (3, [2, 6]))
    page = chosen.html(Letters())
    reader = checked(page)
    first, second = page.index('id="stage-0"'), page.index('id="stage-1"')
    assert marked(page[first:second]) == [
        ("reused", "a"),
        ("again", "bc"),
        ("reused", "d"),
        ("again", "e"),
        ("reused", "f"),
        ("fresh", "?"),
    ]
    assert marked(page[second:]) == [
        ("reused", "a"),
        ("dropped", "b"),
        ("again", "c"),
        ("reused", "d"),
        ("dropped", "e"),
        ("reused", "f"),
        ("fresh", "?"),
    ]
    assert "From layer 3 on: 2 tokens are computed" in reader.text
    assert "Part 0: 6 tokens, 1 of them computed" in reader.text and "17 %" in reader.text
    assert [a["href"] for a in reader.all("a")] == ["#stage-0", "#stage-1"]


def test_a_letter_of_several_tokens_is_one_mark():
    page = of_text("a\u00e9b", 4, (1, [2])).html(Letters())
    assert marked(page)[-3:] == [("reused", "a"), ("again", "\u00e9"), ("reused", "b")]


def test_without_a_tokenizer_ids_are_shown_and_text_is_never_markup():
    assert ("again", "98 ") in marked(of_text("abc", 3, (1, [1])).html())
    page = of_text("<script>x</script>", 18, (1, [0])).html(Letters())
    assert "<script" not in page and "script>" in Reader(page).text


def test_marks_differ_without_colours():
    lines = {}
    for kind in ("again", "fresh", "dropped"):
        lines[kind] = re.findall(
            rf"\.{kind}{{[^}}]*underline 2px (\w+)", of_text("a", 1, (1, [0])).html()
        )
    assert lines == {"again": ["solid"], "fresh": ["dotted"], "dropped": ["dashed"]}


def test_other_backends_are_left_alone(model, blend, interpreted):
    """Only the options of this backend are taken; without any there are the defaults."""
    forward = torch.compile(model, backend=eager_cascade(**OPTIONS))
    with pytest.raises(ValueError, match="min-tokens"):
        module.chosen_tokens(forward, blend(), logits_to_keep=1)

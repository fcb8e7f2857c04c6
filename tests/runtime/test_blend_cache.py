"""A blended prompt in eager mode is the full prefill; cached keys have the prompt's positions."""

import pytest
import torch

pytest.importorskip("transformers")

from support.blending import cached_at, full_prefill, ids, twin
from support.hf_models import FAMILIES, tiny_model
from support.rotary_models import CASES, keys_at, twin64
from support.tolerance import assert_close_to_reference

from torch_cascade import BlendCache, ChunkStore, SharedPrefixCache

# GPT-2's learned positions cannot be moved: the store refuses it (test_rotation_refused).
MOVABLE = [family for family in FAMILIES if family != "GPT2"]

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")


def store_of(model, *chunks, **options):
    store = ChunkStore(model, **options)
    for chunk in chunks:
        store.add(chunk)
    return store


@pytest.fixture
def scene():
    """A float32 model, a store of two chunks, and a question."""
    model = tiny_model("Llama", torch.float32)
    a, b, question = ids(9), ids(13), ids(7)
    return model, store_of(model, a, b), a, b, question


@pytest.mark.parametrize("family", MOVABLE)
def test_eager_is_the_full_prefill(family):
    """Also with gaps, repetitions and another order, and in layers with a sliding window."""
    model = tiny_model(family, torch.float32)
    a, b, gap, question = ids(9), ids(13), ids(5), ids(7)
    blended = store_of(model, a, b).blend([b, gap, a, b, question])
    row = [*b, *gap, *a, *b, *question]
    assert blended.input_ids.tolist() == [row]
    assert list(blended) == ["input_ids", list(blended)[-1]]
    logits, cache = full_prefill(model, row)
    with torch.no_grad():
        out = model(**blended)
    assert torch.equal(out.logits[0], logits)
    for layer, kept in enumerate(blended.past_key_values.layers):
        assert torch.equal(kept.keys, cache.layers[layer].keys)
        assert torch.equal(kept.values, cache.layers[layer].values)
    assert blended.past_key_values.get_seq_length() == len(row)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("bloom", "phimoe")])
def test_layer_0_has_the_keys_of_its_positions(name):
    """Tokens and positions decide there: scaled, partial, interleaved, by length, by layer type."""
    case = CASES[name]
    model = case.model()
    lengths = (17, 11, 29) if case.limit else (40, 13, 29)  # beyond the tables' first length
    a, b, question = (ids(n) for n in lengths)
    blended = store_of(model, a, b).blend([a, b, question])
    row, exact = torch.tensor([[*a, *b, *question]]), twin64(model)
    places = torch.arange(row.shape[1])[None]
    fresh, reference = keys_at(model, row, places)[0][0], keys_at(exact, row, places)[0][0]
    for part, span in enumerate((slice(0, len(a)), slice(len(a), len(a) + len(b)))):
        keys, _ = cached_at(blended, 0, part)
        assert_close_to_reference(keys, fresh[:, span], reference[:, span])


def test_the_first_chunk_is_exact_in_all_layers_and_values_keep_their_bits(scene):
    model, store, a, b, question = scene
    blended = store.blend([a, b, question])
    _, cache = full_prefill(model, a + b + question)
    _, alone = full_prefill(model, b)
    exact = full_prefill(twin(model), a + b + question)[1]
    for layer in range(2):
        for got, fresh, wanted in zip(
            cached_at(blended, layer, 0),
            (cache.layers[layer].keys, cache.layers[layer].values),
            (exact.layers[layer].keys, exact.layers[layer].values),
            strict=True,
        ):
            assert_close_to_reference(got, fresh[0, :, : len(a)], wanted[0, :, : len(a)])
        assert torch.equal(cached_at(blended, layer, 1)[1], alone.layers[layer].values[0])


def test_bfloat16_far_on_and_always_from_the_original():
    model = tiny_model("Llama", torch.bfloat16)
    a = ids(13)
    store = store_of(model, a)
    far = ids(4097)
    places = torch.arange(4097, 4097 + len(a))[None]
    reference = keys_at(twin(model), torch.tensor([a]), places)[0][0]
    fresh = keys_at(model, torch.tensor([a]), places)[0][0]
    first = cached_at(store.blend([far, a, [5]]), 0, 0)[0]
    # One rounding more than eager has: of the cached keys, before they are rotated.
    assert_close_to_reference(first, fresh, reference)
    for gap in (100, 7, 0) * 13:
        store.blend([*([ids(gap)] if gap else []), a, [5]])
    assert torch.equal(cached_at(store.blend([far, a, [5]]), 0, 0)[0], first)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_the_prompts(side, scene):
    model, store, a, b, question = scene
    rows = [[a, b, question], [b, ids(3)], [a]]
    blended = store.blend(rows, padding_side=side)
    with torch.no_grad():
        logits = model(**blended).logits
    exact = twin(model)
    for n, parts in enumerate(rows):
        flat = [token for part in parts for token in part]
        kept = blended.attention_mask[n].bool()
        assert blended.input_ids[n][kept].tolist() == flat
        assert blended.position_ids[n][kept].tolist() == list(range(len(flat)))
        alone, _ = full_prefill(model, flat)
        assert_close_to_reference(logits[n][kept], alone, full_prefill(exact, flat)[0])
    chunks = store.blend(rows, padding_side=side).past_key_values.layers[0].reuse.chunks
    assert chunks.max(1).values.tolist() == [1, 0, 0]
    assert (chunks >= 0).sum(1).tolist() == [len(a) + len(b), len(b), len(a) - 1]


def test_batched_keys_are_where_the_rows_have_them(scene):
    model, store, a, b, question = scene
    blended = store.blend([[a, b, question], [b, a, [5]]])
    for row, (parts, number) in enumerate((([a, b], 1), ([b, a], 1))):
        flat = [*parts[0], *parts[1]]
        places = torch.arange(len(flat))[None]
        inputs = torch.tensor([flat]), places
        fresh, reference = keys_at(model, *inputs)[0][0], keys_at(twin(model), *inputs)[0][0]
        keys, _ = cached_at(blended, 0, number, row)
        span = slice(len(parts[0]), None)
        assert_close_to_reference(keys, fresh[:, span], reference[:, span])


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3Text"])
def test_generate_gives_what_it_gives_without(family):
    model = tiny_model(family, torch.float32)
    a, b, question = ids(9), ids(13), ids(7)
    store = store_of(model, a, b)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    plain = model.generate(torch.tensor([a + b + question]), **options)
    blended = store.blend([a, b, question])
    assert torch.equal(model.generate(**blended, **options), plain)
    # Every token is in the cache but the last one, which nothing followed.
    assert blended.past_key_values.get_seq_length() == plain.shape[1] - 1
    batch = store.blend([[a, b, question], [b, a[:4]]])
    padded = model.generate(batch.input_ids, attention_mask=batch.attention_mask, **options)
    assert torch.equal(model.generate(**batch, **options), padded)


def test_generate_with_beams_and_several_sequences(scene):
    model, store, a, b, question = scene
    prompt = torch.tensor([a + b + question])
    for options in ({"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 4}):
        options |= {"max_new_tokens": 5, "do_sample": False}
        plain = model.generate(prompt, **options)
        assert torch.equal(model.generate(**store.blend([a, b, question]), **options), plain)


def test_pad_ids_inside_of_a_prompt_are_no_padding(scene):
    model, store, a, _, question = scene
    pad = model.generation_config.pad_token_id
    chunk = [5, pad, pad, 6]
    blended = store.blend([chunk, a, question])
    assert blended.attention_mask.all() and blended.position_ids is None
    logits, _ = full_prefill(model, chunk + a + question)
    out = model.generate(
        **blended, max_new_tokens=1, output_logits=True, return_dict_in_generate=True
    )
    torch.testing.assert_close(out.logits[0][0], logits[-1])


def test_decoding_and_branching_go_on_from_the_blended_cache(scene):
    model, store, a, b, question = scene
    row, new = a + b + question, ids(3)
    blended = store.blend([a, b, question])
    with torch.no_grad():
        model(**blended, logits_to_keep=1)
        shared = SharedPrefixCache(blended.past_key_values, branches=3)
        tokens = torch.tensor([[t] for t in new])
        branched = model(tokens, past_key_values=shared).logits[:, 0]
        cache = blended.past_key_values
        cache.batch_repeat_interleave(3)
        repeated = model(tokens, past_key_values=cache).logits[:, 0]
    for n, token in enumerate(new):
        plain = full_prefill(model, [*row, token])[0][-1]
        exact = full_prefill(twin(model), [*row, token])[0][-1]
        assert_close_to_reference(branched[n], plain, exact)
        assert_close_to_reference(repeated[n], plain, exact)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.layers[0].keys.shape[::2] == (1, len(row))


def test_a_prompt_comes_once_and_whole(scene):
    model, store, a, b, question = scene
    blended = store.blend([a, b, question])
    cache = blended.past_key_values
    for change in (
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(ValueError, match="before the prefill"):
            change()
    with pytest.raises(ValueError, match="layer 0 of the prefill cache is empty"):
        SharedPrefixCache(cache, branches=2)
    with torch.no_grad(), pytest.raises(ValueError, match="expected 29 tokens, got 7"):
        model(blended.input_ids[:, :7], past_key_values=cache)
    with pytest.raises(ValueError, match=r"expected 29 tokens, got 7 .*prefill_chunk_size"):
        model.generate(**store.blend([a, b, question]), prefill_chunk_size=7, max_new_tokens=1)
    rows = store.blend([[a, question], [b, question]])
    with torch.no_grad(), pytest.raises(ValueError, match="expected 2 rows or a multiple, got 3"):
        model(rows.input_ids[:1].expand(3, -1), past_key_values=rows.past_key_values)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match=r"values of torch.float32, .* computes torch.bfloat16"):
            model(**blended)
    with torch.no_grad():
        model(**blended)
        more = model(torch.tensor([[5, 6]]), past_key_values=cache).logits[0]
    torch.testing.assert_close(more, full_prefill(model, a + b + question + [5, 6])[0][-2:])
    with pytest.raises(ValueError, match="blend it again"):
        cache.reset()
    with pytest.raises(ValueError, match="released"):
        cache.rotated(0)


def test_nothing_cached_and_all_cached(scene):
    model, store, a, b, question = scene
    fresh = store.blend([question, ids(5)])
    assert fresh.past_key_values.layers[0].cached is None and fresh.report.reused == 0
    everything = store.blend([b, a])
    reuse = everything.past_key_values.layers[0].reuse
    assert reuse.fresh_rows.tolist() == [[len(a) + len(b) - 2, len(a) + len(b) - 1]]
    assert reuse.chunks[0].tolist() == [0] * len(b) + [1] * (len(a) - 1) + [-1]
    lone = store_of(model, [7]).blend([[7]])
    assert lone.report.reused == 0
    for blended, row in ((everything, b + a), (lone, [7])):
        with torch.no_grad():
            logits = model(**blended, logits_to_keep=1).logits[0]
        torch.testing.assert_close(logits, full_prefill(model, row)[0][-1:])


def test_how_many_tokens_are_fresh_is_no_other_graph(scene):
    """A prompt that ends in a cached chunk has one; compilers take a size of 1 for a constant."""
    model, store, a, b, question = scene
    backend = Counting()
    fn = torch.compile(model, backend=backend)
    with torch.no_grad():
        for parts in ([a, b, question], [a, a, b, question[:3]]):  # one length, then all
            fn(**store.blend(parts), logits_to_keep=1)
        known = len(backend.graphs)
        for parts in ([b, a], [a, b, a], [a, question[:1]], [question, a, question[:2], b, b]):
            logits = fn(**store.blend(parts), logits_to_keep=1).logits
            row = [token for part in parts for token in part]
            torch.testing.assert_close(logits[0], full_prefill(model, row)[0][-1:])
    assert len(backend.graphs) == known == 2


class Counting:
    """A backend that keeps the graphs it is given and runs them eagerly."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph

    def markers(self):
        targets = [str(node.target) for node in self.graphs[-1].graph.nodes]
        return sum("reuse_kv" in t for t in targets), sum("take_kv" in t for t in targets)


def test_captured_whole_with_a_marker_a_layer():
    model, backend = tiny_model("Gemma3Text", torch.float32), Counting()
    a, b, question = ids(9), ids(13), ids(7)
    store = store_of(model, a, b)
    forward = torch.compile(model, backend=backend, fullgraph=True)
    parts = [[a, b, question], [b, a, [5]]]
    with torch.no_grad():
        blended = store.blend(parts)
        got = forward(**blended, logits_to_keep=1).logits
        wanted = model(**store.blend(parts), logits_to_keep=1).logits
    torch.testing.assert_close(got, wanted)
    assert backend.markers() == (2, 0)
    assert blended.past_key_values.get_seq_length() == blended.input_ids.shape[1]
    assert blended.past_key_values.layers[0].cached is None
    SharedPrefixCache(blended.past_key_values, branches=2)


@pytest.mark.parametrize(("dynamic", "compiles"), [(None, 2), (True, 1)])
def test_few_compilations_for_many_prompts(dynamic, compiles):
    model, backend = tiny_model("Llama", torch.float32), Counting()
    forward = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    store = ChunkStore(model)
    for step in range(4):
        a, b, question = ids(9 + step), ids(13 + 2 * step), ids(7 + 3 * step)
        store.add(a), store.add(b)
        parts = [a, b, a, question] if step % 2 else [b, a, question]
        with torch.no_grad():
            got = forward(**store.blend(parts), logits_to_keep=1).logits
            wanted = model(**store.blend(parts), logits_to_keep=1).logits
        torch.testing.assert_close(got, wanted)
    assert len(backend.graphs) == compiles


def test_sine_and_cosine_are_no_work_of_the_graph(scene):
    model, store, a, b, question = scene
    backend = Counting()
    forward = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        forward(**store.blend([a, b, question]))
    own = [n for n in backend.graphs[0].graph.nodes if n.target in ("cos", torch.cos)]
    assert len(own) == 1  # the model's rotary embedding


def test_repeated_rows_in_compiled_code(scene):
    """`generate` repeats the rows of the prompt; the cached ones follow."""
    model, store, a, b, question = scene
    backend = Counting()
    forward = torch.compile(model, backend=backend, fullgraph=True)
    blended = store.blend([a, b, question])
    with torch.no_grad():
        rows = blended.input_ids.repeat_interleave(3, 0)
        got = forward(rows, past_key_values=blended.past_key_values).logits
        wanted = model(rows).logits
    torch.testing.assert_close(got, wanted)
    assert backend.markers() == (2, 0)


def test_autocast_in_compiled_code():
    """Keys are then float32 and values bfloat16."""
    model = tiny_model("Llama", torch.float32)
    a, question = ids(9), ids(7)
    forward = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        store = store_of(model, a)
        got = forward(**store.blend([a, question])).logits
        wanted = model(**store.blend([a, question])).logits
    assert torch.equal(got, wanted)


def test_constructor_says_what_is_wrong():
    with pytest.raises(ValueError, match="come together"):
        BlendCache([], [(torch.zeros(1, 1, 2, 4),) * 2])
    with pytest.raises(ValueError, match="0 layers have rotations"):
        BlendCache([])

"""SharedPrefixCache against a DynamicCache expanded once: same tensors, logits and tokens.

Eager only, in float64; the compiled side is tests/e2e. The suffix is longer than the prefix in
most tests, so that no error in one hides behind the other.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from support.hf_models import FAMILIES, VOCABULARY, WINDOW, WINDOWED, tiny_model  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from torch_cascade.runtime.prefix_cache import SharedPrefixCache, cache_argument  # noqa: E402

BATCH, BRANCHES, PROMPT = 2, 3, 11
ROWS = BATCH * BRANCHES
STATIC = 17

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
both_suffixes = pytest.mark.parametrize("max_suffix", [None, STATIC], ids=["growing", "static"])
every_family = pytest.mark.parametrize("family", FAMILIES)


def prompts(batch: int = BATCH, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def decode(model, cache, blocks, **inputs):
    """Logits of feeding blocks of tokens [N, M] one after the other, [N, sum M, V]."""
    with torch.no_grad():
        steps = [model(b, **{cache_argument(model): cache}, **inputs).logits for b in blocks]
    return torch.cat(steps, dim=1)


def expanded_once(model, input_ids, branches=BRANCHES):
    cache = DynamicCache()
    decode(model, cache, [input_ids[:, :-1]])
    cache.batch_repeat_interleave(branches)
    return cache


def some_blocks(rows: int = ROWS, lengths=(1, 1, 5, 1, 4, 1)):
    return [torch.randint(3, VOCABULARY, (rows, length)) for length in lengths]


# --- decoding -------------------------------------------------------------------------------------


@every_family
def test_decode_equals_expanded_once(family):
    model, ids, blocks = tiny_model(family), prompts(), some_blocks()
    expected = decode(model, expanded_once(model, ids), blocks)
    growing = SharedPrefixCache.prefill(model, ids, BRANCHES)
    assert torch.equal(decode(model, growing, blocks), expected)
    static = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=STATIC)
    torch.testing.assert_close(decode(model, static, blocks), expected)
    whole = torch.cat([ids[:, :-1].repeat_interleave(BRANCHES, 0), *blocks], dim=1)
    truth = decode(model, None, [whole], use_cache=False)[:, PROMPT - 1 :]
    torch.testing.assert_close(expected, truth)


@pytest.mark.parametrize("family", ["Llama", *WINDOWED])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_unwritten_slots_are_never_seen(family, attention):
    model, ids = tiny_model(family, attn_implementation=attention), prompts()
    blocks = some_blocks()
    expected = decode(model, SharedPrefixCache.prefill(model, ids, BRANCHES), blocks)
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=STATIC)
    for layer in cache.layers:
        layer.suffix_keys.uniform_(-9, 9)
        layer.suffix_values.fill_(1e3)
    # float32, because that is what transformers' own attention computes its softmax in.
    torch.testing.assert_close(decode(model, cache, blocks).float(), expected.float())


def test_every_prefix_key_and_the_own_suffix_are_seen():
    """The comparisons above would notice one wrong key: each one changes the logits."""
    model, ids, blocks = tiny_model("Llama"), prompts(), some_blocks(lengths=(1, 1))
    expected = decode(model, SharedPrefixCache.prefill(model, ids, BRANCHES), blocks)
    for position in range(PROMPT - 1):
        cache = SharedPrefixCache.prefill(model, ids, BRANCHES)
        cache.layers[0].prefix_values[1, :, position].neg_()
        change = (decode(model, cache, blocks) - expected).abs().amax(dim=(1, 2))
        assert change[:BRANCHES].max() == 0 and change[BRANCHES:].min() > 1e-6


@both_suffixes
@pytest.mark.parametrize("family", ["Llama", "GPT2", *WINDOWED])
def test_left_padded_prompts(family, max_suffix):
    """Each padded prompt decodes as it would alone."""
    model, long, short = tiny_model(family), prompts(1), prompts(1, PROMPT - 4)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 4, dtype=torch.int64), short], 1)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, mask, max_suffix)
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    tokens = model.generate(
        ids.repeat_interleave(BRANCHES, 0),
        attention_mask=mask.repeat_interleave(BRANCHES, 0),
        past_key_values=cache,
        **options,
    )
    for row, alone in ((0, long), (BRANCHES, short)):
        expected = model.generate(alone, **options)[0, alone.shape[1] :]
        assert tokens[row : row + BRANCHES, PROMPT:].tolist() == [expected.tolist()] * BRANCHES


# --- generate -------------------------------------------------------------------------------------

MODES = {
    "sampling": {"do_sample": True, "num_return_sequences": BRANCHES},
    "beams": {"num_beams": BRANCHES},
    "all beams": {"num_beams": BRANCHES, "num_return_sequences": BRANCHES},
    "beam sampling": {"num_beams": BRANCHES, "do_sample": True},
}


@both_suffixes
@every_family
@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_the_stock_tokens(family, mode, max_suffix):
    model, ids = tiny_model(family), prompts()
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=max_suffix)
    options = MODES[mode] | {"max_new_tokens": STATIC, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(1)
    expected = model.generate(ids, **options, past_key_values=DynamicCache())
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, **options, past_key_values=cache), expected)


@both_suffixes
def test_greedy_with_prompts_repeated_by_hand_and_a_longer_question(max_suffix):
    """Branches may continue the shared prefix with prompts of their own."""
    model, ids = tiny_model("Qwen3"), prompts()
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=max_suffix)
    questions = torch.cat([ids.repeat_interleave(BRANCHES, 0), *some_blocks(lengths=(4,))], 1)
    options = {"do_sample": False, "max_new_tokens": 9}
    expected = model.generate(questions, **options)
    assert torch.equal(model.generate(questions, past_key_values=cache, **options), expected)


@both_suffixes
def test_reset_serves_the_next_branches(max_suffix):
    model, ids, blocks = tiny_model("Llama"), prompts(), some_blocks()
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=max_suffix)
    first = decode(model, cache, blocks)
    decode(model, cache, some_blocks(lengths=(1, 2)))
    cache.reset()
    assert int(cache.get_seq_length()) == PROMPT - 1
    assert torch.equal(decode(model, cache, blocks), first)


# --- the cache alone, against a DynamicCache under any sequence of operations ---------------------


def random_cache(layers: int = 2, batch: int = BATCH, length: int = 4) -> DynamicCache:
    """Keys with 3 heads of 4 features, values with 3 heads of 5."""
    shapes = (batch, 3, length, 4), (batch, 3, length, 5)
    return DynamicCache([(torch.randn(shapes[0]), torch.randn(shapes[1])) for _ in range(layers)])


def update_both(shared, stock, length: int) -> None:
    rows = stock.layers[0].keys.shape[0]
    for index in range(len(stock)):
        keys, values = torch.randn(rows, 3, length, 4), torch.randn(rows, 3, length, 5)
        outputs = shared.update(keys, values, index)
        for ours, theirs in zip(outputs, stock.update(keys, values, index), strict=True):
            assert torch.equal(ours[..., : theirs.shape[-2], :], theirs)


def apply(operation: str, argument: int, shared, stock) -> None:
    rows, branches = shared.layers[0].batch_size, shared.branches
    generator = torch.Generator().manual_seed(argument)
    pick = lambda high, count: torch.randint(high, (count,), generator=generator)  # noqa: E731
    if operation == "update":
        update_both(shared, stock, 1 + argument % 3)
    elif operation == "reorder":
        beams = torch.arange(rows) // branches * branches + pick(branches, rows)
        shared.reorder_cache(beams)
        stock.reorder_cache(beams)
    elif operation == "crop":
        count = argument % int(shared.get_seq_length())
        shared.crop(-count)
        stock.crop(-count)
    elif operation == "repeat" and rows < 20:
        shared.batch_repeat_interleave(1 + argument % 3)
        stock.batch_repeat_interleave(1 + argument % 3)
    elif operation == "select":
        indices = pick(rows, 1 + argument % 7)
        indices = indices.sort().values if argument % 2 else indices
        shared.batch_select_indices(indices)
        stock.batch_select_indices(indices)


OPERATIONS = st.tuples(
    st.sampled_from(["update", "update", "reorder", "crop", "repeat", "select"]),
    st.integers(0, 999),
)


@both_suffixes
@settings(deadline=None, max_examples=60)
@given(operations=st.lists(OPERATIONS, max_size=8), branches=st.integers(1, 4))
def test_any_sequence_of_operations(max_suffix, operations, branches):
    prefill = random_cache()
    originals = [(layer.keys.clone(), layer.values.clone()) for layer in prefill.layers]
    stock = DynamicCache(originals)
    stock.batch_repeat_interleave(branches)
    shared = SharedPrefixCache(prefill, branches, 3 * 8 if max_suffix else None)
    for operation, argument in operations:
        apply(operation, argument, shared, stock)
    for ours, theirs in zip(shared.layers, stock.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert int(ours.get_seq_length()) == theirs.get_seq_length()
    for layer, (keys, values) in zip(prefill.layers, originals, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_a_regular_selection_goes_on_sharing():
    prefill = random_cache()
    cache = SharedPrefixCache(prefill, branches=4)
    update_both(cache, stock := expanded(prefill, 4), 2)
    cache.batch_select_indices(torch.tensor([1, 3, 6, 7]))  # two branches of each request
    assert cache.branches == 2
    assert cache.layers[0].prefix_keys.data_ptr() == prefill.layers[0].keys.data_ptr()
    cache.batch_select_indices(torch.tensor([True, True, False, False]))  # request 0
    assert cache.branches == 2 and cache.layers[0].prefix_keys.shape[0] == 1
    stock.batch_select_indices(torch.tensor([1, 3]))
    assert torch.equal(cache.layers[1].values, stock.layers[1].values)


def expanded(prefill: DynamicCache, branches: int) -> DynamicCache:
    stock = DynamicCache([(layer.keys, layer.values) for layer in prefill.layers])
    stock.batch_repeat_interleave(branches)
    return stock


def test_two_caches_share_one_prefix_and_never_write_it():
    prefill = random_cache()
    before = prefill.layers[1].keys.clone()
    caches = [SharedPrefixCache(prefill, 3), SharedPrefixCache(prefill, 5, max_suffix=4)]
    for cache, branches in zip(caches, (3, 5), strict=True):
        update_both(cache, expanded(prefill, branches), 2)
        assert cache.layers[1].prefix_keys.data_ptr() == prefill.layers[1].keys.data_ptr()
    prefill.update(torch.randn(BATCH, 3, 1, 4), torch.randn(BATCH, 3, 1, 5), 1)
    assert all(torch.equal(cache.layers[1].prefix_keys, before) for cache in caches)


def test_the_static_buffer_keeps_its_address():
    cache = SharedPrefixCache(random_cache(), 3, max_suffix=4)
    address = cache.layers[0].suffix_keys.data_ptr(), cache.layers[0].written.data_ptr()
    cache.reorder_cache(torch.tensor([2, 1, 1, 5, 4, 3]))
    cache.crop(-1)
    cache.reset()
    assert address == (
        cache.layers[0].suffix_keys.data_ptr(),
        cache.layers[0].written.data_ptr(),
    )


@pytest.mark.parametrize("max_suffix", [None, 6])
def test_what_transformers_asks_a_cache(max_suffix):
    cache = SharedPrefixCache(random_cache(), 3, max_suffix)
    assert (len(cache), cache.batch_size, cache.branches) == (2, ROWS, 3)
    assert cache.is_initialized and cache.is_croppable and not any(cache.is_sliding)
    assert cache.is_compileable is (max_suffix is not None)
    assert int(cache.get_seq_length()) == 4
    assert cache.get_mask_sizes(2, 0) == ((4 + 2, 0) if max_suffix is None else (4 + 6, 0))
    assert cache.get_max_length() == (-1 if max_suffix is None else 4 + 6)
    assert f"branches=3, prefix=4, max_suffix={max_suffix})" in repr(cache)


# --- what a prefill may be ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_a_static_prefill_is_viewed_up_to_its_length(family):
    model, ids, blocks = tiny_model(family), prompts(length=WINDOW), some_blocks()
    prefill = StaticCache(config=model.config, max_cache_len=WINDOW + 5)
    decode(model, prefill, [ids[:, :-1]])
    cache = SharedPrefixCache(prefill, BRANCHES)
    assert cache.layers[0].prefix_length == WINDOW - 1
    expected = decode(model, expanded_once(model, ids), blocks)
    torch.testing.assert_close(decode(model, cache, blocks), expected)


def test_pairs_of_tensors_are_a_prefill():
    prefill = random_cache()
    pairs = ((layer.keys, layer.values) for layer in prefill.layers)
    update_both(SharedPrefixCache(pairs, 3), expanded(prefill, 3), 2)


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_window_that_dropped_tokens_is_refused(family, kind):
    model = tiny_model(family)
    options = {"max_cache_len": 30} if kind is StaticCache else {}
    prefill = kind(config=model.config, **options)
    decode(model, prefill, [prompts(length=WINDOW - 1)])
    SharedPrefixCache(prefill, BRANCHES)  # nothing dropped yet
    decode(model, prefill, [prompts(length=4)])
    with pytest.raises(ValueError, match=r"prefill with DynamicCache\(\) without config"):
        SharedPrefixCache(prefill, BRANCHES)


def unlike_layers():
    return [(torch.zeros(2, 1, n, 4), torch.zeros(2, 1, n, 4)) for n in (5, 6)]


def value_shorter():
    return [(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 4, 4))]


def offloaded():
    cache = random_cache()
    cache.offloading = True
    return cache


def quantised():
    layer = type("QuantoLayer", (type(random_cache().layers[0]),), {})()
    return transformers.cache_utils.Cache(layers=[layer])


REFUSED = {
    "layers differ": (unlike_layers, ValueError, "layer 1: keys hold 6 tokens of 2 prompts"),
    "values differ": (value_shorter, ValueError, "layer 0: values hold 4 tokens"),
    "no layer": (DynamicCache, ValueError, "no layers: run the prompt first"),
    "no token": (lambda: random_cache(length=0), ValueError, "is empty: run the prompt first"),
    "offloaded": (offloaded, TypeError, "offloaded"),
    "quantised": (quantised, TypeError, "layer 0, a QuantoLayer"),
    "encoder-decoder": (
        lambda: transformers.EncoderDecoderCache(random_cache(), random_cache()),
        TypeError,
        "not an EncoderDecoderCache",
    ),
    "itself": (lambda: SharedPrefixCache(random_cache(), 2), TypeError, "a GrowingLayer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_prefill_caches(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        SharedPrefixCache(make(), 2)


def test_an_uninitialised_layer_is_refused():
    prefill = DynamicCache(config=tiny_model("Llama").config)
    with pytest.raises(ValueError, match="layer 0 of the prefill cache is empty"):
        SharedPrefixCache(prefill, 2)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, None), (2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        SharedPrefixCache(random_cache(), *sizes)


@pytest.mark.parametrize(("sizes", "name"), [(("3", None), "branches"), ((2, 4.0), "max_suffix")])
def test_sizes_that_are_no_integers_are_refused(sizes, name):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
        SharedPrefixCache(random_cache(), *sizes)


def test_a_prompt_without_a_batch_axis_is_refused():
    with pytest.raises(ValueError, match=r"input_ids must be \[prompts, tokens\], got \[4\]"):
        SharedPrefixCache.prefill(tiny_model("Llama"), torch.arange(4), BRANCHES)


@both_suffixes
def test_prompts_not_repeated_for_each_branch(max_suffix):
    model, ids = tiny_model("Llama"), prompts()
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=max_suffix)
    with pytest.raises(ValueError, match=r"expected 6 rows \(2 prefilled x 3 branches\), got 2"):
        decode(model, cache, [ids[:, -1:]])


def test_a_prompt_of_one_token_is_refused():
    with pytest.raises(ValueError, match="one token must stay uncached"):
        SharedPrefixCache.prefill(tiny_model("Llama"), prompts(length=1), BRANCHES)


def test_a_full_buffer_refuses_before_it_writes():
    model, ids = tiny_model("Llama"), prompts()
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=5)
    decode(model, cache, some_blocks(lengths=(1, 3)))
    before = cache.layers[0].suffix_keys.clone()
    for refused in (lambda: decode(model, cache, some_blocks(lengths=(2,))), overfull(cache)):
        with pytest.raises(ValueError, match="max_suffix=5 tokens: 4 are written, 2 more"):
            refused()
    assert int(cache.get_seq_length()) == PROMPT - 1 + 4
    assert torch.equal(cache.layers[0].suffix_keys, before)
    decode(model, cache, some_blocks(lengths=(1,)))


def overfull(cache):
    keys, values = cache.layers[0].prefix_keys[:, :, :2], cache.layers[0].prefix_values[:, :, :2]
    return lambda: cache.update(
        keys.repeat_interleave(BRANCHES, 0), values.repeat_interleave(BRANCHES, 0), 0
    )


def test_generate_beyond_the_buffer_is_an_error():
    model, ids = tiny_model("Llama"), prompts()
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=5)
    options = {"num_return_sequences": BRANCHES, "do_sample": True, "min_new_tokens": 6}
    with pytest.raises(ValueError, match="max_suffix=5 tokens: 5 are written, 1 more"):
        model.generate(ids, past_key_values=cache, max_new_tokens=6, **options)


@both_suffixes
def test_a_beam_that_leaves_its_request_is_an_error(max_suffix):
    cache = SharedPrefixCache(random_cache(), 3, max_suffix)
    with pytest.raises(ValueError, match="a beam left its request"):
        cache.reorder_cache(torch.tensor([0, 1, 3, 3, 4, 5]))


@both_suffixes
def test_crop_takes_minus_a_count_that_leaves_a_token(max_suffix):
    cache = SharedPrefixCache(random_cache(), 3, max_suffix)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(2)
    with pytest.raises(ValueError, match="cannot crop 4 of 4 tokens"):
        cache.crop(-4)


def test_no_row_selected_is_an_error():
    with pytest.raises(ValueError, match="at least one row"):
        SharedPrefixCache(random_cache(), 3).batch_select_indices(torch.tensor([], dtype=int))


def test_the_cache_argument_is_the_one_forward_has():
    model = tiny_model("Llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(model, DynamicCache(), [prompts()])
    assert cache_argument(model) in ("cache", "past_key_values")

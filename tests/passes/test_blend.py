"""The blend pass on whole models: ratios, stages, masks, exits, what it must never do."""

from unittest import mock

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.blend_models import (
    arguments,
    blended,
    expected,
    full,
    model_of,
    prefill_of,
    prompt_of,
)
from support.reuse_models import MarkedLayer
from support.tolerance import assert_close_to_reference
from transformers import Cache, DynamicCache

from torch_cascade import SharedPrefixCache, reuse_kv
from torch_cascade.compiler.backend import recent
from torch_cascade.compiler.report import Reason
from torch_cascade.passes import token_attention

ROWS = [[7, 9, 5], [5, 4, 7, 5]]
GAPS = [[6, -4, 8, 3], [5, -2, 7, 5]]  # parts that are not cached stand between those that are
FORCED = {"decide": "always", "strict": True}


def assert_like(got, usual, exact):
    """Logits and every layer's keys and values are as close to float64 as eager code's are."""
    assert_close_to_reference(got.logits, usual.logits, exact.logits)
    for layers in zip(got.caches, usual.caches, exact.caches, strict=True):
        for actual, eager, wanted in zip(*layers, strict=True):
            assert_close_to_reference(actual, eager, wanted)


def assert_blend(got, family, prompt, stages, layers=3, **options):
    """What the oracle gives; the rows it computes last."""
    model64 = model_of(family, torch.float64, layers)
    exact, rows = expected(model64, prompt.to(torch.float64), stages, **options)
    eager, same = expected(model_of(family, layers=layers), prompt, stages, **options)
    assert rows == same, "choose another seed: float32 decides otherwise"
    assert_like(got, eager, exact)
    return rows


class TestRatios:
    def test_one_is_full_recompute(self):
        model = model_of("Llama")
        prompt = prompt_of(model, ROWS)
        got = blended(model, prompt, recompute_ratio=1)
        exact = full(model_of("Llama", torch.float64), prompt.to(torch.float64))
        assert_like(got, full(model, prompt), exact)
        assert got.record.stages[0].now == prompt.length

    def test_one_is_not_worth_it(self):
        model = model_of("Llama", layers=2)
        prompt = prompt_of(model, ROWS)
        options = {"decide": "auto", "strict": False, "min_tokens": 0}
        got = blended(model, prompt, recompute_ratio=1, **options)
        assert got.record.declined.reason is Reason.NOT_PROFITABLE
        exact = full(model_of("Llama", torch.float64, 2), prompt.to(torch.float64))
        assert_like(got, full(model, prompt), exact)

    def test_zero_is_full_reuse(self):
        """Only the fresh tokens are computed, all of the question's among them."""
        model = model_of("Llama")
        prompt = prompt_of(model, ROWS)
        got = blended(model, prompt, recompute_ratio=0)
        rows = assert_blend(got, "Llama", prompt, {-1: 0})
        assert rows == prompt.fresh_rows.tolist()
        assert got.record.layers == ("reused",) * 3
        chosen = prompt.fresh_rows[0].tolist()
        kept = [j for j in range(prompt.length) if j not in chosen]
        for (k, _), (cached, _) in zip(got.caches, prompt.cached, strict=True):
            assert torch.equal(k[0][:, kept], cached[0][:, kept])

    def test_a_share_of_one_token_is_one_token(self):
        model = model_of("Llama", layers=2)
        prompt = prompt_of(model, [[7, 9, 5]])
        got = blended(model, prompt, recompute_ratio="1/1000")
        assert got.record.stages[0].now == 5 + 1
        assert_blend(got, "Llama", prompt, {1: "1/1000"}, layers=2)

    def test_all_cached_and_no_question(self):
        """The last token is always computed; what was cached whole is as good as new."""
        model = model_of("Llama")
        prompt = prompt_of(model, [[20, 1]])
        got = blended(model, prompt)
        exact = full(model_of("Llama", torch.float64), prompt.to(torch.float64))
        assert_like(got, full(model, prompt), exact)


@pytest.mark.parametrize(
    ("batch", "stages"),
    [(1, {1: "0.5", 2: "0.3", 3: "0.1"}), (2, {1: "0.5", 2: "0.2"}), (2, {1: "0.5", 2: "0"})],
)
def test_gradual_filtering(batch, stages):
    """Each stage chooses among the rows of the one before; windows, gaps and padding on the way."""
    layers = len(stages) + 2
    model = model_of("Mistral", layers=layers)
    prompt = prompt_of(model, GAPS[:batch], [0, 2][:batch])
    got = blended(model, prompt, check_layers=stages)
    assert_blend(got, "Mistral", prompt, stages, layers=layers)
    assert got.record.layers == ("computed", *["checked"] * len(stages), "reused")


@pytest.mark.parametrize("stages", [{1: "0.2"}, {1: "0.5", 2: "0.2"}])
def test_more_logits_than_fresh_tokens(stages):
    """The last tokens asked for are computed, cached or not."""
    model, call = model_of("Llama"), {"logits_to_keep": 4}
    prompt = prompt_of(model, [[7, 9, 2], [5, 4, 7, 2]])
    got = blended(model, prompt, call, check_layers=stages)
    rows = assert_blend(got, "Llama", prompt, stages, call=call)
    assert all(set(range(14, 18)) <= set(kept) for kept in rows)
    assert got.logits.shape[1] == 4


@pytest.mark.parametrize("stages", [{1: "0.2"}, {1: "0.5", 2: "0.2"}])
def test_logits_of_tokens_that_a_tensor_names(stages):
    """`logits_to_keep` as a tensor: of the last tokens backwards, as the oracle knows these."""
    model, call = model_of("Llama"), {"logits_to_keep": torch.tensor([-1, 16, -3, 14])}
    prompt = prompt_of(model, [[7, 9, 2], [5, 4, 7, 2]])
    got = blended(model, prompt, call, check_layers=stages)
    slices = blended(model, prompt, {"logits_to_keep": 4}, check_layers=stages)
    torch.testing.assert_close(got.logits, slices.logits.flip(1))
    call = {"logits_to_keep": torch.tensor([5, -1, 0])}
    everything = blended(model, prompt, call, recompute_ratio=1)
    exact = full(model_of("Llama", torch.float64), prompt.to(torch.float64), call)
    assert_like(everything, full(model, prompt, call), exact)


class TestOneArtefact:
    """Calls of one compiled function, with everything but the lengths alike."""

    def test_many_lengths(self):
        model = model_of("Llama")
        fn = torch.compile(prefill_of(model), backend=eager_cascade(**FORCED))
        before = recent()
        for parts in ([7, 9, 5], [11, 13, 6], [20, 10, 3], [40, 31, 9]):
            prompt = prompt_of(model, [parts])
            with torch.no_grad():
                logits, caches = fn(*arguments(prompt))
            got = type(full(model, prompt))(logits, tuple(caches))
            assert_blend(got, "Llama", prompt, {1: "0.15"})
        new = [r for r in recent() if all(r is not old for old in before)]
        assert len(new) == 2  # the first length alone, then all

    def test_values(self):
        """Of one shape: the order of fresh_rows, the future of a row, what is written to."""
        model = model_of("Mistral")
        prompt = prompt_of(model, ROWS)
        fn = torch.compile(prefill_of(model), backend=eager_cascade(selector="random", **FORCED))
        ids, fresh, chunks, mask, cached = arguments(prompt)
        copies = [x.clone() for pair in cached for x in pair]
        with torch.no_grad():
            logits, caches = fn(ids, fresh, chunks, mask, cached)
            turned, _ = fn(ids, fresh.flip(1), chunks, mask, cached)
            later = ids.clone()
            later[:, 13:] = (ids[:, 13:] + 1) % 90 + 3
            moved = tuple((k.clone(), v.clone()) for k, v in cached)
            for k, v in moved:
                k[:, :, 13:], v[:, :, 13:] = k[:, :, 13:] * 3, v[:, :, 13:] - 2
            other, changed = fn(later, fresh, chunks, mask, moved)
        assert torch.equal(turned, logits)
        now = [x for pair in cached for x in pair]
        assert all(torch.equal(a, b) for a, b in zip(copies, now, strict=True))
        assert not torch.equal(other, logits)
        computed = (caches[2][1] != cached[2][1]).any(3).any(1)
        assert computed[:, :13].any()  # some rows before the change were recomputed, and saw none
        for pair, other_pair in zip(caches, changed, strict=True):
            for a, b in zip(pair, other_pair, strict=True):
                assert torch.equal(a[:, :, :13], b[:, :, :13])


def test_a_row_of_a_batch_is_like_one_alone():
    model = model_of("Qwen3")
    prompt = prompt_of(model, ROWS)
    alone = blended(model, prompt.row(1))
    assert_blend(alone, "Qwen3", prompt.row(1), {1: "0.15"})
    together, rows = expected(model, prompt, {1: "0.15"})
    assert rows[1] == expected(model, prompt.row(1), {1: "0.15"})[1][0]
    exact, _ = expected(model_of("Qwen3", torch.float64), prompt.to(torch.float64), {1: "0.15"})
    assert_close_to_reference(alone.logits[0], together.logits[1], exact.logits[1])


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_attention_by_positions(family):
    """The GPU's form: no mask is read, windows neither."""
    model = model_of(family)
    prompt = prompt_of(model, ROWS)
    with mock.patch.object(token_attention, "reads_positions", lambda device: True):
        got = blended(model, prompt)
    assert_blend(got, family, prompt, {1: "0.15"})
    text = last_compilation().after
    assert text.count("cascade.attend(") == 2 and "q_positions" in text


class TestBothPasses:
    def test_branches_of_a_blended_prompt(self):
        """The blended cache is an ordinary prefix: eight branches decode from it with cascade."""
        model, branches = model_of("Llama"), 8
        prompt = prompt_of(model, [[7, 9, 5]])
        got = blended(model, prompt)
        prefix = DynamicCache()
        for number, (k, v) in enumerate(got.caches):
            prefix.update(k, v, number)
        cache = SharedPrefixCache(prefix, branches=branches)
        steps = torch.randint(3, 90, (branches, 1))
        backend = eager_cascade(**FORCED)
        with torch.no_grad():
            step = torch.compile(
                lambda ids: model(ids, past_key_values=cache).logits, backend=backend
            )
            decoded = step(steps)
            record = last_compilation()
        assert record.rewritten == 3 and record.blend is None
        wanted = _expanded(model, got.caches, steps)
        pairs = [(k.double(), v.double()) for k, v in got.caches]
        exact = _expanded(model_of("Llama", torch.float64), pairs, steps)
        assert_close_to_reference(decoded, wanted, exact)


def _expanded(model, caches, steps):
    """A decoding step from a cache of every branch."""
    naive = DynamicCache()
    for number, pair in enumerate(caches):
        naive.update(*(x.repeat(len(steps), 1, 1, 1) for x in pair), number)
    with torch.no_grad():
        return model(steps, past_key_values=naive).logits


class _Behind(MarkedLayer):
    """A layer that holds the first tokens already, exactly; the rest of the prompt is marked."""

    def __init__(self, k, v, fresh, before):
        super().__init__(k, v, fresh)
        self.before = before

    def update(self, k, v, *args, **kwargs):
        k, v = reuse_kv(k, v, *self.cached)
        self.keys = torch.cat([self.before[0], k], 2)
        self.values = torch.cat([self.before[1], v], 2)
        return self.keys, self.values

    def get_seq_length(self):
        return self.before[0].shape[2]

    def get_mask_sizes(self, query_length):
        return query_length + self.get_seq_length(), 0


@pytest.mark.parametrize("ratio", [1, 0])
def test_behind_tokens_that_are_in_the_cache(ratio):
    """Rows count from the marked part, keys from the whole: a prefix of its own length between."""
    model, model64, prefix = model_of("Llama"), model_of("Llama", torch.float64), 6
    prompt = prompt_of(model, [[prefix, 9, 7, 5]])
    fresh = prompt.fresh_rows - prefix

    def behind(model, prompt, computed, fresh):
        first = full(model, prompt).caches
        pairs = [(k[:, :, prefix:], v[:, :, prefix:]) for k, v in prompt.cached]
        heads = [(k[:, :, :prefix], v[:, :, :prefix]) for k, v in first]

        def fn(ids, fresh, pairs, heads):
            layers = [_Behind(k, v, fresh, b) for (k, v), b in zip(pairs, heads, strict=True)]
            cache = Cache(layers=layers)
            return model(ids, past_key_values=cache, logits_to_keep=1, use_cache=True).logits

        run = torch.compile(fn, backend=eager_cascade(recompute_ratio=ratio, **FORCED))
        with torch.no_grad():
            return (run if computed else fn)(prompt.ids[:, prefix:], fresh, pairs, heads)

    got = behind(model, prompt, True, fresh)
    assert last_compilation().blend.layers[-1] == "reused"
    if ratio == 1:
        exact = full(model64, prompt.to(torch.float64)).logits
        assert_close_to_reference(got, full(model, prompt).logits, exact)
    else:  # the prefix was alone in its context, so all of it counts as cached
        exact = expected(model64, prompt.to(torch.float64), {-1: 0})[0].logits
        assert_close_to_reference(got, expected(model, prompt, {-1: 0})[0].logits, exact)

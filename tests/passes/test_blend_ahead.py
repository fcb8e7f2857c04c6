"""The selector that runs the fresh tokens ahead: where they look in later layers."""

import contextlib
import itertools
import math
from fractions import Fraction
from unittest import mock

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.blend_choice import STAGES, assert_chooses
from support.blend_models import blended, expected, model_of, prompt_of
from support.blend_plain import WIDTH, Plain, compiled, inputs
from support.reuse_models import MarkedLayer
from support.tolerance import assert_close_to_reference
from transformers import Cache

from torch_cascade.compiler.report import Reason
from torch_cascade.passes import token_attention
from torch_cascade.runtime.reading import Reading
from torch_cascade.runtime.selection import by_question

ROWS = [[7, 9, 5], [5, 4, 7, 5]]
PADDED = [[7, 9, 5], [5, 4, 5, 5]]


def later(facts):
    """Nothing but where the fresh tokens look later."""
    return facts.later_peak_attention()


later.looks_ahead = True


class OverCached(MarkedLayer):
    """Fresh rows over the cached ones, below a check layer; what is computed, above."""

    def __init__(self, prompt, number, check):
        super().__init__(*prompt.cached[number], prompt.fresh_rows)
        self.below = number > check

    def update(self, k, v, *args, **kwargs):
        *cached, fresh = self.cached
        if self.below:
            rows = fresh[:, None, :, None]
            index = [rows.expand(-1, x.shape[1], -1, x.shape[3]) for x in (k, v)]
            new = zip(cached, index, (k, v), strict=True)
            k, v = (old.scatter(2, at, x.gather(2, at)) for old, at, x in new)
        self.keys, self.values = k, v
        return k, v


def look_ahead(model, prompt, check):
    """[N, L]: all tokens run, of which the fresh ones are what they are if they run alone."""
    layers = [OverCached(prompt, number, check) for number in range(len(prompt.cached))]
    options = {"past_key_values": Cache(layers=layers), "use_cache": True}
    if prompt.mask is not None:
        options["attention_mask"] = prompt.mask
        options["position_ids"] = (prompt.mask.cumsum(1) - 1).clamp(min=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(prompt.ids, output_attentions=True, **options)
    model.set_attn_implementation("sdpa")
    seen = torch.stack(out.attentions[check + 1 :])
    fresh = [
        rows[chunks[rows] < 0]
        for rows, chunks in zip(prompt.fresh_rows, prompt.chunks, strict=True)
    ]
    rows = [seen[:, n][:, :, own] for n, own in enumerate(fresh)]
    return torch.stack([row.amax(2).mean((0, 1)) for row in rows])


@pytest.mark.parametrize(
    ("family", "padding"),
    [("Llama", ()), ("Mistral", (0, 2)), ("Qwen2", ()), ("GPTNeoX", ()), ("Phi3", (2, 0))],
)
def test_where_the_fresh_tokens_look_in_later_layers(family, padding):
    """Both layers below the check; what fills up a row with fewer fresh tokens does not count."""
    prompt = prompt_of(model_of(family), PADDED if padding else ROWS, padding)
    seen, stages = look_ahead(model_of(family), prompt, 0), {0: "0.15"}
    metric = lambda n, *kv: seen[n]  # noqa: E731
    chosen = assert_chooses(family, prompt, metric, stages, selector=later, check_layers="0:0.15")
    assert chosen != expected(model_of(family), prompt, stages)[1], "as by values"


@contextlib.contextmanager
def readings_by_positions():
    """Yields whether each reading's log-sum-exp was known, runs of equal answers as one."""
    given, known = [], []
    made = Reading.__init__

    def spied(self, *args, **kwargs):
        made(self, *args, **kwargs)
        given.append(self.lse is not None)

    with (
        mock.patch.object(token_attention, "reads_positions", lambda device: True),
        mock.patch.object(Reading, "__init__", spied),
    ):
        yield known
    known += [answer for answer, _ in itertools.groupby(given)]


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_on_a_gpu_attention_says_what_the_probabilities_add_up_to(family):
    """No softmax of its own, but for the last layer, whose attention is not needed."""
    prompt = prompt_of(model_of(family), ROWS)
    seen, stages = look_ahead(model_of(family), prompt, 0), {0: "0.15"}
    metric = lambda n, *kv: seen[n]  # noqa: E731
    with readings_by_positions() as known:
        assert_chooses(family, prompt, metric, stages, selector=later, check_layers="0:0.15")
    assert known == [True, False]


def test_on_a_gpu_so_does_attention_in_bfloat16():
    """Its output is converted on the way."""
    model = model_of("Llama", torch.bfloat16)
    with readings_by_positions() as known:
        got = blended(model, prompt_of(model, ROWS), selector=later, check_layers="0:0.15")
    assert known == [True, False]
    assert got.record.layers == ("checked", "reused", "reused")


def test_one_row_of_a_batch():
    prompt = prompt_of(model_of("Llama"), [[7, 9, 5]])
    seen = look_ahead(model_of("Llama"), prompt, 1)
    assert_chooses("Llama", prompt, lambda n, *kv: seen[n], STAGES, selector=later)


class Oracle:
    """What a blend of `Plain` gives with `question`, token by token, in its dtype."""

    def __init__(self, model, x, cached, fresh, stages):
        self.model, self.x, self.cached, self.fresh = model, x, cached, fresh
        self.stages, self.scale = stages, (WIDTH // 4) ** -0.5

    def heads(self, number, x):
        made = self.model.qkv[number](x).view(*x.shape[:2], 3, 4, WIDTH // 4)
        return made.permute(2, 0, 3, 1, 4).unbind(0)

    def weights(self, q, k):
        places = torch.arange(k.shape[2])
        scores = q @ k.transpose(-1, -2) * self.scale
        return scores.masked_fill(places > places[:, None], -math.inf).softmax(-1)

    def layer(self, number, x, own):
        """x of the next layer, values, weights; `own` bool [N, L] are computed."""
        q, *new = self.heads(number, x)
        pairs = zip(new, self.cached[number], strict=True)
        k, v = (torch.where(own[:, None, :, None], one, old) for one, old in pairs)
        weights = self.weights(q, k)
        return x + (weights @ v).transpose(1, 2).flatten(2), v, weights

    def peaks(self):
        """By layer, [N, L]."""
        x, found = self.x, {}
        own = torch.zeros(x.shape[:2], dtype=torch.bool).scatter(1, self.fresh, True)
        first = min(self.stages)
        for number in range(len(self.model.qkv)):
            computed = own if number > first else torch.ones_like(own)
            x, _, weights = self.layer(number, x, computed)
            found[number] = weights[:, :, self.fresh[0]].amax(2).mean(1)
        return found

    def run(self):
        peaks, (batch, length, _) = self.peaks(), self.x.shape
        x, own = self.x, torch.ones(self.x.shape[:2], dtype=torch.bool)
        for number in range(len(self.model.qkv)):
            after, v, _ = self.layer(number, x, own)
            if number in self.stages:
                ahead = torch.stack([m for n, m in peaks.items() if n > number]).mean(0)
                wrong = ((v - self.cached[number][1]) ** 2).sum((1, 3)) / (v**2).sum((1, 3))
                count = math.ceil(self.stages[number] * (length - self.fresh.shape[1]))
                for n in range(batch):
                    scores = (wrong[n].sqrt() * ahead[n]).masked_fill(~own[n], -math.inf)
                    scores[self.fresh[n]] = math.inf
                    kept = scores.topk(count + self.fresh.shape[1]).indices
                    own[n] = torch.zeros(length, dtype=torch.bool).scatter(0, kept, True)
            x = after
        return x[:, -1:], own


@pytest.mark.parametrize(
    "stages", [{1: Fraction(3, 10)}, {0: Fraction(1, 2)}, {1: Fraction(1, 2), 3: Fraction(1, 5)}]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_question(stages, batch):
    """Each stage looks at the layers below it; all see the fresh tokens that ran ahead once."""
    model, (x, cached, fresh) = Plain(5), inputs(batch=batch, layers=5, tokens=31)
    with torch.no_grad():
        eager, rows = Oracle(model, x, cached, fresh, stages).run()
        double = [(k.double(), v.double()) for k, v in cached]
        exact, same = Oracle(Plain(5).double(), x.double(), double, fresh, stages).run()
    assert torch.equal(rows, same), "choose another seed: float32 decides otherwise"
    got, record = compiled(model, x, cached, fresh, selector="question", check_layers=stages)
    assert record.declined is None and record.ahead == 4 - min(stages)
    assert_close_to_reference(got, eager, exact)
    other, _ = compiled(model, x, cached, fresh, check_layers=stages)
    assert not torch.allclose(other, got)


def test_lengths_that_change():
    """One compilation, whose fresh tokens are of any number, too."""
    torch._dynamo.reset()
    model, stages, made = Plain(4), {1: Fraction(3, 10)}, set()
    backend = eager_cascade(decide="always", selector="question", check_layers=stages)
    fn = torch.compile(model, backend=backend)
    for tokens, count in ((31, 2), (47, 3), (59, 5)):
        x, cached, _ = inputs(layers=4, tokens=tokens)
        for tensor in (x, *(x for pair in cached for x in pair)):
            torch._dynamo.mark_dynamic(tensor, 1 if tensor is x else 2)
        fresh = torch.arange(tokens - count, tokens)[None]
        with torch.no_grad():
            eager, _ = Oracle(model, x, cached, fresh, stages).run()
            torch._dynamo.mark_dynamic(fresh, 1)
            got = fn(x, cached, fresh)
            double = [(k.double(), v.double()) for k, v in cached]
            exact, _ = Oracle(Plain(4).double(), x.double(), double, fresh, stages).run()
        made.add(id(last_compilation()))
        assert last_compilation().blend.declined is None
        assert_close_to_reference(got, eager, exact)
    assert len(made) == 1, "recompiled"


@pytest.mark.parametrize("selector", ["attention", "change", "question"])
def test_every_size_may_change(selector):
    """Cached heads and features have symbols of their own: only the marker compares them."""
    model, args = Plain(4), inputs(batch=2, layers=4, tokens=31)
    usual, _ = compiled(model, *args, selector=selector)
    torch._dynamo.reset()
    backend = eager_cascade(decide="always", selector=selector)
    with torch.no_grad():
        got = torch.compile(model, backend=backend, dynamic=True)(*args)
    assert last_compilation().blend.declined is None
    assert torch.allclose(got, usual, atol=1e-5)


def test_a_selector_says_that_it_looks_ahead():
    with pytest.raises(Exception, match="has no attribute `looks_ahead` that is true"):
        compiled(Plain(), *inputs(), selector=lambda facts: facts.later_peak_attention())


def test_there_are_later_layers_or_it_is_declined():
    args = inputs()
    _, record = compiled(Plain(), *args, selector="question", check_layers={2: 0.3})
    assert record.declined.reason is Reason.SELECTOR
    assert "no layer below the check layer" in record.declined.detail

    def own(facts):
        return by_question(facts)

    own.looks_ahead = True
    with pytest.raises(Exception, match="no layer below the check layer to look ahead at"):
        compiled(Plain(), *args, selector=own, check_layers={2: 0.3})


def test_so_there_are_at_each_check_where_tokens_are_chosen():
    """The last check stands at the last layer: it keeps some tokens, or none but the fresh ones."""
    args, model = inputs(layers=4), Plain(4)
    options = {"selector": "question", "check_layers": {1: 0.5, 3: 0.3}}
    got, record = compiled(model, *args, **options)
    assert record.declined.reason is Reason.SELECTOR and record.declined.node == "reuse_kv_3"
    assert "no layer below the check layer" in record.declined.detail
    with torch.no_grad():
        assert torch.allclose(got, model(*args), atol=1e-5)
    _, record = compiled(model, *args, selector="question", check_layers={1: 0.5, 3: 0})
    assert record.declined is None and record.ahead == 2

    def falls_back(facts):
        try:
            return by_question(facts)
        except ValueError as error:
            assert "no layer below the check layer" in str(error)
            return facts.change()

    falls_back.looks_ahead = True
    _, record = compiled(model, *args, **options | {"selector": falls_back})
    assert record.declined is None and [stage.layer for stage in record.stages] == [1, 3]


def test_what_a_selector_is_given_it_may_write_into():
    def negated(facts):
        facts.later_peak_attention().mul_(-1)
        return facts.later_peak_attention()

    negated.looks_ahead = True
    args = inputs()
    got, _ = compiled(Plain(), *args, selector=negated)
    usual, _ = compiled(Plain(), *args, selector=later)
    assert torch.equal(got, usual)


def test_nothing_is_run_ahead_for_a_selector_that_does_not_ask():
    def values(facts):
        return facts.v_deviation

    values.looks_ahead = True
    got, record = compiled(Plain(), *(args := inputs()), selector=values)
    assert record.declined is None and record.ahead == 0
    usual, _ = compiled(Plain(), *args, selector="v")
    assert torch.equal(got, usual)


def test_nothing_is_run_ahead_for_full_reuse():
    got, record = compiled(Plain(), *(args := inputs()), selector="question", recompute_ratio=0)
    assert record.declined is None and record.ahead == 0
    usual, _ = compiled(Plain(), *args, recompute_ratio=0)
    assert torch.equal(got, usual)

"""Selectors that ask how the fresh tokens read the prompt."""

import math
from fractions import Fraction

import pytest
import torch
from support.blend_choice import STAGES, assert_chooses
from support.blend_models import expected, model_of, prompt_of
from support.blend_plain import WIDTH, Plain, compiled, inputs
from support.leave_one import change
from support.tolerance import assert_close_to_reference
from transformers import AttentionInterface, DynamicCache

from torch_cascade import reuse_kv
from torch_cascade.compiler.report import Reason

ROWS = [[7, 9, 5], [5, 4, 7, 5]]
PADDED = [[7, 9, 5], [5, 4, 5, 5]]


def call_of(prompt):
    options = {"past_key_values": DynamicCache()}
    if prompt.mask is not None:
        options["attention_mask"] = prompt.mask
        options["position_ids"] = (prompt.mask.cumsum(1) - 1).clamp(min=0)
    return options


def probabilities(model, prompt, layer):
    """[N, Hq, L, L] of a layer, computed for all tokens by eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(prompt.ids, output_attentions=True, **call_of(prompt))
    model.set_attn_implementation("sdpa")
    return out.attentions[layer]


def queries(model, prompt, layer):
    """[N, Hq, L, D] of a layer, and the scale of its scores; computed for all tokens."""
    found = {}

    def spy(module, q, k, v, mask, *, scaling, **others):
        found[module.layer_idx] = q, scaling
        groups = module.num_key_value_groups
        scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
        scores = scores.masked_fill(~mask, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0)
        return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2), None

    AttentionInterface.register("spy", spy)
    model.set_attn_implementation("spy")
    length = prompt.length
    seen = torch.ones(len(prompt.ids), 1, length, length, dtype=torch.bool).tril()
    if prompt.mask is not None:
        seen = seen & prompt.mask[:, None, None].bool()
    with torch.no_grad():
        model(prompt.ids, **call_of(prompt) | {"attention_mask": seen})
    model.set_attn_implementation("sdpa")
    return *found[layer], seen


@pytest.mark.parametrize(("family", "padding"), [("Mistral", (0, 2)), ("Llama", ())])
def test_the_attention_of_the_question(family, padding):
    """Of the fresh tokens only, averaged over heads; it weighs how far the values moved."""
    model = model_of(family)  # eager masks of a float64 model are NaN in its float32 softmax
    rows = PADDED if padding else ROWS
    prompt = prompt_of(model, rows, padding)
    seen = probabilities(model, prompt, 1)
    mean = [seen[n][:, prompt.fresh_rows[n]].mean((0, 1)) for n in range(len(rows))]

    def metric(n, k, v, k_cached, v_cached):
        return mean[n].to(v) * ((v - v_cached) ** 2).sum((0, 2))

    chosen = assert_chooses(family, prompt, metric, selector="attention")
    assert chosen != expected(model_of(family), prompt, STAGES)[1], "as by values"


@pytest.mark.parametrize(("family", "padding"), [("Qwen3", (0, 2)), ("Llama", ())])
def test_what_the_question_would_read_differently(family, padding):
    """With one token at a time put back to its cached key and value; heads are grouped."""
    prompt = prompt_of(model_of(family), PADDED if padding else ROWS, padding)

    def metric_of(dtype):
        model = model_of(family, dtype)
        q, scale, seen = queries(model, prompt, 1)

        def metric(n, *kv):
            rows, heads = prompt.fresh_rows[n], q.shape[1]
            kv = [x.repeat_interleave(heads // x.shape[0], 0).to(dtype) for x in kv]
            return change(q[n][:, rows], *kv, seen[n, 0][rows], scale)

        return metric

    metrics = metric_of(torch.float32), metric_of(torch.float64)
    chosen = assert_chooses(family, prompt, metrics[0], exact_metric=metrics[1], selector="change")
    assert chosen != expected(model_of(family), prompt, STAGES)[1], "as by values"


def oracle(model, x, cached, fresh, stages):
    """What a blend of `Plain` gives with `change`, and the tokens that it computes last."""
    batch, length, _ = x.shape
    kept, places = torch.arange(length).expand(batch, -1), torch.arange(length)
    for number, qkv in enumerate(model.qkv):
        heads = qkv(x).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        q, *new = heads.unbind(0)
        fresh_kv = torch.zeros(batch, 1, length, 1, dtype=torch.bool)
        fresh_kv = fresh_kv.scatter(2, kept[:, None, :, None], True)
        pairs = zip(new, cached[number], strict=True)
        kv = [torch.where(fresh_kv, one, old) for one, old in pairs]
        if number in stages:
            seen, scale = places <= fresh[0][:, None], (WIDTH // 4) ** -0.5
            count = math.ceil(stages[number] * (length - fresh.shape[1]))
            best = []
            for n in range(batch):
                tensors = [y[n] for y in (*kv, *cached[number])]
                scores = change(q[n][:, fresh[n]], *tensors, seen, scale)
                scores[fresh[n]] = math.inf
                best.append(scores.topk(count + fresh.shape[1]).indices.sort().values)
            kept = torch.stack(best)
        scores = q @ kv[0].transpose(-1, -2) * (WIDTH // 4) ** -0.5
        scores = scores.masked_fill(places > places[:, None], -math.inf)
        x = x + (scores.softmax(-1) @ kv[1]).transpose(1, 2).flatten(2)
    return x[:, -1:], kept


def test_a_later_check_asks_of_the_tokens_that_are_kept():
    """Those that were not kept keep their copies at the later layer, so they change nothing."""
    model, (x, cached, fresh) = Plain(5), inputs(batch=2, layers=5, tokens=31)
    stages = {1: Fraction(1, 2), 3: Fraction(1, 5)}
    with torch.no_grad():
        eager, rows = oracle(model, x, cached, fresh, stages)
        double = [(k.double(), v.double()) for k, v in cached]
        exact, same = oracle(Plain(5).double(), x.double(), double, fresh, stages)
    assert torch.equal(rows, same), "choose another seed: float32 decides otherwise"
    got, record = compiled(model, x, cached, fresh, selector="change", check_layers=stages)
    assert [stage.now for stage in record.stages] == [17, 8]
    assert_close_to_reference(got, eager, exact)
    other, _ = compiled(model, x, cached, fresh, check_layers=stages)
    assert not torch.allclose(other, got)


class Wide(torch.nn.Module):
    """Its attention reads keys that are two of the cached ones side by side."""

    def __init__(self, side):
        super().__init__()
        self.side = side

    def forward(self, q, k, v, cached, fresh):
        for old in cached:
            k, v = reuse_kv(k, v, *old, fresh)
            read = torch.cat([k, k], 3) if self.side == "k" else k
            ask = torch.cat([q, q], 3) if self.side == "k" else q
            value = torch.cat([v, v], 3) if self.side == "v" else v
            out = torch.nn.functional.scaled_dot_product_attention(ask, read, value)
            q = q + out[..., : q.shape[3]]
            k, v = k + q, v - q
        return q[:, :, -1:]


@pytest.mark.parametrize("side", ["k", "v"])
def test_keys_that_are_not_the_cached_ones_are_declined(side):
    q, k, v, *old = torch.randn(9, 1, 2, 13, 6).unbind()
    cached = list(zip(old[::2], old[1::2], strict=True))
    call = Wide(side), q, k, v, cached, torch.tensor([[11, 12]])
    _, record = compiled(*call, selector="change")
    assert record.declined.reason is Reason.SELECTOR
    assert "its attention reads [1, 2, 13, 12], but [1, 2, 13, 6] are" in record.declined.detail
    _, record = compiled(*call, selector="attention")
    assert record.declined is None
    with pytest.raises(Exception, match=r"selector <lambda>: ValueError: change\(\) is not known"):
        compiled(*call, selector=lambda facts: facts.change())


# What an attention may read of the keys, or values, of two heads where it has four.
REPEATED = {
    "repeated": lambda x: x.repeat_interleave(2, 1),
    "expanded": lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, *x.shape[2:]),
}
OTHERS = {
    "heads in turn": lambda x: x.repeat(1, 2, 1, 1),
    "heads in turn, expanded": lambda x: x[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2),
    "scaled": lambda x: x.repeat_interleave(2, 1) * 3,
    "normed": lambda x: torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, 1),
    "heads exchanged": lambda x: x.flip(1).repeat_interleave(2, 1),
    "moved": lambda x: x.roll(1, 2).repeat_interleave(2, 1),
}


def reading(spelled, side):
    """Three layers whose attention reads what is spelled of the keys or the values."""

    def forward(q, k, v, cached, fresh):
        for old in cached:
            k, v = reuse_kv(k, v, *old, fresh)
            read = [(spelled if name == side else REPEATED["repeated"])(x) for name, x in kv(k, v)]
            q = q + torch.nn.functional.scaled_dot_product_attention(q, *read, is_causal=True)
            k, v = k + q[:, ::2], v - q[:, 1::2]
        return q[:, :, -1:]

    return forward


def kv(k, v):
    return ("k", k), ("v", v)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", REPEATED | OTHERS)
def test_of_what_is_read_the_cached_copy_is_known_or_it_is_declined(name, side):
    """Of other keys or heads, `change` would be of an attention that nobody computes."""
    k, v, *old = torch.randn(8, 1, 2, 13, 6).unbind()
    cached = list(zip(old[::2], old[1::2], strict=True))
    spelled, fresh = (REPEATED | OTHERS)[name], torch.tensor([[11, 12]])
    call = reading(spelled, side), torch.randn(1, 4, 13, 6), k, v, cached, fresh
    _, record = compiled(*call, selector="change")
    if name in REPEATED:
        assert record.declined is None
        return
    assert record.declined.reason is Reason.SELECTOR
    assert f"holds other {side} than those that are cached" in record.declined.detail
    _, record = compiled(*call, selector="attention")
    assert record.declined is None

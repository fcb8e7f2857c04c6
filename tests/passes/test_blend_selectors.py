"""Selectors: what they are told, what they choose, and what goes wrong."""

import pytest
import torch
from support.blend_models import (
    blended,
    expected,
    model_of,
    prompt_of,
)
from support.tolerance import assert_close_to_reference
from transformers import DynamicCache

ROWS = [[7, 9, 5], [5, 4, 7, 5]]


def assert_chooses(family, prompt, metric, stages=None, **options):
    """The pass blends as the oracle does with this metric."""
    stages = stages or {1: "0.15"}
    got = blended(model_of(family), prompt, **options)
    eager, rows = expected(model_of(family), prompt, stages, metric=metric)
    model64 = model_of(family, torch.float64)
    exact, same = expected(model64, prompt.to(torch.float64), stages, metric=metric)
    assert rows == same, "choose another seed: float32 decides otherwise"
    assert_close_to_reference(got.logits, eager.logits, exact.logits)
    return rows


def probabilities(model, prompt, layer):
    """[N, Hq, L, L] of a layer, computed for all tokens by eager attention."""
    model.set_attn_implementation("eager")
    options = {"output_attentions": True, "past_key_values": DynamicCache()}
    if prompt.mask is not None:
        options["attention_mask"] = prompt.mask
        options["position_ids"] = (prompt.mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(prompt.ids, **options).attentions[layer]
    model.set_attn_implementation("sdpa")
    return found


@pytest.mark.parametrize(("family", "padding"), [("Mistral", (0, 2)), ("Llama", ())])
def test_the_attention_of_the_question(family, padding):
    """Of the fresh tokens only, averaged over heads; it weighs how far the values moved."""
    model = model_of(family)  # eager masks of a float64 model are NaN in its float32 softmax
    rows = [[7, 9, 5], [5, 4, 5, 5]] if padding else ROWS
    prompt = prompt_of(model, rows, padding)
    seen = probabilities(model, prompt, 1)
    mean = [seen[n][:, prompt.fresh_rows[n]].mean((0, 1)) for n in range(len(rows))]

    def metric(n, k, v, k_cached, v_cached):
        return mean[n].to(v) * ((v - v_cached) ** 2).sum((0, 2))

    chosen = assert_chooses(family, prompt, metric, selector="attention")
    plain = expected(model, prompt, {1: "0.15"})[1]
    assert chosen != plain

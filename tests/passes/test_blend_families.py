"""A blend of every family equals an eager CacheBlend that shares no code with it."""

from unittest import mock

import pytest
import torch
from support.blend_models import blended, expected, full, model_of, prompt_of
from support.reuse_models import REUSING
from support.tolerance import assert_close_to_reference, max_error

from torch_cascade.passes import token_attention

ROWS = [[7, 9, 5], [5, 4, 7, 5]]  # chunk lengths of the batch rows; the last part is the question


def assert_blend(got, family, prompt, stages, **options):
    """As close to a float64 oracle as the float32 oracle is, in logits and every layer's cache."""
    model64 = model_of(family, torch.float64)
    exact, rows = expected(model64, prompt.to(torch.float64), stages, **options)
    eager, same = expected(model_of(family), prompt, stages, **options)
    assert rows == same, "choose another seed: float32 decides otherwise"
    assert_close_to_reference(got.logits, eager.logits, exact.logits)
    for layers in zip(got.caches, eager.caches, exact.caches, strict=True):
        for actual, usual, wanted in zip(*layers, strict=True):
            assert_close_to_reference(actual, usual, wanted)
    return exact, rows


@pytest.mark.parametrize("family", REUSING)
def test_family(family):
    model = model_of(family)
    prompt = prompt_of(model, ROWS)
    got = blended(model, prompt)
    assert got.record.layers == ("computed", "checked", "reused")
    exact, rows = assert_blend(got, family, prompt, {1: "0.15"})
    # What stands first was cached in the context it has here: no row is spent on it.
    assert all(min(kept) >= parts[0] for kept, parts in zip(rows, ROWS, strict=True))
    # The approximation shows: neither full recompute nor full reuse passes for it.
    whole, reuse = full(model, prompt), expected(model, prompt, {-1: 0})[0]
    error = max_error(got.logits, exact.logits)
    for other in (whole, reuse):
        assert max_error(other.logits, exact.logits) > 100 * error


@pytest.mark.parametrize("family", REUSING)
def test_family_by_positions(family):
    """As on a GPU: attention takes positions for masks, and keys that are not repeated."""
    model = model_of(family)
    prompt = prompt_of(model, ROWS)
    with mock.patch.object(token_attention, "reads_positions", lambda device: True):
        got = blended(model, prompt)
    assert got.record.layers == ("computed", "checked", "reused")
    assert_blend(got, family, prompt, {1: "0.15"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
def test_experts_that_are_sorted(family, dtype):
    """The default of transformers on many machines, by torch's grouped product or its own."""
    model, stages = model_of(family, dtype), {0: "0.6", 1: "0.15"}
    prompt = prompt_of(model, ROWS)
    eager, _ = expected(model, prompt, stages)
    exact, _ = expected(model_of(family, torch.float64), prompt.to(torch.float64), stages)
    model.set_experts_implementation("grouped_mm")
    got = blended(model, prompt, check_layers="0:0.6,1:0.15")
    assert got.record.layers == ("checked", "checked", "reused")
    assert_close_to_reference(got.logits, eager.logits, exact.logits)

"""Soft-cap, sinks and ALiBi of transformers' models: decoding through the cascade is as eager."""

from __future__ import annotations

import re

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.hf_models import EAGER_ONLY, EXPERTS, VOCABULARY, tiny_model
from support.tolerance import assert_close_to_reference
from transformers import DynamicCache

from torch_cascade.runtime.prefix_cache import SharedPrefixCache

P, T, STATIC = 13, 3, 11
# With a prompt that is padded the other way about: every pair of family, suffix and padding.
SUFFIX = dict(zip(EAGER_ONLY, (None, STATIC), strict=True))


def model_of(family):
    """A random model in which soft-cap and sinks matter: wide scores, sinks as large as they."""
    torch.manual_seed(0)
    model = tiny_model(family, torch.float32, attn_implementation="eager")
    if family in EXPERTS:
        model.set_experts_implementation("batched_mm")
    for name, parameter in model.named_parameters():
        if "q_proj.weight" in name:
            parameter.data.mul_(4)
        if name.endswith("sinks"):
            parameter.data.normal_().mul_(3)
    return model


def prefilled(model, ids, mask, dtype) -> DynamicCache:
    """Keys and values of prompts, always of a float32 prefill.

    In float64 Gemma 2 hides keys with a number that float32 does not have, and a query of the
    padding, which sees no key, is NaN.
    """
    prefill = DynamicCache()
    model.float()(ids, use_cache=True, past_key_values=prefill, attention_mask=mask)
    for layer in prefill.layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    model.to(dtype)
    return prefill


def decode(model, forward, ids, steps, mask=None, dtype=torch.float32, **options) -> torch.Tensor:
    """Logits of a few decoding steps on the branches of two prompts."""
    cache = SharedPrefixCache(prefilled(model, ids, mask, dtype), branches=T, **options)
    outputs = []
    for x in steps:
        if mask is not None:
            grown = torch.ones_like(x)
            mask = torch.cat([mask.repeat_interleave(len(x) // len(mask), 0), grown], 1)
        out = forward(x, past_key_values=cache, attention_mask=mask)
        outputs.append(out.logits)
    return torch.cat(outputs, 1)


def compared(model, ids, mask=None, **options):
    """Decode compiled, eagerly and in float64; returns the graph after the passes."""
    steps = [torch.randint(3, VOCABULARY, (len(ids) * T, n)) for n in (4, 1, 1)]
    run = torch.compile(model, backend=eager_cascade(decide="always", verify=True))
    with torch.no_grad():
        actual = decode(model, run, ids, steps, mask, **options)
        record = last_compilation()
        eager = decode(model, model, ids, steps, mask, **options)
        reference = decode(model, model, ids, steps, mask, torch.float64, **options)
    layers = record.sites
    assert [s.rewritten for s in layers] == [True, True], [str(s.declined) for s in layers]
    assert_close_to_reference(actual, eager, reference)
    return record


@pytest.mark.parametrize("family", EAGER_ONLY)
def test_decode(family):
    """Both layers, the sliding and the full one."""
    compared(model_of(family), torch.randint(3, VOCABULARY, (2, P)), max_suffix=SUFFIX[family])


@pytest.mark.parametrize("family", EAGER_ONLY)
def test_decode_of_padded_prompts(family):
    (max_suffix,) = {*SUFFIX.values()} - {SUFFIX[family]}
    ids, mask = torch.randint(3, VOCABULARY, (2, P)), torch.ones(2, P, dtype=torch.int64)
    mask[1, :4] = 0
    compared(model_of(family), ids, mask, max_suffix=max_suffix)


# MPT breaks its graph with any static cache: it slices its bias by a length that is a tensor.
@pytest.mark.parametrize(
    ("family", "max_suffix"), [("Bloom", None), ("Bloom", STATIC), ("Mpt", None)]
)
def test_alibi(family, max_suffix):
    """A bias a head and key is cut to each part's keys, and stays one for all rows.

    It hides nothing, so rows that see no key are ruled out, and MPT's finite fills hide.
    """
    record = compared(model_of(family), torch.randint(3, VOCABULARY, (2, P)), max_suffix=max_suffix)
    calls = [line.split("= cascade.attend(")[1] for line in lines(record, "= cascade.attend(")]
    masks = [call.split(", ")[3] for call in calls]
    shapes = [re.search(rf"{mask}: f32\[([^\]]*)\]", record.after)[1].split(", ") for mask in masks]
    assert len(shapes) == 4 and {tuple(shape[-3:-1]) for shape in shapes} == {("6", "1")}
    assert all(set(shape[:-3]) <= {"1"} for shape in shapes)
    assert not lines(record, "= log(")


def lines(record, part):
    return [line for line in record.after.splitlines() if part in line]

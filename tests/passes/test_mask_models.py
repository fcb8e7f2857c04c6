"""Masks as compiled graphs hold them, of transformers models above all: what is proved of them.

Every claim is also compared with the values that the masks have in a call.
"""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from support.hf_models import VOCABULARY, WINDOW, tiny_model
from support.mask_scenes import Values, attentions

from torch_cascade.passes.mask import SegmentMask
from torch_cascade.passes.prefix import Segment, segments
from torch_cascade.runtime.prefix_cache import SharedPrefixCache

REQUESTS, BRANCHES, PROMPT, SUFFIX, STATIC = 2, 3, 13, 4, 14


def decode(family, attention, queries, dynamic=None, static=False, padded=False):
    """The attentions of one decoding step of `BRANCHES` rows a request."""
    layers = 2 if family == "Gemma3Text" else 1  # one of each kind of layer
    model = tiny_model(family, torch.float32, num_hidden_layers=layers)
    model.set_attn_implementation(attention)
    rows = REQUESTS * BRANCHES

    def tokens(*shape):
        return torch.randint(3, VOCABULARY, shape)

    with torch.no_grad():
        options = {"max_suffix": STATIC} if static else {}
        prompt = tokens(REQUESTS, PROMPT)
        cache = SharedPrefixCache.prefill(model, prompt, branches=BRANCHES, **options)
        model(tokens(rows, SUFFIX), past_key_values=cache)
        seen = int(cache.get_seq_length()) + queries
        mask = torch.ones(rows, seen, dtype=torch.long) if padded else None
        if mask is not None:
            mask[1, :3] = 0
        return attentions(
            lambda ids, mask: model(ids, past_key_values=cache, attention_mask=mask).logits,
            tokens(rows, queries),
            mask,
            dynamic=dynamic,
        )


def claims(values: Values) -> tuple[tuple[Segment, SegmentMask], ...]:
    """What is said of each segment of a site, checked."""
    found = segments(values.site, values.reader._read.sizes)
    assert isinstance(found, tuple) and len(found) == 2, found
    return tuple((s, values.check(s.start, s.length)) for s in found)


VISIBLE = SegmentMask(rows_see_a_key=True)


@pytest.mark.parametrize("attention, dynamic", [("sdpa", None), ("eager", None), ("sdpa", True)])
def test_a_growing_suffix_is_causal_and_reads_no_mask(attention, dynamic):
    for values in decode("Llama", attention, 3, dynamic):
        (_, prefix), (segment, suffix) = claims(values)
        assert prefix == VISIBLE
        offset = sympy.expand(segment.length - 3)  # the tokens of earlier steps
        assert suffix == SegmentMask(q_offset=offset, rows_see_a_key=True)


def test_one_token_sees_everything():
    for values in decode("Llama", "eager", 1):
        assert [claim for _, claim in claims(values)] == [VISIBLE, VISIBLE]
        assert values.reader.describe(values.site) == "every query sees every key"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_static_suffix_reads_a_mask_only_for_itself(attention):
    for values in decode("Llama", attention, 3, static=True):
        (_, prefix), (_, suffix) = claims(values)
        assert prefix == VISIBLE
        (term,) = suffix.terms  # its length is data; the smallest tensor that says so
        assert term.kind == "keep" and term.node.meta["val"].shape[:2] == (1, 1)
        assert values.reader.finite(values.site)


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text"])
def test_windows_are_bounds(family):
    windows = []
    for values in decode(family, "sdpa", 3):
        for _, claim in claims(values):
            assert not claim.terms
        windows.append(claims(values)[0][1].window)
    assert windows == [WINDOW, None][: len(windows)]


def test_a_padding_mask_is_read_beside_a_bound():
    for values in decode("Llama", "sdpa", 3, padded=True):
        for _, claim in claims(values):
            (term,) = claim.terms
            assert term.node.meta["val"].shape[1:3] == (1, 1)  # the padding, not the causal rule
        assert claims(values)[1][1].q_offset == SUFFIX


def test_a_padding_mask_with_finite_fills_stays_whole():
    for values in decode("Llama", "eager", 3, padded=True):
        for _, claim in claims(values):
            assert [t.kind for t in claim.terms] == ["add"] and claim.q_offset is None
        assert not values.reader.finite(values.site)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_mask_that_is_written_in_place(dynamic):
    def attend(q, prefix, suffix, tree):
        p = prefix.shape[2]
        k = torch.cat([prefix.repeat_interleave(3, 0), suffix], 2)
        mask = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
        mask[:, :p] = True
        mask[:, p:] = tree
        return F.scaled_dot_product_attention(q, k, k, mask)

    q, prefix, suffix = (
        torch.randn(6, 4, 7, 16),
        torch.randn(2, 4, 11, 16),
        torch.randn(6, 4, 5, 16),
    )
    tree = torch.rand(7, 5) < 0.5
    (values,) = attentions(attend, q, prefix, suffix, tree, dynamic=dynamic)
    (_, on_prefix), (_, on_suffix) = claims(values)
    assert on_prefix == VISIBLE and len(on_suffix.terms) == 1

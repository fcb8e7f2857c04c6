"""Attention over the result of attention: each is rewritten, whichever operand joins them."""

from __future__ import annotations

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.shared_prefix import attention, inputs, joined, sdpa
from support.tolerance import assert_close_to_reference


def query(q, prefix, suffix):
    return attention(attention(q, prefix, suffix), prefix, suffix)


def suffix_keys(q, prefix, suffix):
    kv = joined(prefix, attention(suffix, prefix, suffix))
    return sdpa(q, kv, kv)


def shared_keys(q, prefix, suffix):
    first = prefix[:1].expand(2, -1, -1, -1)
    kv = joined(sdpa(prefix, first, first), suffix)
    return sdpa(q, kv, kv)


@pytest.mark.parametrize("fn", [query, suffix_keys, shared_keys])
def test_both_are_rewritten(fn):
    args = inputs()
    args[0] = 2 * args[0]
    actual = torch.compile(fn, backend=eager_cascade(verify=True, decide="always"))(*args)
    record = last_compilation()
    assert record.rewritten == len(record.sites) == 2
    assert_close_to_reference(actual, fn(*args), fn(*(x.double() for x in args)))

"""Numbers of keys that are data: read as one limit a KV row, or left as masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.backend import last_compilation
from support.paged import (
    PAGE,
    B,
    M,
    N,
    P,
    S,
    T,
    Tensors,
    attends,
    attention,
    check,
    nhd,
    tensors,
    values_of,
)
from support.tolerance import assert_close_to_reference
from torch import Tensor

from torch_cascade.compiler.graph import tensor
from torch_cascade.passes import plan
from torch_cascade.passes.key_limits import Rows
from torch_cascade.passes.prefix import batch_size

Mask = Callable[[Tensors], Tensor]
PREFIX, SUFFIX = P * PAGE, S * PAGE


def paged(t: Tensors, w: str) -> Tensor:
    prefix = nhd(t[f"nhd_{w}"], t["table"].repeat_interleave(T, 0))
    return torch.cat([prefix, nhd(t[f"nhd_{w}"], t["suffix"])], 2)


def dense(t: Tensors, w: str) -> Tensor:
    prefix = nhd(t[f"nhd_{w}"], t["table"]) * 1.5
    return torch.cat([prefix.repeat_interleave(T, 0), nhd(t[f"nhd_{w}"], t["suffix"]) * 1.5], 2)


def joined(prefix: Tensor, suffix: Tensor) -> Tensor:
    return torch.cat([prefix, suffix], -1)


def own(t: Tensors) -> Tensor:
    """Suffix keys a branch has, [N, SUFFIX]."""
    keys = t["suffix"].shape[1] * t["nhd_k"].shape[1]
    return torch.arange(keys) < t["suffix_lens"][:, None]


def by_request(t: Tensors) -> Tensor:
    keys = t["table"].shape[1] * t["nhd_k"].shape[1]
    prefix = torch.arange(keys) < t["lens"][:, None]
    return joined(prefix.repeat_interleave(T, 0), own(t))[:, None, None]


def by_last_key(t: Tensors) -> Tensor:
    last = (t["lens"] - 1).repeat_interleave(T)
    return joined(torch.arange(PREFIX) <= last[:, None], own(t))[:, None, None]


def added(t: Tensors) -> Tensor:
    return torch.where(by_request(t), 0.0, -torch.inf)


def hidden_where(t: Tensors) -> Tensor:
    past = torch.arange(PREFIX) >= t["lens"].repeat_interleave(T)[:, None]
    return ~joined(past, ~own(t))[:, None, None]


def one_for_all(t: Tensors) -> Tensor:
    prefix = torch.arange(PREFIX)[None] < t["lens"][0]
    return joined(prefix.expand(N, -1), own(t))[:, None, None]


def over_the_whole_axis(t: Tensors) -> Tensor:
    """A length that counts the whole prefix: the suffix limit is shifted by it."""
    total = t["suffix_lens"] + PREFIX
    return (torch.arange(PREFIX + SUFFIX) < total[:, None])[:, None, None]


def requests_limit_both(t: Tensors) -> Tensor:
    """The suffix of every branch is limited by its request."""
    few = (t["lens"] % SUFFIX + 1)[:, None]
    prefix = torch.arange(PREFIX) < t["lens"][:, None]
    both = joined(prefix, torch.arange(SUFFIX) < few)
    return both.repeat_interleave(T, 0)[:, None, None]


def also_causal(t: Tensors) -> Tensor:
    """A second condition, which depends on the query, stays a mask."""
    position = t["suffix_lens"][:, None] - M + torch.arange(M)
    causal = torch.arange(SUFFIX) <= position[..., None]
    prefix = (torch.arange(PREFIX) < t["lens"][:, None]).repeat_interleave(T, 0)
    suffix = own(t)[:, None] & causal
    return joined(prefix[:, None].expand(-1, M, -1), suffix)[:, None]


def clamped(t: Tensors) -> Tensor:
    """As a static cache counts its tokens: never below zero, the new one included."""
    prefix = torch.arange(PREFIX) <= (t["lens"] - 4).clamp_min(20)[:, None]
    suffix = torch.arange(SUFFIX) <= t["suffix_lens"].clamp_min(3)[:, None]
    return joined(prefix.repeat_interleave(T, 0), suffix)[:, None, None]


def larger_of_two(t: Tensors) -> Tensor:
    """A maximum by `where`, in both of its spellings."""
    at = t["lens"]
    longer = torch.where(at >= 30, at, 30), torch.where(at < 31, 30, at)
    prefix = torch.arange(PREFIX) < longer[0][:, None]
    suffix = torch.arange(SUFFIX) < (longer[1] - 25)[:, None]
    return joined(prefix, suffix).repeat_interleave(T, 0)[:, None, None]


def clamped_and_another(t: Tensors) -> Tensor:
    """What is left of the mask beside the limit."""
    return clamped(t) & (torch.arange(PREFIX + SUFFIX) >= 2)


def by_query(t: Tensors) -> Tensor:
    """A limit of the last query: what it does not see nobody does."""
    last = t["lens"].repeat_interleave(T)[:, None] - 3 + torch.arange(M)
    prefix = torch.arange(PREFIX) < last[..., None]
    return joined(prefix, torch.ones(N, M, SUFFIX, dtype=torch.bool))[:, None]


def clamped_by_query(t: Tensors) -> Tensor:
    """Several new tokens of a static cache, whose counter is clamped."""
    last = (t["lens"] - 4).clamp_min(20).repeat_interleave(T)[:, None] - 3 + torch.arange(M)
    prefix = torch.arange(PREFIX) <= last[..., None]
    return joined(prefix, torch.ones(N, M, SUFFIX, dtype=torch.bool))[:, None]


def clamped_before_the_suffix(t: Tensors) -> Tensor:
    """Where the number is clamped, no key of the suffix is seen; nor is it where it ends before."""
    total = (t["suffix_lens"] - 2 + PREFIX).clamp_min(20)
    return (torch.arange(PREFIX + SUFFIX) < total[:, None])[:, None, None]


LIMITS: dict[str, tuple[Mask, tuple[bool, bool], tuple[bool, bool]]] = {
    # name: mask, (prefix, suffix) have kv_lens, (prefix, suffix) read a mask
    "a length a request": (by_request, (True, True), (False, False)),
    "the last key": (by_last_key, (True, True), (False, False)),
    "added -inf": (added, (True, True), (False, False)),
    "hidden where": (hidden_where, (True, True), (False, False)),
    "one length for all": (one_for_all, (True, True), (False, False)),
    "total length": (over_the_whole_axis, (False, True), (True, False)),
    "suffixes by request": (requests_limit_both, (True, True), (False, False)),
    "and causal": (also_causal, (True, True), (False, True)),
    "of the last query": (by_query, (True, False), (True, False)),
    "of the last query, clamped": (clamped_by_query, (True, False), (True, False)),
    "never below a number": (clamped, (True, True), (False, False)),
    "the larger of two": (larger_of_two, (True, True), (False, False)),
    "never below a number before it": (clamped_before_the_suffix, (False, True), (True, False)),
    "and from a number on": (clamped_and_another, (True, True), (True, False)),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    mask, limited, masked = LIMITS[name]
    values = values_of(tensors())
    fn = attention(paged, mask=mask)
    parts = attends(fn, values)
    assert tuple("kv_lens" in part.kwargs for part in parts) == limited
    assert tuple(part.args[3] is not None for part in parts) == masked
    for part, rows in zip(parts, (B, N), strict=True):
        if "kv_lens" in part.kwargs:
            assert tensor(part.kwargs["kv_lens"]).shape == (rows,)
    check(fn, values)


def test_limits_through_inductor() -> None:
    """One with arithmetic for each segment, in generated code."""
    values = values_of(tensors())
    fn = attention(paged, mask=clamped)
    doubles = [v.double() if v.is_floating_point() else v for v in values]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(fn, backend="cascade", options={"decide": "always"})
        actual, eager, reference = compiled(*values), fn(*values), fn(*doubles)
    assert all(site.rewritten for site in last_compilation().sites)
    assert_close_to_reference(actual, eager, reference)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("least", [None, 3])
def test_the_largest_number_stands_for_all(least: int | None, dtype: torch.dtype) -> None:
    """And the smallest one for none: a shift, by 1 or by where a segment begins, does not wrap."""
    most = torch.iinfo(dtype)

    def mask(t: Tensors) -> Tensor:
        last = t["lens"] if least is None else t["lens"].clamp_min(least)
        prefix = (torch.arange(PREFIX) <= last[:, None]).repeat_interleave(T, 0)
        suffix = torch.arange(PREFIX, PREFIX + SUFFIX) < t["suffix_lens"][:, None]
        return joined(prefix, suffix)[:, None, None]

    ends = torch.tensor([most.max, most.min, PREFIX + 3] * 2, dtype=dtype)
    given = tensors() | {"lens": torch.tensor([most.max, 20], dtype=dtype), "suffix_lens": ends}
    fn = attention(paged, mask=mask)
    assert all("kv_lens" in part.kwargs for part in attends(fn, values_of(given)))
    check(fn, values_of(given))


def test_dense_keys_have_limits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernels stop at the last key."""
    limits = lambda site, segment: Rows(segment.kept, batch_size(site))  # noqa: E731
    monkeypatch.setattr(plan, "limit_rows", limits)
    values = values_of(tensors())
    fn = attention(dense, mask=by_request)
    prefix, suffix = attends(fn, values)
    assert prefix.args[3] is None and "kv_lens" in prefix.kwargs
    assert suffix.args[3] is None and "kv_lens" in suffix.kwargs
    check(fn, values)


def test_a_cpu_keeps_the_mask_of_dense_keys() -> None:
    """It would copy all keys and values to hide some."""
    for attend in attends(attention(dense, mask=by_request), values_of(tensors())):
        assert attend.args[3] is not None and "kv_lens" not in attend.kwargs


def by_branch(t: Tensors) -> Tensor:
    """Branches of a request see prefixes of their own lengths: no limit of the shared row."""
    prefix = torch.arange(PREFIX) < t["row_lens"][:, None]
    return joined(prefix, torch.ones(N, SUFFIX, dtype=torch.bool))[:, None, None]


def at_least(t: Tensors) -> Tensor:
    """The mirror image: the first keys are hidden."""
    prefix = torch.arange(PREFIX) >= t["lens"][:, None]
    return joined(prefix.repeat_interleave(T, 0), own(t) | True)[:, None, None]


def other_branch(t: Tensors) -> Tensor:
    """Request b's length is read by row n % B, not n // T."""
    prefix = torch.arange(PREFIX) < t["lens"].repeat(T)[:, None]
    return joined(prefix, torch.ones(N, SUFFIX, dtype=torch.bool))[:, None, None]


def backwards_by_query(t: Tensors) -> Tensor:
    """The first query sees most keys, not the last one."""
    last = t["lens"].repeat_interleave(T)[:, None] - torch.arange(M)
    prefix = torch.arange(PREFIX) < last[..., None]
    return joined(prefix, torch.ones(N, M, SUFFIX, dtype=torch.bool))[:, None]


def larger_of_query(t: Tensors) -> Tensor:
    """A maximum of two, none of which is a size."""
    at, query = t["lens"].repeat_interleave(T)[:, None], torch.arange(M) * 5
    prefix = torch.arange(PREFIX) < torch.where(at >= query, at, query)[..., None]
    return joined(prefix, torch.ones(N, M, SUFFIX, dtype=torch.bool))[:, None]


def either(t: Tensors) -> Tensor:
    """A disjunction limits nothing."""
    prefix = (torch.arange(PREFIX) < t["lens"][:, None]) | (torch.arange(PREFIX) == PREFIX - 1)
    return joined(prefix.repeat_interleave(T, 0), own(t) | True)[:, None, None]


def finite(t: Tensors) -> Tensor:
    """Small finite values hide nothing."""
    return torch.where(by_request(t), 0.0, -3.0)


def another_of_two(t: Tensors) -> Tensor:
    """No maximum: a length of 9 stays, one of 8 would become 14."""
    lens = torch.where(t["lens"] >= 9, t["lens"], 14)
    prefix = torch.arange(PREFIX) < lens[:, None]
    return joined(prefix.repeat_interleave(T, 0), own(t) | True)[:, None, None]


def smaller_of_two(t: Tensors) -> Tensor:
    """No maximum either."""
    lens = torch.where(t["lens"] >= 30, 30, t["lens"])
    prefix = torch.arange(PREFIX) < lens[:, None]
    return joined(prefix.repeat_interleave(T, 0), own(t) | True)[:, None, None]


def larger_by_query(t: Tensors) -> Tensor:
    """What the number is clamped by is another one for each query."""
    last = torch.maximum(t["lens"][:, None], torch.arange(M) + 30)
    prefix = (torch.arange(PREFIX) < last[..., None]).repeat_interleave(T, 0)
    return joined(prefix, torch.ones(N, M, SUFFIX, dtype=torch.bool))[:, None]


def larger_by_request(t: Tensors) -> Tensor:
    prefix = torch.arange(PREFIX) < torch.maximum(t["lens"], torch.arange(B) * 40)[:, None]
    return joined(prefix.repeat_interleave(T, 0), own(t) | True)[:, None, None]


def almost_the_larger(t: Tensors) -> Tensor:
    """A length of 9 stays, where the larger one were 10."""
    lens = torch.where(t["lens"] >= 9, t["lens"], 10)
    prefix = torch.arange(PREFIX) < lens[:, None]
    return joined(prefix.repeat_interleave(T, 0), own(t) | True)[:, None, None]


def in_steps(t: Tensors) -> Tensor:
    """The query less twice its half, by a view: 0, 1, 0, 1, ... is not largest at the last one."""
    halves = torch.arange(M // 2 + 1).repeat_interleave(2)[:M]
    last = t["lens"].repeat_interleave(T)[:, None] - 8 + torch.arange(M) - 2 * halves
    prefix = torch.arange(PREFIX) < last[..., None]
    return joined(prefix, torch.ones(N, M, SUFFIX, dtype=torch.bool))[:, None]


def in_rounds(t: Tensors) -> Tensor:
    """Likewise of a remainder."""
    remainders = torch.arange(4).expand(2, 4).reshape(8)[:M]
    last = t["lens"].repeat_interleave(T)[:, None] - 8 + torch.arange(M) - 2 * remainders
    prefix = torch.arange(PREFIX) < last[..., None]
    return joined(prefix, torch.ones(N, M, SUFFIX, dtype=torch.bool))[:, None]


NO_LIMIT: dict[str, Mask] = {
    "lengths of branches": by_branch,
    "keys from a number on": at_least,
    "another order of rows": other_branch,
    "the first query sees most": backwards_by_query,
    "the larger depends on the query": larger_of_query,
    "or another condition": either,
    "a small finite value": finite,
    "one of two": another_of_two,
    "the smaller of two": smaller_of_two,
    "almost the larger": almost_the_larger,
    "the larger of two for a query": larger_by_query,
    "up and down by halves": in_steps,
    "up and down by remainders": in_rounds,
    "the larger of two for a request": larger_by_request,
}


@pytest.mark.parametrize("name", NO_LIMIT)
def test_look_alikes_stay_masks(name: str) -> None:
    values = values_of(tensors())
    fn = attention(paged, mask=NO_LIMIT[name])
    prefix = attends(fn, values)[0]
    assert "kv_lens" not in prefix.kwargs
    assert prefix.args[3] is not None
    check(fn, values)


def test_pages_past_the_length_are_not_read() -> None:
    """Eager code would multiply their NaN by a weight of zero."""
    t = tensors()
    clean, used = t["nhd_k"], t["table"][1, : PAGE // PAGE + 1]
    expected = attention(paged, mask=by_request)(*values_of(t))
    spoilt = dict(t)
    unused = torch.tensor([i for i in t["table"][1].tolist() if i not in used.tolist()])
    for which in "kv":
        spoilt[f"nhd_{which}"] = t[f"nhd_{which}"].clone()
        spoilt[f"nhd_{which}"][unused] = torch.nan
    assert not torch.equal(clean, spoilt["nhd_k"])
    from support.backend import eager_cascade

    torch._dynamo.reset()
    backend = eager_cascade(decide="always", strict=True)
    with torch.no_grad():
        fn = torch.compile(attention(paged, mask=by_request), backend=backend)
        actual = fn(*values_of(spoilt))
    torch.testing.assert_close(actual, expected)


def test_symbolic_sizes() -> None:
    values = values_of(tensors())
    for part in attends(attention(paged, mask=by_request), values, dynamic=True):
        assert "kv_lens" in part.kwargs and part.args[3] is None


@pytest.mark.parametrize("computed", [False, True])
def test_never_below_a_size(computed: bool) -> None:
    """The size is a symbol: which side of the condition is the larger depends on names."""

    def by_size(t: Tensors) -> Tensor:
        lens = t["lens"].view(-1, 1).sum(1) if computed else t["lens"]  # "sum" is behind "s0"
        prefix = torch.arange(PREFIX) < (lens - 4).clamp_min(3 * t["q"].shape[2])[:, None]
        return joined(prefix.repeat_interleave(T, 0), own(t))[:, None, None]

    values = values_of(tensors())
    fn = attention(paged, mask=by_size)
    for part in attends(fn, values, dynamic=True):
        assert "kv_lens" in part.kwargs and part.args[3] is None
    check(fn, values)

"""Sizes that only data tells: nothing is guarded on them, and Inductor compiles what it could."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.tolerance import assert_close_to_reference
from torch import Tensor

from torch_cascade.compiler.report import Reason
from torch_cascade.passes import layout

B, T, H, P, S, M, D = 2, 3, 5, 19, 17, 7, 16
N = B * T
LEAST = 1 if layout.SORTS_UNKNOWN_STRIDES else 2  # keys and queries that there have to be
Attention = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    captured = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(captured):
        yield


def inputs(told: int) -> list[Tensor]:
    """q, prefix and suffix of K and V, and the number that is data."""
    shapes = [(N, H, M, D), (B, H, P, D), (B, H, P, D), (N, H, S, D), (N, H, S, D)]
    return [*(torch.randn(shape) * 2 for shape in shapes), torch.tensor(told)]


def cat(prefix: Tensor, suffix: Tensor) -> Tensor:
    return torch.cat([prefix.repeat_interleave(T, 0), suffix], 2)


def number(told: Tensor, least: int, most: int) -> int:
    """The number, between what torch is told of it."""
    found = int(told.item())
    torch._check(found >= least)
    torch._check(found <= most)
    return found


def suffix(q, pk, pv, sk, sv, told):
    n = number(told, LEAST, S)
    return F.scaled_dot_product_attention(q, cat(pk, sk[:, :, :n]), cat(pv, sv[:, :, :n]))


def prefix(q, pk, pv, sk, sv, told):
    n = number(told, 2, P)
    return F.scaled_dot_product_attention(q, cat(pk[:, :, :n], sk), cat(pv[:, :, :n], sv))


def causal_suffix(q, pk, pv, sk, sv, told):
    n = number(told, LEAST, S)
    seen = torch.arange(P + n) <= torch.arange(M)[:, None] + P
    return F.scaled_dot_product_attention(q, cat(pk, sk[:, :, :n]), cat(pv, sv[:, :, :n]), seen)


def branches(q, pk, pv, sk, sv, told):
    n = number(told, 2, N)
    k, v = (x[:1].expand(n, -1, -1, -1) for x in (pk, pv))
    return F.scaled_dot_product_attention(
        q[:n], torch.cat([k, sk[:n]], 2), torch.cat([v, sv[:n]], 2)
    )


def chosen_keys(q, pk, pv, sk, sv, told):
    kept = torch.nonzero(torch.arange(S) < told).squeeze(1)
    torch._check(kept.shape[0] >= LEAST)
    return F.scaled_dot_product_attention(q, cat(pk, sk[:, :, kept]), cat(pv, sv[:, :, kept]))


def chosen_queries(q, pk, pv, sk, sv, told):
    kept = torch.nonzero(torch.arange(M) < told).squeeze(1)
    torch._check(kept.shape[0] >= LEAST)
    return F.scaled_dot_product_attention(q[:, :, kept], cat(pk, sk), cat(pv, sv))


def maybe_no_key(q, pk, pv, sk, sv, told):
    kept = torch.nonzero(torch.arange(S) < told).squeeze(1)
    return F.scaled_dot_product_attention(q, cat(pk, sk[:, :, kept]), cat(pv, sv[:, :, kept]))


def nothing_shared(q, pk, pv, sk, sv, told):
    n = number(told, LEAST, S)
    return F.scaled_dot_product_attention(q, sk[:, :, :n], sv[:, :, :n])


def checked(fn: Attention, backend: object, told: tuple[int, ...], **options: object) -> None:
    """One compilation is right for all of the numbers."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, **options)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for given in told:
            values = inputs(given)
            doubles = [v.double() if v.is_floating_point() else v for v in values]
            assert_close_to_reference(compiled(*values), fn(*values), fn(*doubles))


# What is expanded torch specialises on being 1.
REWRITTEN = {
    suffix: (4, LEAST, 6),
    prefix: (4, 2, 6),
    causal_suffix: (4, LEAST, 6),
    branches: (4, 2, 6),
    chosen_keys: (4, LEAST, 6),
    chosen_queries: (4, LEAST, 6),
}


# Of these the strides of the result are told by data, too.
KEPT = pytest.mark.skipif(not layout.SORTS_UNKNOWN_STRIDES, reason="torch cannot keep strides")
EACH = [
    pytest.param(fn, marks=KEPT if fn is chosen_queries else (), id=fn.__name__) for fn in REWRITTEN
]


@pytest.mark.parametrize("fn", EACH)
def test_it_is_rewritten_and_right(fn: Attention) -> None:
    backend = eager_cascade(decide="always", strict=True, verify=True)
    checked(fn, backend, REWRITTEN[fn])
    assert all(site.rewritten for site in last_compilation().sites)


@pytest.mark.parametrize("fn", EACH)
def test_inductor_compiles_it(fn: Attention) -> None:
    checked(fn, "cascade", REWRITTEN[fn], options={"decide": "always", "strict": True})


@pytest.mark.parametrize(
    "fn", [each for each in EACH if each.values[0] in (chosen_queries, branches)]
)
def test_what_is_returned_lies_in_memory_as_it_did(fn: Attention) -> None:
    compiled = torch.compile(fn, backend="cascade", options={"decide": "always", "strict": True})
    values = inputs(4)
    with torch.no_grad():
        assert compiled(*values).stride() == fn(*values).stride()


def test_strides_that_torch_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11."""
    monkeypatch.setattr(layout, "SORTS_UNKNOWN_STRIDES", False)
    checked(chosen_queries, "cascade", (4, LEAST, 6), options={"decide": "always"})
    (site,) = last_compilation().sites
    assert site.declined is not None and site.declined.reason is Reason.LAYOUT
    assert "only data tells the strides" in site.declined.detail


def test_where_there_may_be_no_key_it_stays() -> None:
    """Inductor would not lower what is computed then."""
    checked(maybe_no_key, "cascade", (4, 0, 6), options={"decide": "always"})
    (site,) = last_compilation().sites
    assert site.declined is not None and site.declined.reason is Reason.EMPTY_SEGMENT
    assert "only data tells how many keys there are" in site.declined.detail
    assert "torch._check" in site.declined.hint


def test_attention_that_shares_nothing_compiles_as_with_inductor() -> None:
    checked(nothing_shared, "cascade", (4, LEAST, 6))
    (site,) = last_compilation().sites
    assert site.declined is not None and site.declined.reason is Reason.NO_SHARED_PREFIX

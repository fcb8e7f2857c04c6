"""`levels`: with fewer levels than a graph has, the result is the same and the parts are fewer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.three_levels import OWN, REQUEST, SYSTEM, D, H, M, N, T, attention, inputs, paged
from support.tolerance import assert_close_to_reference


def check(fn, args, **options):
    """Rewritten, and as close to float64 as eager is; the segments of the record."""
    torch._dynamo.reset()
    for x in args[1:] if options.pop("dynamic", False) else ():
        torch._dynamo.mark_dynamic(x, 2)  # lengths; a batch too, and proofs take a minute
    backend = eager_cascade(decide="always", verify=True, **options)
    actual, eager = torch.compile(fn, backend=backend)(*args), fn(*args)
    assert actual.stride() == eager.stride()
    reference = fn(*(a.double() if a.is_floating_point() else a for a in args))
    assert_close_to_reference(actual, eager, reference)
    (site,) = last_compilation().sites
    assert site.rewritten
    return site.segments


def attends():
    return last_compilation().after.count("cascade.attend(")


@pytest.mark.parametrize("order", ["interleave", "repeat"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_two_levels_of_three(order, dynamic):
    def fn(*args):
        return attention(*args, order=order)

    check(fn, inputs(), dynamic=dynamic)
    assert attends() == 3
    system, request, own = check(fn, inputs(), dynamic=dynamic, passes="cascade{levels=2}")
    assert attends() == 3, "the system's keys and the branches' own are no neighbours"
    shared = [s for s in (system, request, own) if s.branches != "1"]
    assert len(shared) == 1, "5 keys saved 5 times are less than 13 saved 3 times"
    assert "spread over" in system.base


def test_what_is_spread_is_read_with_the_branches_own_keys():
    """Neighbours become one part: here the request's keys, which save less than the system's."""
    q, _, request, own = inputs()
    args = [q, torch.randn(1, H, 40, D), request, own]
    check(attention, args, levels=3)
    assert attends() == 3
    segments = check(attention, args, levels=2)
    assert attends() == 2
    assert [s.branches for s in segments] == [str(N), "1", "1"]
    assert [s.rows for s in segments] == ["0", f"n // {T}", "n"]


def test_segments_of_one_level_stay_together():
    """Two prefixes of the request are one level, however many parts they are."""

    def fn(q, first, second, own):
        parts = [x.repeat_interleave(T, 0) for x in (first, second)]
        kv = torch.cat([*parts, own], 2)
        return F.scaled_dot_product_attention(q, kv, kv)

    q, _, request, own = inputs()
    segments = check(fn, [q, request, request[:, :, :4] * 2, own], levels=2)
    assert [s.branches for s in segments] == [str(T), str(T), "1"]


def test_masks_are_cut_for_parts_that_were_joined():
    mask = torch.rand(N, 1, M, SYSTEM + REQUEST + OWN) > 0.4
    mask[..., 0] = True

    def fn(q, system, request, own):
        return attention(q, system, request, own, mask)

    check(fn, inputs(), levels=2)
    causal = torch.arange(SYSTEM + REQUEST + OWN) <= torch.arange(M)[:, None] + REQUEST + OWN

    def other(q, system, request, own):
        return attention(q, system, request, own, causal)

    check(other, inputs(), levels=2)


def test_pages_of_a_level_that_is_given_up_are_gathered():
    fn, pool = paged()
    q, _, _, own = inputs()
    system = torch.randn(1, H, 50, D)
    check(fn, [q, pool, system, own])
    assert "page_table=" in last_compilation().after
    check(fn, [q, pool, system, own], levels=2)
    assert "page_table=" not in last_compilation().after and attends() == 2


def test_a_symbolic_batch_in_repeat_order():
    """Rows are looked up: as views their sizes nested, and proofs of them did not end."""

    def fn(q, request, own):
        spread = request.repeat(q.shape[0] // request.shape[0], 1, 1, 1)
        kv = torch.cat([spread, own], 2)
        mask = torch.arange(kv.shape[2]) <= torch.arange(q.shape[2])[:, None] + request.shape[2]
        return F.scaled_dot_product_attention(q, kv, kv, mask.expand(q.shape[0], 1, -1, -1))

    q, _, request, own = inputs()
    more = [torch.cat([q, q]), torch.cat([request, request]), torch.randn(2 * N, H, OWN + 1, D)]
    compiled = torch.compile(fn, backend=eager_cascade(decide="always"), dynamic=True)
    for args in ([q, request, own], more):
        reference = fn(*(a.double() for a in args))
        assert_close_to_reference(compiled(*args), fn(*args), reference)
    assert last_compilation().sites[0].rewritten and "index" in last_compilation().after

"""Neighbouring levels read as one: the same function, where the cost model says it is cheaper."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.three_levels import OWN, REQUEST, SYSTEM, B, D, H, M, N, T, attention, inputs, paged
from support.tolerance import assert_close_to_reference

from torch_cascade.compiler import calibration
from torch_cascade.compiler.decide import cheapest
from torch_cascade.compiler.device_table import GPUS
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.work import KeyRun, Work
from torch_cascade.passes import cascade

WAYS = (0, 1, 2)


def parts():
    return last_compilation().after.count("cascade.attend(")


def check(fn, args, way, monkeypatch, *, dynamic=(), **options):
    """The way of that number is as close to float64 as eager is; how many ways there were."""
    seen = []

    def chosen(works, sizes, given):
        seen.append(works)
        return min(way, len(works) - 1)

    monkeypatch.setattr(cascade, "cheapest", chosen)
    torch._dynamo.reset()
    for x, dim in dynamic:
        torch._dynamo.mark_dynamic(x, dim)
    backend = eager_cascade(**{"decide": "always", "verify": True, **options})
    actual, eager = torch.compile(fn, backend=backend)(*args), fn(*args)
    assert actual.stride() == eager.stride()
    reference = fn(*(a.double() if a.is_floating_point() else a for a in args))
    assert_close_to_reference(actual, eager, reference)
    assert last_compilation().sites[0].rewritten
    return seen[-1]


@pytest.mark.parametrize("order", ["interleave", "repeat"])
@pytest.mark.parametrize("lengths", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_right(way, lengths, order, monkeypatch):
    def fn(*args):
        return attention(*args, order=order)

    args = inputs()
    dynamic = [(x, 2) for x in args[1:]] if lengths else ()
    works = check(fn, args, way, monkeypatch, dynamic=dynamic)
    assert len(works) == 3
    rows = [[int(run.rows) for run in work.runs] for work in works]
    assert rows == [[1, B, N], [1, N], [B, N]]
    assert [[run.joined for run in work.runs] for work in works] == [
        [False] * 3, [False, True], [True, False],
    ]  # fmt: skip
    assert parts() == (2 if way else 3)


def test_a_dynamic_batch(monkeypatch):
    q, system, request, own = inputs()
    check(attention, [q, system, request, own], 2, monkeypatch, dynamic=[(q, 0), (own, 0)])
    assert parts() == 2


@pytest.mark.parametrize("way", [1, 2])
def test_masks_of_joined_parts(way, monkeypatch):
    keys = SYSTEM + REQUEST + OWN
    mask = torch.rand(N, 1, M, keys) > 0.4
    mask[..., 0] = True

    def masked(*args):
        return attention(*args, mask=mask)

    def causal(*args):
        places = torch.arange(keys) <= torch.arange(M)[:, None] + SYSTEM + REQUEST + 2
        return attention(*args, mask=places)

    check(masked, inputs(), way, monkeypatch)
    check(causal, inputs(), way, monkeypatch)


def test_three_joins_of_four_levels(monkeypatch):
    """Groups of requests between the system and the request: seven ways, all the same function."""
    groups = torch.randn(2, H, 4, D)
    q, own = torch.randn(12, H, M, D), torch.randn(12, H, OWN, D)
    system, request = torch.randn(1, H, SYSTEM, D), torch.randn(6, H, REQUEST, D)

    def fn(q, system, groups, request, own):
        spread = [groups.repeat_interleave(6, 0), request.repeat_interleave(2, 0)]
        kv = torch.cat([system.expand(12, -1, -1, -1), *spread, own], 2)
        return F.scaled_dot_product_attention(q, kv, kv)

    args = [q, system, groups, request, own]
    ways = len(check(fn, args, 0, monkeypatch))
    assert ways == 7
    seen = {parts()}
    for way in range(1, ways):
        check(fn, args, way, monkeypatch)
        seen.add(parts())
    assert seen == {4, 3, 2}


def test_levels_that_are_not_nested_are_not_joined(monkeypatch):
    """Request by `n // T` and seed by `n % T`: neither tells apart what the other does."""

    def fn(q, request, seed, own):
        spread = [request.repeat_interleave(T, 0), seed.repeat(B, 1, 1, 1)]
        kv = torch.cat([*spread, own], 2)
        return F.scaled_dot_product_attention(q, kv, kv)

    q, _, request, own = inputs()
    works = check(fn, [q, request, torch.randn(T, H, 4, D), own], 0, monkeypatch)
    assert [[int(run.rows) for run in work.runs] for work in works] == [[B, T, N], [B, N]]


def test_pages_are_not_joined(monkeypatch):
    fn, pool = paged()
    q, system, _, own = inputs()
    assert len(check(fn, [q, pool, system, own], 0, monkeypatch)) == 1


def work(runs, kind="cuda"):
    """64 branches of each of 4 requests, 4 query tokens a branch, 64 query heads over 8."""
    sizes = {"batch": 256, "heads": 64, "q_len": 4, "kv_heads": 8, "naive_heads": 8}
    kv = {"d_k": 128, "d_v": 128, "q_bytes": 2, "kv_bytes": 2, "dtype": "bfloat16"}
    return Work(**sizes, **kv, copied=True, device=torch.device(kind), runs=runs)


LEVELS = KeyRun(1, 256), KeyRun(4, 48), KeyRun(256, 16)
JOINED = KeyRun(4, 304, joined=True), KeyRun(256, 16)


@pytest.mark.parametrize(
    ("kind", "decide", "expected"), [("cuda", "auto", 1), ("cuda", "always", 0), ("cpu", "auto", 0)]
)
def test_the_cost_model_chooses(kind, decide, expected, monkeypatch):
    """A short root of many rows: on an H200 joined took 120 us, as a level of its own 144."""
    monkeypatch.setattr(calibration, "_table", lambda device, threads: GPUS["H200"])
    works = [work(LEVELS, kind), work(JOINED, kind)]
    assert cheapest(works, None, Options(decide=decide)) == expected


def test_a_long_root_stays_a_level(monkeypatch):
    monkeypatch.setattr(calibration, "_table", lambda device, threads: GPUS["H200"])
    own = KeyRun(1, 65536), KeyRun(4, 48), KeyRun(256, 16)
    joined = KeyRun(4, 65536 + 48, joined=True), KeyRun(256, 16)
    assert cheapest([work(own), work(joined)], None, Options()) == 0

"""What is made on the CPU and moved: models build indices and masks there for a GPU.

The device "meta" stands for the GPU: moving to it leaves the same nodes in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capture import joint_graph

from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.compiler.record import Compilation
from torch_cascade.passes import devices
from torch_cascade.passes.cascade import CascadePass

B, T, H, P, S, M, D = 2, 3, 5, 11, 7, 4, 16
N = B * T


def by_index(make: Callable[[], torch.Tensor]) -> Any:
    def run(q, prefix, suffix):
        kv = torch.cat([prefix[make().to(q.device, torch.int64)], suffix], 2)
        return F.scaled_dot_product_attention(q, kv, kv)

    return run


def by_mask(make: Callable[[], torch.Tensor]) -> Any:
    def run(q, prefix, suffix):
        kv = torch.cat([prefix.repeat_interleave(T, 0), suffix], 2)
        return F.scaled_dot_product_attention(q, kv, kv, make().to(q.device))

    return run


def site_of(fn: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The record of the one attention, on a device that counts as supported."""
    monkeypatch.setattr(devices, "SUPPORTED_DEVICES", frozenset({"cpu", "meta"}))
    shapes = [(N, H, M, D), (B, H, P, D), (N, H, S, D)]
    values = [torch.empty(shape, device=device) for shape in shapes]

    def nothing_runs(gm, inputs, **options):
        result = lambda args: [torch.empty(N, H, M, D, device=device)]  # noqa: E731
        result._boxed_call = True
        return result

    prepare = functools.partial(capture, devices={device})
    gm = joint_graph(fn, *values, prepare=prepare, dynamic=False, inner_compile=nothing_runs)
    sizes = Sizes.of(gm.graph, may_guard=True)
    context = PassContext(sizes, Options(decide="always", strict=True), Compilation())
    CascadePass().apply(gm.graph, context)
    (site,) = context.record.sites
    return site


def tril() -> torch.Tensor:
    return torch.ones(M, P + S, dtype=torch.bool).tril(P + S - M)


MOVED = {
    "iota": by_index(lambda: torch.arange(N) // T),
    "repeated": by_index(lambda: torch.arange(B).repeat_interleave(T)),
    "a constant": by_index(lambda: torch.tensor([0] * T + [1] * T)),
    "widened": by_index(lambda: torch.arange(N, dtype=torch.int32) // T),
    "a causal mask": by_mask(tril),
    "an additive mask": by_mask(lambda: torch.zeros(M, P + S).masked_fill(~tril(), -torch.inf)),
}


@pytest.mark.parametrize("case", MOVED)
def test_moved(case, monkeypatch):
    expected = site_of(MOVED[case], "cpu", monkeypatch)
    actual = site_of(MOVED[case], "meta", monkeypatch)
    assert actual.rewritten, str(actual.declined)
    said = [(s.keys, s.rows, s.branches, s.mask) for s in actual.segments]
    assert said == [(s.keys, s.rows, s.branches, s.mask) for s in expected.segments]


LOOK_ALIKES = {
    "another order": by_index(lambda: torch.tensor([0, 1, 1, 0, 0, 1])),
    "of too few values": by_index(lambda: torch.tensor([256] * T + [257] * T).to(torch.uint8)),
    "made of floats": by_index(lambda: torch.tensor([0.5] * T + [1.5] * T)),
}


@pytest.mark.parametrize("case", LOOK_ALIKES)
def test_not_shared(case, monkeypatch):
    assert not site_of(LOOK_ALIKES[case], "meta", monkeypatch).rewritten

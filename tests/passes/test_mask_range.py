"""Bounds of computed tensors hold for their values, and other tensors have none."""

from __future__ import annotations

import math

import pytest
import torch
from support.site_check import run

from torch_cascade.passes.mask_range import value_bounds

K = 37


def alibi(x):
    slopes = torch.pow(2.0, -torch.arange(1, 7, dtype=torch.float32))
    return slopes[:, None, None] * torch.arange(x.shape[0])


def mpt(x):
    positions = torch.arange(1 - K, 1, dtype=torch.int32).view(1, 1, 1, -1)
    base = torch.arange(1, 9, dtype=torch.int64).float() * (8 / 8)
    rates = (1.0 / torch.pow(2, base)).view(1, 8, 1, 1)
    rates = torch.concat([rates[:, 1::2], rates[:, ::2]], dim=1)[:, :6]
    return (positions * rates).squeeze(0)


def relative(x):
    steps = torch.arange(x.shape[0])
    return -(steps[:, None] - steps[None]).abs() * 0.25


def halves(x):
    return torch.exp2(-torch.arange(1, 5).float()).repeat(2) - 3


def bounds_of(fn, dynamic):
    """The bounds of the first output of a graph, and its value."""
    called = run(lambda x: (fn(x), x + 1), torch.randn(K), dynamic=dynamic)
    (output,) = (n for n in called.module.graph.nodes if n.op == "output")
    return value_bounds(output.args[0][0]), called.values[output.args[0][0]]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [alibi, mpt, relative, halves])
def test_bounds_hold(fn, dynamic):
    """And are met, where all sizes are known."""
    (low, high), bias = bounds_of(fn, dynamic)
    assert low <= bias.min() and bias.max() <= high
    if not dynamic:
        slack = K * 0.25 if fn is relative else 0  # |a - b| of two bounds is not below zero
        assert low >= bias.min() - slack and high <= bias.max()


LOOK_ALIKES = {
    "data": lambda x: x * 0.5,
    "data as a slope": lambda x: x[:3, None] * torch.arange(K),
    "hides": lambda x: torch.arange(K) * torch.full([], -math.inf),
    "over a range with zero": lambda x: 1.0 / (torch.arange(K) - 3),
    "over what rounds to zero": lambda x: 1 / torch.pow(2.0, -torch.arange(30, 40)).half(),
    "over what is cut to zero": lambda x: 1.0 / (torch.arange(1, 5) * 0.1).int(),
    "overflows": lambda x: torch.pow(10.0, torch.arange(1, 50, dtype=torch.float32)),
    "overflows in half": lambda x: (torch.arange(K) * 4e4).half(),
    "an odd root of what may be negative": lambda x: torch.arange(-3, 9).float() ** 0.5,
    "one where of many": lambda x: torch.where(x > 0, torch.arange(K) * 0.5, -math.inf),
    "joined with data": lambda x: torch.cat([torch.arange(K) * 0.5, x]),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_no_bounds(name):
    assert bounds_of(LOOK_ALIKES[name], dynamic=False)[0] is None

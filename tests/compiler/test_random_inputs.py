"""Random inputs: what is kept of real ones, and that made ones are like them."""

from __future__ import annotations

import pytest
import torch

from torch_cascade.compiler.random_inputs import (
    Choice,
    Normal,
    Strided,
    Whole,
    default_values,
    describe,
    random_inputs,
)

INF = float("inf")


def made(x):
    """An input like `x`."""
    described = Strided(tuple(x.shape), x.stride(), x.dtype, "cpu", describe(x))
    (result,) = random_inputs([eval(repr(described), {**globals(), "inf": INF})])
    assert (result.shape, result.stride(), result.dtype) == (x.shape, x.stride(), x.dtype)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_floats_keep_mean_and_spread(dtype):
    x = (torch.randn(40, 50) * 0.25 - 2).to(dtype)
    y = made(x).float()
    assert abs(y.mean() + 2) < 0.05 and abs(y.std() - 0.25) < 0.05


def test_masks_and_ones_are_kept():
    mask = torch.zeros(3, 4).masked_fill(torch.rand(3, 4) > 0.5, -INF)
    mask[0, 0], mask[0, 1] = 0.0, -INF
    assert describe(mask) == Choice((-INF, 0.0)) and {*made(mask).flatten().tolist()} == {0.0, -INF}
    assert made(torch.ones(5)).tolist() == [1.0] * 5


def test_infinities_do_not_spoil_the_spread():
    x = torch.randn(1000)
    x[3] = -INF
    kept = describe(x)
    assert isinstance(kept, Normal) and abs(kept.std - 1) < 0.2


@pytest.mark.parametrize(
    ("x", "order"),
    [
        (torch.tensor([[3, 4, 9], [0, 2, 3]]), "increasing"),
        (torch.tensor([[0, 0, 1], [0, 1, 1]]), "rising"),
        (torch.tensor([[5, 2, 7], [7, 2, 5]]), "distinct"),
        (torch.tensor([[5, 5, 2]]), ""),
        (torch.tensor([False, True, True]), "rising"),
        (torch.tensor(7), ""),
    ],
)
def test_integers_keep_range_and_order(x, order):
    kept = describe(x)
    assert kept == Whole(int(x.min()), int(x.max()), order)
    y = made(x)
    assert x.min() <= y.min() and y.max() <= x.max()
    assert order == "" or describe(y).order in ("increasing", "rising", order)


def test_numbers_far_apart_keep_no_order():
    assert describe(torch.tensor([0, 5, 2**60])) == Whole(0, 2**60)
    assert made(torch.tensor([0, 5, 2**60])).min() >= 0


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_shapes_at_the_edge(shape, dtype):
    described = Strided(shape, torch.empty(shape).stride(), dtype, "cpu", default_values(dtype))
    (x,) = random_inputs([described])
    assert x.shape == torch.Size(shape) and x.dtype == dtype


def test_expanded_inputs_share_their_memory():
    y = made(torch.randn(1, 3, 4).expand(5, 3, 4))
    assert y.untyped_storage().nbytes() == 12 * 4 and bool((y == y[:1]).all())


def test_what_holds_no_data_is_not_described():
    assert describe(torch.empty(3, device="meta")) is None
    assert describe(7) is None and describe(torch.empty(0)) is None


def test_the_same_seed_makes_the_same():
    spec = [Strided((4,), (1,), torch.float32, "cpu", Normal()), 3]
    (a, three), (b, _), (c, _) = (random_inputs(spec, seed) for seed in (1, 1, 2))
    assert three == 3 and torch.equal(a, b) and not torch.equal(a, c)

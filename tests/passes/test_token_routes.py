"""Experts whose rows are sorted: blended where that is proved, and every look-alike declined."""

from functools import cache, partial

import pytest
import torch
from support.blend_plain import WIDTH, Plain, compiled, inputs
from support.expert_layers import EACH, EXPERTS, ExpertLayer, ends, histogram, inverse, summed
from support.tolerance import assert_close_to_reference, max_error
from torch.utils._pytree import tree_map_only

from torch_cascade.compiler.report import Reason

# Spellings of the same function, in exact arithmetic.
SAME = {
    "as transformers does": {},
    "a stable sort": {"sort": lambda s: torch.sort(s.experts, stable=True)},
    "the sort's own inverse": {
        "left": lambda s: summed((s.y * s.scales)[torch.argsort(s.p)]),
    },
    "written back": {
        "left": lambda s: summed(torch.zeros_like(s.y).index_copy(0, s.p, s.y * s.scales)),
    },
    "written by an index": {
        "left": lambda s: summed(
            torch.ones_like(s.y).index_put((s.p,), s.y * s.scales),
        ),
    },
    "added to tokens": {
        "left": lambda s: s.x.index_add(0, s.p // EACH, s.y * s.scales) - s.x,
    },
    "counts of experts that are not sorted": {"offsets": lambda s: ends(histogram(s.chosen))},
    "counts in double": {
        "offsets": lambda s: ends(
            torch.histc(s.sorted.double(), EXPERTS, 0, EXPERTS - 1).to(torch.int64)
        ),
    },
    "rows that are repeated first": {
        "entered": lambda s: s.x.repeat_interleave(EACH, 0)[s.p],
    },
    "a norm of each row": {
        "left": lambda s: summed(
            (torch.layer_norm(s.y, (WIDTH,)) * 0 + s.y * s.scales)[inverse(s.p)]
        ),
    },
    "one piece of two": {
        "left": lambda s: summed((torch.cat([s.y, s.y], 1).chunk(2, 1)[1] * s.scales)[inverse(s.p)])
    },
}
SAME["a bias of each expert"] = {"biased": lambda s: s.y + s.layer.bias[s.sorted]}


@cache
def reference(batch, biased):
    """Gathered weights: the blend in float32 and in float64, and no blend; and what went in."""
    torch.manual_seed(41)
    layer, args = ExpertLayer(), inputs(batch)
    between = partial(gathered, layer, biased)
    eager, _ = compiled(Plain(), *args, None, between, strict=True)
    layer.double()
    given = doubled(args)
    exact, _ = compiled(Plain().double(), *given, None, between, strict=True)
    with torch.no_grad():
        whole = Plain().double()(*given, None, between)
    return args, eager, exact, whole


def gathered(layer, biased, x, number):
    return layer.gathered(x, biased=biased)


def doubled(args):
    return tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, args)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SAME)
def test_a_spelling_is_blended(name, batch):
    args, eager, exact, whole = reference(batch, "biased" in SAME[name])
    layer = ExpertLayer()
    got, record = compiled(
        Plain(), *args, None, lambda x, _: layer.sorted(x, **SAME[name]), strict=True
    )
    assert record.declined is None and record.layers[2] == "reused"
    assert_close_to_reference(got, eager, exact)
    assert max_error(whole, exact) > 1000 * max_error(got, exact)  # it is a blend


def test_rows_of_rows():
    """A second check layer sorts some of the rows that the first one sorted."""
    args, layer = reference(2, False)[0], ExpertLayer()
    options = {"check_layers": "0:0.7,1:0.3", "strict": True}
    results = [
        compiled(Plain(), *args, None, spelled, **options)[0]
        for spelled in (lambda x, _: layer.sorted(x), lambda x, _: layer.gathered(x))
    ]
    layer.double()
    spelled = partial(gathered, layer, False)
    exact, _ = compiled(Plain().double(), *doubled(args), None, spelled, **options)
    assert_close_to_reference(*results, exact)


def other(s):
    """Experts that another router chooses."""
    return s.layer.other(s.x).topk(EACH).indices.view(-1)


# Functions that look like it: in each, what a token gets depends on other tokens, or might.
OTHER = {
    "offsets of other experts": (
        {"offsets": lambda s: ends(histogram(other(s)))},
        "does not count the experts",
    ),
    "offsets that are given": (
        {"offsets": lambda s: s.layer.fixed},
        "is not the running total",
    ),
    "offsets that are moved": (
        {"offsets": lambda s: (ends(histogram(s.sorted)) - 1).clamp(min=0)},
        "is not the running total",
    ),
    "bins that rounding may choose": (
        {"offsets": lambda s: ends(torch.histc(s.sorted.float(), EXPERTS, 0, EXPERTS))},
        "has not one bin for each of 5 experts",
    ),
    "bins of other experts": (
        {"offsets": lambda s: ends(torch.histc(s.sorted.float(), EXPERTS, 1, EXPERTS))},
        "has not one bin for each of 5 experts",
    ),
    "experts below zero": (
        {"experts": lambda s: s.chosen.view(-1) - 1},
        "may be others than 0 to 5 - 1",
    ),
    "experts of a longer list": (
        {"experts": lambda s: torch.cat([s.layer.router(s.x)] * 2, 1).topk(EACH).indices.view(-1)},
        "may be others than 0 to 5 - 1",
    ),
    "descending experts": (
        {"sort": lambda s: torch.sort(s.experts, descending=True)},
        "in descending order",
    ),
    "rows by another sort": (
        {"entered": lambda s: s.x[torch.argsort(other(s)) // EACH]},
        "",
    ),
    "rows that are not sorted": ({"entered": lambda s: s.x.repeat_interleave(EACH, 0)}, ""),
    "rows of other tokens": ({"entered": lambda s: s.x[s.p // 4]}, "are not one of what it"),
    "rows from the end": ({"entered": lambda s: s.x[s.p % s.x.shape[0]]}, ""),
    "weights that are not sorted": ({"scales": lambda s: s.weights.view(-1, 1)}, ""),
    "weights by where a row stands": (
        {"scales": lambda s: torch.arange(s.p.shape[0])[:, None] / 99},
        "depends on where a row stands",
    ),
    "weights by the row's number": (
        {"scales": lambda s: (s.p[:, None] + 1) / 99},
        "the numbers of the rows",
    ),
    "weights by a group's size": (
        {"scales": lambda s: histogram(s.sorted)[s.sorted][:, None] / 9},
        "all tokens",
    ),
    "a sum over rows": ({"biased": lambda s: s.y + s.y.cumsum(0) / 99}, "cumsum"),
    "a mean over rows": ({"biased": lambda s: s.y - s.y.mean(0)}, "all tokens"),
    "neighbours": ({"biased": lambda s: s.y.view(-1, 2 * WIDTH).flip(1).view(-1, WIDTH)}, ""),
    "no inverse": ({"left": lambda s: summed(s.y * s.scales)}, ""),
    "the order again": ({"left": lambda s: summed((s.y * s.scales)[s.p])}, ""),
    "the inverse of another sort": (
        {"left": lambda s: summed((s.y * s.scales)[inverse(torch.argsort(other(s)))])},
        "",
    ),
    "a descending inverse": (
        {"left": lambda s: summed((s.y * s.scales)[torch.argsort(s.p, descending=True)])},
        "",
    ),
    "an inverse of other numbers": (
        {
            "left": lambda s: summed(
                (s.y * s.scales)[torch.empty_like(s.p).index_copy(0, s.p, s.p.flip(0))]
            )
        },
        "",
    ),
    "an inverse that is added": (
        {
            "left": lambda s: summed(
                (s.y * s.scales)[s.p.clamp(max=1).index_add(0, s.p, s.p * 0 + 1).clamp(max=9)]
            )
        },
        "",
    ),
    "the last row of each token": (
        {"left": lambda s: torch.zeros_like(s.x).index_put((s.p // EACH,), s.y * s.scales)},
        "are written to one",
    ),
    "added to other tokens": (
        {"left": lambda s: s.x.index_add(0, s.p // 4, s.y * s.scales)},
        "",
    ),
    "added by another sort": (
        {"left": lambda s: s.x.index_add(0, torch.argsort(other(s)) // EACH, s.y * s.scales)},
        "",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_look_alike_is_declined(name):
    parts, detail = OTHER[name]
    args, layer = reference(2, False)[0], ExpertLayer()
    got, record = compiled(Plain(), *args, None, lambda x, _: layer.sorted(x, **parts))
    assert record.declined.reason in (Reason.TOKENS_MIXED, Reason.NO_TOKEN_RULE), record.declined
    assert detail in str(record.declined)
    with torch.no_grad():
        wanted = Plain()(*args, None, lambda x, _: layer.sorted(x, **parts))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_expert_has_a_bin_of_its_own(dtype):
    """What `token_groups` takes for granted up to 1024 experts."""
    for count in range(2, 1025):
        experts = torch.arange(count, dtype=dtype)
        assert torch.histc(experts, count, 0, count - 1).eq(1).all(), count

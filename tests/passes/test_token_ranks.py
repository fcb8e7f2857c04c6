"""Ranks that hold some heads each: they choose the same rows, by the deviation of all heads."""

import pytest
import torch
from support.blend_plain import Plain, compiled, inputs
from support.shards import HEADS, Sharded, blend, on_ranks, prompt
from support.tolerance import assert_close_to_reference
from torch import distributed
from torch.distributed import _functional_collectives as functional_collectives
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from torch_cascade.compiler import pipeline
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pipeline import Pipeline
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.report import Reason
from torch_cascade.runtime.ranks import group_sizes


def by_rank(facts):
    """What the second rank prefers the first does not."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return facts.positions.to(facts.v_deviation.dtype) * (1 - 2 * rank)


RUNS = (
    {"recompute_ratio": "0.3"},
    {"recompute_ratio": "0.3", "selector": "k"},
    {"recompute_ratio": "0.3", "selector": "attention"},
    {"recompute_ratio": "0.3", "selector": "change"},
    {"recompute_ratio": "0.3", "selector": "question"},
    {"check_layers": "0:0.7,1:0.3"},
    {"recompute_ratio": 1},
    {"recompute_ratio": "0.3", "selector": by_rank},
)


def double(args):
    return tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, args)


def test_it_is_the_blend_of_all_heads():
    """Two processes, and one that has all heads; where scores differ, the first rank's count."""
    strict = [{**run, "strict": True} for run in RUNS]
    first, second = on_ranks(strict)
    assert [why for _, why in first + second] == [""] * 2 * len(RUNS)
    for options, (one, _), (other, _) in zip(strict, first, second, strict=True):
        assert torch.equal(one, other)
        usual, _ = blend(Sharded(), prompt(), options)
        exact, _ = blend(Sharded().double(), double(prompt()), options)
        assert_close_to_reference(one, usual, exact)


def test_each_alone_would_choose_others():
    """By the values of their own heads, at layer 1."""
    x, cached, fresh = prompt()
    one, kept = Sharded(), []

    def second_layer(x):
        kept.append(x)
        return x

    one.reduce = second_layer
    with torch.no_grad():
        one(x, cached, fresh)
        hidden = x + kept[0]
        v = torch.einsum("ntw,hdw->nhtd", hidden, one.qkv[1][2])
    moved = (v - cached[1][1]).square().sum(3)
    halves = moved[:, : HEADS // 2].sum(1), moved[:, HEADS // 2 :].sum(1)
    chosen = [half[:, :12].topk(4).indices.sort().values for half in halves]
    assert not torch.equal(*chosen)


@pytest.fixture
def groups():
    """Two ranks of which there is one: collectives give back what they are given."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.group.WORLD, torch.distributed.new_group([0])
    torch.distributed.destroy_process_group()


def assert_declined(between, reason, detail):
    x, cached, fresh = inputs()
    got, record = compiled(Plain(), x, cached, fresh, None, between)
    assert record.declined.reason is reason and detail in record.declined.detail
    with torch.no_grad():
        torch.testing.assert_close(got, Plain()(x, cached, fresh, None, between))
    _, above = compiled(
        Plain(), x, cached, fresh, None, lambda x, n: x if n else between(x, n), strict=True
    )
    assert above.declined is None


def test_several_groups_are_declined(groups):
    def between(x, layer):
        return functional_collectives.all_reduce(x, "sum", groups[layer % 2])

    assert_declined(between, Reason.TOKENS_MIXED, "different groups of ranks")


def test_ranks_that_hold_some_tokens_each_are_declined(groups):
    def between(x, layer):
        whole = functional_collectives.all_gather_tensor(x, 0, groups[0])
        return functional_collectives.wait_tensor(whole)[: len(x)]

    assert_declined(between, Reason.NO_TOKEN_RULE, "some tokens or features each")


def test_what_ranks_make_of_the_last_token_is_no_matter(groups):
    """As of logits whose vocabulary is spread over ranks: each rank chooses for itself."""

    def then(x):
        last = x[:, -1:].contiguous()  # torch 2.11 breaks the graph at others, and at other dims
        whole = functional_collectives.all_gather_tensor(last, 0, groups[0])
        return functional_collectives.wait_tensor(whole)

    args = inputs()
    got, record = compiled(Plain(then=then), *args, strict=True)
    assert record.declined is None
    usual, _ = compiled(Plain(), *args, strict=True)
    torch.testing.assert_close(got[: len(usual)], usual)


def test_the_size_of_a_group_is_in_the_key_of_caches(groups, monkeypatch):
    """The graph before the passes holds the group's name only."""

    def key():
        return Pipeline(Options.resolve({})[0], Compilation()).uuid()

    here, sizes = key(), dict(group_sizes())
    assert here == key() and sorted(sizes.values()) == [1, 2]
    sizes = {name: size + 1 for name, size in sizes.items()}
    monkeypatch.setattr(pipeline, "group_sizes", lambda: tuple(sizes.items()))
    assert key() != here

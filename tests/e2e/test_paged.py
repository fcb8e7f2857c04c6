"""Branches decoded from pages, compiled: against float64 over each branch's own tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.tolerance import assert_close_to_reference
from torch import Tensor

from torch_cascade.runtime.paged import PagePool
from torch_cascade.runtime.paged_branches import PagedBranches

H, G, D, DV = 2, 3, 16, 16
FP8 = torch.float8_e4m3fn


class Scene:
    """Prompts in a pool whose free pages are full of needles, and every token once more in lists.

    Each query is the key of one token of its own sequence, times 4: it finds that token unless a
    wrong page, or a place that is not written yet, is read: all of those hold every query too.
    """

    def __init__(
        self,
        page_size: int,
        prompts: list[int],
        branches: int,
        max_suffix: int,
        dtype: torch.dtype = torch.float32,
        stored: torch.dtype | None = None,
    ) -> None:
        self.dtype, self.branches = dtype, branches
        scales = {}
        if stored == FP8:
            scales = {name: torch.rand(H) / 64 + 1 / 64 for name in ("k_scale", "v_scale")}
        pages = sum(-(-n // page_size) for n in prompts)
        blocks = 5 + pages + len(prompts) * branches * -(-max_suffix // page_size)
        self.pool = PagePool(1, blocks, H, page_size, D, dtype=stored or dtype, **scales)
        for tensor in (self.pool.keys[0], self.pool.values[0]):
            tensor[1:] = (torch.randn(tensor.shape)[1:] * 2).to(tensor.dtype)
        self.rows: list[list[Tensor]] = []
        sequences = []
        for length in prompts:
            sequence = self.pool.sequence()
            sequence.extend(length)
            k, v = self.states(length)
            sequence.write(0, k, v)
            sequences.append(sequence)
            self.rows += [[*self.read(sequence)] for _ in range(branches)]
        self.batch = PagedBranches(sequences, branches, max_suffix)

    def states(self, tokens: int, *rows: int) -> tuple[Tensor, Tensor]:
        k, v = (torch.randn(*rows, H, tokens, D).to(self.dtype) for _ in "kv")
        return k, v

    def read(self, sequence) -> tuple[Tensor, Tensor]:
        """What is stored of a prompt, in float64 with its scales."""
        k, v = (x.double() for x in sequence.read(0))
        return self.scaled(k, self.pool.k_scale), self.scaled(v, self.pool.v_scale)

    @staticmethod
    def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
        return x if scale is None else x * scale.double()[:, None, None]

    def stored(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return self.scaled(self.pool.stored(x, scale).double(), scale)

    def step(self, tokens: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """(q, k, v) of the next step, and the attention in float64."""
        k, v = self.states(tokens, len(self.rows))
        queries, outs = [], []
        for n, row in enumerate(self.rows):
            own_k = self.stored(k[n], self.pool.k_scale)
            own_v = self.stored(v[n], self.pool.v_scale)
            row[0], row[1] = torch.cat([row[0], own_k], 1), torch.cat([row[1], own_v], 1)
            length = row[0].shape[1]
            found = torch.randint(length - tokens + 1, (tokens,))
            q = (row[0][:, found] * 4).to(self.dtype).repeat_interleave(G, 0)
            mask = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
            keys, values = (x.repeat_interleave(G, 0) for x in row)
            queries.append(q)
            outs.append(F.scaled_dot_product_attention(q.double(), keys, values, mask))
        return (torch.stack(queries), k, v), torch.stack(outs)


def decode_step(batch: PagedBranches) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = batch.mask(q.shape[2])
        batch.append(0, k, v)
        keys, values = batch.read(0, q.dtype)
        out = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
        batch.advance(q.shape[2])
        return out

    return step


def eager(batch: PagedBranches, q: Tensor) -> Tensor:
    """The attention over what a step has left in the pages, uncompiled."""
    tokens = q.shape[2]
    batch.suffix_lens -= tokens
    mask = batch.mask(tokens)
    batch.suffix_lens += tokens
    keys, values = batch.read(0, q.dtype)
    return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)


def run(scene: Scene, steps: list[int], backend) -> None:
    torch._dynamo.reset()
    step = torch.compile(decode_step(scene.batch), backend=backend, fullgraph=True)
    with torch.no_grad():
        for tokens in steps:
            inputs, expected = scene.step(tokens)
            actual = step(*inputs)
            assert_close_to_reference(actual, eager(scene.batch, inputs[0]), expected)


def check_report() -> None:
    (site,) = last_compilation().sites
    assert site.rewritten, site
    assert [" by pages " in segment.base for segment in site.segments] == [True, True]
    assert all(segment.mask.startswith("key < ") for segment in site.segments), site.segments


BACKEND = {"decide": "always", "verify": True, "strict": True}


# topk 8 and 5 steps behind prefixes that end in a page, at its end, and at its beginning: what
# SGLang's PR 7725 had to repair. And ragged prompts, so that the table is padded.
@pytest.mark.parametrize(
    ("page_size", "prompts"),
    [(4, [7]), (4, [8]), (4, [1]), (1, [7, 3]), (3, [10, 2]), (16, [17, 40]), (256, [300, 5])],
)
def test_decoding(page_size: int, prompts: list[int]) -> None:
    run(Scene(page_size, prompts, branches=8, max_suffix=5), [1] * 5, eager_cascade(**BACKEND))
    check_report()


def test_several_tokens_a_step() -> None:
    run(Scene(4, [7, 13], branches=3, max_suffix=12), [5, 5], eager_cascade(**BACKEND))
    assert last_compilation().sites[0].rewritten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_pages(dtype: torch.dtype) -> None:
    scene = Scene(4, [7, 13], branches=3, max_suffix=3, dtype=dtype, stored=FP8)
    run(scene, [1] * 3, eager_cascade(**BACKEND))
    check_report()


def test_an_accepted_branch_is_the_next_prefix() -> None:
    scene = Scene(4, [7], branches=4, max_suffix=5)
    run(scene, [1, 1], eager_cascade(**BACKEND))
    accepted = scene.batch.sequence(2)
    scene.batch.free()
    scene.rows = [list(scene.rows[2]) for _ in range(4)]
    scene.batch = PagedBranches([accepted], 4, 5)
    run(scene, [1, 1], eager_cascade(**BACKEND))


def test_inductor() -> None:
    """Generated code: right, and compiled once for all steps."""
    scene = Scene(4, [7, 13], branches=3, max_suffix=5)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(decode_step(scene.batch), backend="cascade", fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            inputs, expected = scene.step(1)
            actual = step(*inputs)
            assert_close_to_reference(actual, eager(scene.batch, inputs[0]), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["cascade"]["rewritten"] == 1

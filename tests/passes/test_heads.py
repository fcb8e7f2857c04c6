"""Which keys and values attention of chosen rows is given: heads of groups, and nothing else."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as sdpa

from torch_cascade import reuse_kv
from torch_cascade.compiler.graph import Sizes, shape
from torch_cascade.passes import heads, token_attention

T, HEADS, FEW, SIZE = 14, 6, 3, 4
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Grouped(nn.Module):
    """Two marked layers of `HEADS` query heads and `FEW` key heads, which `change` makes more."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(7)
        width = HEADS * SIZE
        self.q = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(width, 2 * FEW * SIZE) for _ in range(2))
        self.change = change

    def forward(self, x: Tensor, cached: list[tuple[Tensor, Tensor]], fresh: Tensor) -> Tensor:
        for number, (to_q, to_kv) in enumerate(zip(self.q, self.kv, strict=True)):
            q = to_q(x).unflatten(2, (HEADS, SIZE)).transpose(1, 2)
            k, v = to_kv(x).unflatten(2, (2, FEW, SIZE)).permute(2, 0, 3, 1, 4).unbind(0)
            k, v = self.change(*reuse_kv(k, v, *cached[number], fresh))
            x = x + sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x[:, -1:]


def blended(change: Change, by_positions: bool) -> tuple[Tensor, list[int]]:
    """The result with everything reused, and how many heads the attention of rows was given."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    x = torch.randn(2, T, HEADS * SIZE)
    cached = [(4 * torch.randn(2, FEW, T, SIZE), torch.randn(2, FEW, T, SIZE)) for _ in range(2)]
    fresh = torch.tensor([[T - 2, T - 1]]).repeat(2, 1)
    given: list[int] = []

    def spied(node, sizes):
        found = heads.fewest_heads(node, sizes)
        given.append(int(shape(found)[1]))
        return found

    backend = eager_cascade(decide="always", strict=True, recompute_ratio=0)
    with (
        torch.no_grad(),
        mock.patch.object(token_attention, "reads_positions", lambda device: by_positions),
        mock.patch.object(token_attention, "fewest_heads", spied),
    ):
        got = torch.compile(Grouped(change), backend=backend)(x, cached, fresh)
    assert last_compilation().blend.layers == ("reused", "reused")
    return got, given


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


def expanded(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)


def tiled(x: Tensor) -> Tensor:
    return x.repeat(1, 2, 1, 1)


def tiled_by_expand(x: Tensor) -> Tensor:
    return x[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2)


def permuted(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, 2, -1, -1).permute(0, 2, 1, 3, 4).flatten(1, 2)


def second(x: Tensor) -> Tensor:
    return x[:, 1:2].expand(-1, HEADS, -1, -1)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return interleaved(x.to(dtype).to(x.dtype))


def rounded_copies(x: Tensor, dtype: torch.dtype) -> Tensor:
    return interleaved(x).to(dtype).to(x.dtype)


@pytest.mark.parametrize(
    ("k_of", "v_of", "given"),
    [
        (interleaved, interleaved, FEW),
        (interleaved, expanded, FEW),
        (second, second, 1),
        (tiled, tiled, HEADS),
        (tiled_by_expand, tiled_by_expand, HEADS),
        (permuted, permuted, HEADS),
    ],
)
def test_heads_of_groups(k_of, v_of, given):
    """Head h reads head h // times: no other order of copies is taken for that."""
    change = lambda k, v: (k_of(k), v_of(v))  # noqa: E731
    got, read = blended(change, True)
    assert read and set(read) == {given}
    torch.testing.assert_close(got, blended(change, False)[0])


@pytest.mark.parametrize(("k_of", "v_of"), [(interleaved, tiled), (second, interleaved)])
def test_keys_and_values_that_are_repeated_differently(k_of, v_of):
    change = lambda k, v: (k_of(k), v_of(v))  # noqa: E731
    torch.testing.assert_close(blended(change, True)[0], blended(change, False)[0])


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ((1, FEW, T, SIZE), (2, FEW, T, SIZE)),
        ((2, FEW, 1, SIZE), (2, FEW, T, SIZE)),
        ((2, FEW, T, 1), (2, FEW, T, SIZE)),
    ],
)
def test_only_heads_may_be_repeated(stored, read):
    """Rows, keys and features that are expanded are not those that attention takes."""

    def copied(x: Tensor) -> Tensor:
        return interleaved(x.expand(read))

    graph = make_fx(copied, tracing_mode="fake")(torch.zeros(stored)).graph
    (out,) = graph.output_node().all_input_nodes
    found = heads.fewest_heads(out, Sizes.of(graph))
    assert tuple(shape(found)) == read


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32], ids=str)
@pytest.mark.parametrize("how", [rounded, rounded_copies])
def test_what_was_rounded_on_the_way_stays_rounded(how, dtype):
    """Simulated quantisation: the keys before it have the same dtype, and other numbers."""
    change = lambda k, v: (how(k, dtype), how(v, dtype))  # noqa: E731
    got = blended(change, True)[0]
    torch.testing.assert_close(got, blended(change, False)[0])
    exact = blended(lambda k, v: (interleaved(k), interleaved(v)), False)[0]
    assert (got - exact).abs().max() > 1e-3

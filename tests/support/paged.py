"""Pools with pages in several layouts, and what the tests of pages ask of a rewritten graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.capture import joint_graph
from support.tolerance import assert_close_to_reference
from torch import Tensor, fx

from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.compiler.record import Compilation
from torch_cascade.passes.cascade import CascadePass

# Pairwise distinct: requests, branches, KV heads, heads in a group, page size, pages of a prefix
# and of a suffix, queries, head size, blocks.
B, T, H, G, PAGE, P, S, M, D, BLOCKS = 2, 3, 5, 4, 8, 9, 1, 7, 16, 40
N = B * T
Tensors = dict[str, Tensor]
Build = Callable[[Tensors, str], Tensor]
ATTEND = torch.ops.cascade.attend.default


def tensors(
    page: int = PAGE, pages: int = P, suffix: int = S, dtype: torch.dtype = torch.float32
) -> Tensors:
    """Pools in several layouts with the same content, tables of distinct pages, and lengths.

    Every page of the pool is as loud as those that are used: reading a wrong one is seen.
    """
    blocks = max(BLOCKS, B * pages + N * suffix)
    order = torch.randperm(blocks)
    made = {
        "q": torch.randn(N, H * G, M, D, dtype=dtype) * 3,
        "table": order[: B * pages].view(B, pages).to(torch.int32),
        "suffix": order[B * pages : B * pages + N * suffix].view(N, suffix).to(torch.int32),
        "lens": torch.tensor([pages * page - 3, page + 1]),
        "suffix_lens": torch.arange(N, dtype=torch.int32) % (suffix * page) + 1,
        "row_lens": torch.arange(N) * 7 + 1,
        "k_scale": torch.rand(H) + 0.5,
        "v_scale": torch.rand(1, H, 1, 1).to(torch.bfloat16) + 0.5,
    }
    for which in "kv":
        pool = torch.randn(blocks, page, H, D, dtype=dtype)
        made |= {
            f"nhd_{which}": pool,
            f"hnd_{which}": pool.transpose(1, 2).contiguous(),
            f"flat_{which}": pool.view(blocks * page, H, D),
            f"merged_{which}": pool.view(blocks, page, H * D),
            f"layers_{which}": torch.stack([pool + 1, pool], 1),
            f"fp8_{which}": pool.to(torch.float8_e4m3fn),
        }
    return made


def nhd(pool: Tensor, table: Tensor) -> Tensor:
    """Keys of a pool [blocks, page, H, D]."""
    return pool[table].flatten(1, 2).transpose(1, 2)


def hnd(pool: Tensor, table: Tensor) -> Tensor:
    """Keys of a pool [blocks, H, page, D]."""
    return pool[table].transpose(1, 2).flatten(2, 3)


def attention(
    k: Build, v: Build | None = None, mask: Callable[[Tensors], Tensor] | None = None
) -> Callable[..., Tensor]:
    """SDPA over what the builds give, of `values_of(tensors())`."""
    names = sorted(tensors())

    def run(*values: Tensor) -> Tensor:
        t = dict(zip(names, values, strict=True))
        seen = None if mask is None else mask(t)
        keys, values_ = k(t, "k"), (v or k)(t, "v")
        return F.scaled_dot_product_attention(t["q"], keys, values_, seen, enable_gqa=True)

    return run


def values_of(t: Tensors) -> list[Tensor]:
    """The inputs of `attention` in order."""
    return [t[name] for name in sorted(t)]


def attends(
    fn: Callable[..., Any], values: Sequence[Tensor], dynamic: bool | None = None
) -> list[fx.Node]:
    """The `attend` calls of the rewritten graph."""
    graph = joint_graph(fn, *values, prepare=capture, dynamic=dynamic).graph
    context = PassContext(
        Sizes.of(graph, may_guard=True), Options(decide="always", strict=True), Compilation()
    )
    CascadePass().apply(graph, context)
    graph.eliminate_dead_code()
    return list(graph.find_nodes(op="call_function", target=ATTEND))


def check(
    fn: Callable[..., Tensor], values: Sequence[Tensor], exact: Sequence[Tensor] | None = None
) -> None:
    """The compiled function is as close to float64 as eager is, and was rewritten.

    Args:
        fn: the function.
        values: its arguments.
        exact: those of the float64 reference, where converting `values` does not say it.
    """
    torch._dynamo.reset()
    backend = eager_cascade(decide="always", verify=True, strict=True)
    with torch.no_grad():
        actual, eager = torch.compile(fn, backend=backend)(*values), fn(*values)
        doubles = [v.double() if v.is_floating_point() else v for v in values]
        reference = fn(*(exact or doubles)).double()
    assert all(site.rewritten for site in last_compilation().sites), last_compilation().sites
    assert_close_to_reference(actual, eager, reference)

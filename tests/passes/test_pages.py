"""`pool[page_table]` read as pages: every spelling, what must not match, and the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.capture import joint_graph
from support.tolerance import assert_close_to_reference

from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes, tensor
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.compiler.record import Compilation
from torch_cascade.passes.cascade import CascadePass

# Pairwise distinct: requests, branches, KV heads, heads in a group, page size, pages of a prefix
# and of a suffix, queries, head size, blocks.
B, T, H, G, PAGE, P, S, M, D, BLOCKS = 2, 3, 5, 4, 8, 9, 1, 7, 16, 40
N = B * T
Tensors = dict[str, torch.Tensor]
Build = Callable[[Tensors, str], torch.Tensor]
ATTEND = torch.ops.cascade.attend.default


def tensors(page: int = PAGE, pages: int = P, suffix: int = S, dtype=torch.float32) -> Tensors:
    """Pools in several layouts with the same content, and tables of distinct pages.

    Every page of the pool is as loud as those that are used: reading a wrong one is seen.
    """
    blocks = max(BLOCKS, B * pages + N * suffix)
    order = torch.randperm(blocks)
    made = {
        "q": torch.randn(N, H * G, M, D, dtype=dtype) * 3,
        "table": order[: B * pages].view(B, pages).to(torch.int32),
        "suffix": order[B * pages : B * pages + N * suffix].view(N, suffix).to(torch.int32),
        "lens": torch.tensor([pages * page - 3, max(pages * page - page - 1, 1)]),
        "suffix_lens": torch.arange(N, dtype=torch.int32) % (suffix * page) + 1,
    }
    for which in "kv":
        pool = torch.randn(blocks, page, H, D, dtype=dtype)
        made |= {
            f"nhd_{which}": pool,
            f"hnd_{which}": pool.transpose(1, 2).contiguous(),
            f"flat_{which}": pool.view(blocks * page, H, D),
            f"merged_{which}": pool.view(blocks, page, H * D),
            f"layers_{which}": torch.stack([pool + 1, pool], 1),
        }
    return made


def nhd(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return pool[table].flatten(1, 2).transpose(1, 2)


def hnd(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return pool[table].transpose(1, 2).flatten(2, 3)


def sequence(build: Build) -> Build:
    """The prefix that `build` gives, then the branch's own pages."""
    return lambda t, w: torch.cat([build(t, w), nhd(t[f"nhd_{w}"], t["suffix"])], 2)


def by_token(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[blocks, page, H, D] indexed by page and slot of every token."""
    keys, page = table.shape[1] * pool.shape[1], pool.shape[1]
    token = torch.arange(keys)
    return pool[table[:, token // page], token % page].transpose(1, 2)


def by_slot(t: Tensors, w: str) -> torch.Tensor:
    """A pool of single tokens, as the address of each."""
    page = t["nhd_k"].shape[1]
    slots = (t["table"][:, :, None] * page + torch.arange(page, dtype=torch.int32)).flatten(1)
    return t[f"flat_{w}"][slots.repeat_interleave(T, 0)].transpose(1, 2)


def one_row(t: Tensors, w: str) -> torch.Tensor:
    return nhd(t[f"nhd_{w}"], t["table"][:1]).expand(N, -1, -1, -1)


def selected(t: Tensors, w: str) -> torch.Tensor:
    pages = t[f"nhd_{w}"].index_select(0, t["table"].repeat_interleave(T, 0).flatten())
    return pages.view(N, P * PAGE, H, D).transpose(1, 2)


# name -> the prefix, and the page size its `attend` reads with (None: that of the pool)
SHARED: dict[str, tuple[Build, int | None]] = {
    "table.repeat_interleave": (
        lambda t, w: nhd(t[f"nhd_{w}"], t["table"].repeat_interleave(T, 0)),
        None,
    ),
    "table expanded": (
        lambda t, w: nhd(t[f"nhd_{w}"], t["table"][:, None].expand(B, T, -1).reshape(N, -1)),
        None,
    ),
    "table indexed by arange // T": (
        lambda t, w: nhd(t[f"nhd_{w}"], t["table"][torch.arange(N) // T]),
        None,
    ),
    "int64 table": (
        lambda t, w: nhd(t[f"nhd_{w}"], t["table"].long().repeat_interleave(T, 0)),
        None,
    ),
    "pages expanded": (
        lambda t, w: nhd(t[f"nhd_{w}"], t["table"]).repeat_interleave(T, 0),
        None,
    ),
    "heads before the page": (
        lambda t, w: hnd(t[f"hnd_{w}"], t["table"].repeat_interleave(T, 0)),
        None,
    ),
    "heads and features merged": (
        lambda t, w: (
            t[f"merged_{w}"][t["table"].repeat_interleave(T, 0)]
            .view(N, -1, H, D)
            .permute(0, 2, 1, 3)
        ),
        None,
    ),
    "one layer of a stacked pool": (
        lambda t, w: nhd(t[f"layers_{w}"][:, 1], t["table"].repeat_interleave(T, 0)),
        None,
    ),
    "page and slot of each token": (
        lambda t, w: by_token(t[f"nhd_{w}"], t["table"]).repeat_interleave(T, 0),
        None,
    ),
    "slots": (by_slot, 1),
    "one row for all": (one_row, None),
    "columns of a wider table": (
        lambda t, w: nhd(t[f"nhd_{w}"], t["table"][:, 1:3].repeat_interleave(T, 0)),
        None,
    ),
    "the first keys of the last page": (
        lambda t, w: nhd(t[f"nhd_{w}"], t["table"].repeat_interleave(T, 0))[:, :, :-2],
        None,
    ),
    "negative entries": (
        lambda t, w: nhd(t[f"nhd_{w}"], (t["table"] - BLOCKS).repeat_interleave(T, 0)),
        None,
    ),
}


def attention(k: Build, v: Build | None = None) -> Callable[..., torch.Tensor]:
    names = sorted(tensors())

    def run(*values: torch.Tensor) -> torch.Tensor:
        t = dict(zip(names, values, strict=True))
        return F.scaled_dot_product_attention(t["q"], k(t, "k"), (v or k)(t, "v"), enable_gqa=True)

    return run


def attends(fn: Callable[..., Any], values: Sequence[torch.Tensor], dynamic=None) -> list[Any]:
    """The `attend` calls of the rewritten graph."""
    graph = joint_graph(fn, *values, prepare=capture, dynamic=dynamic).graph
    sizes = Sizes.of(graph, may_guard=True)
    context = PassContext(sizes, Options(decide="always", strict=True), Compilation())
    CascadePass().apply(graph, context)
    graph.eliminate_dead_code()
    return list(graph.find_nodes(op="call_function", target=ATTEND))


def values_of(t: Tensors) -> list[torch.Tensor]:
    return [t[name] for name in sorted(t)]


def check(fn: Callable[..., torch.Tensor], values: Sequence[torch.Tensor], dynamic=None) -> None:
    """The compiled function is as close to float64 as eager is, and was rewritten."""
    torch._dynamo.reset()
    backend = eager_cascade(decide="always", verify=True, strict=True)
    with torch.no_grad():
        actual = torch.compile(fn, backend=backend, dynamic=dynamic)(*values)
        eager = fn(*values)
        reference = fn(*(v.double() if v.is_floating_point() else v for v in values))
    assert all(site.rewritten for site in last_compilation().sites), last_compilation().sites
    assert_close_to_reference(actual, eager, reference)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SHARED)
def test_the_prefix_is_read_by_its_table(name: str, dynamic: bool | None) -> None:
    build, page = SHARED[name]
    values = values_of(tensors())
    prefix, suffix = attends(attention(sequence(build)), values, dynamic)
    pool = tensor(prefix.args[1])
    assert (pool.shape[1], pool.shape[2], pool.shape[3]) == (H, page or PAGE, D)
    assert dynamic or pool.shape[0] == BLOCKS * PAGE // (page or PAGE)
    assert tensor(prefix.kwargs["page_table"]).shape[0] == (1 if name == "one row for all" else B)
    assert tensor(suffix.kwargs["page_table"]).shape[0] == N
    if dynamic is None:
        check(attention(sequence(build)), values)


def test_index_select() -> None:
    values = values_of(tensors())
    prefix, _ = attends(attention(sequence(selected)), values)
    assert tensor(prefix.kwargs["page_table"]).shape == (B, P)
    check(attention(sequence(selected)), values)


@pytest.mark.parametrize(("page", "pages"), [(1, 13), (3, 5), (16, 2), (256, 1)])
@pytest.mark.parametrize("layout", [nhd, hnd])
def test_page_sizes(page: int, pages: int, layout: Callable[..., torch.Tensor]) -> None:
    def build(t: Tensors, w: str) -> torch.Tensor:
        pool = t[f"{layout.__name__}_{w}"]
        return torch.cat(
            [layout(pool, t["table"].repeat_interleave(T, 0)), layout(pool, t["suffix"])], 2
        )

    values = values_of(tensors(page, pages, 2))
    prefix, _ = attends(attention(build), values)
    assert tensor(prefix.args[1]).shape[2] == page
    check(attention(build), values)

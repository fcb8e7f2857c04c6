"""`pool[page_table]` read as pages: every spelling, what must not match, and the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.paged import (
    BLOCKS,
    PAGE,
    B,
    Build,
    D,
    H,
    N,
    P,
    T,
    Tensors,
    attends,
    attention,
    check,
    hnd,
    nhd,
    tensors,
    values_of,
)

from torch_cascade.compiler.graph import tensor


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


def shared(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return nhd(pool, table.repeat_interleave(T, 0))


def page_minor(t: Tensors, w: str) -> torch.Tensor:
    """Key j is slot j // P of page j % P."""
    pages = t[f"nhd_{w}"][t["table"]]
    keys = pages.transpose(1, 2).flatten(1, 2).transpose(1, 2)
    return keys.repeat_interleave(T, 0)


def split_features(t: Tensors, w: str) -> torch.Tensor:
    """A pool [blocks, H, D / 4, page, 4], as old kernels want it: no view of it is [page, D]."""
    pool = t[f"hnd_{w}"].unflatten(3, (D // 4, 4)).permute(0, 1, 3, 2, 4).contiguous()
    pages = pool[t["table"]]
    keys = pages.permute(0, 2, 1, 4, 3, 5).flatten(2, 3).flatten(3, 4)
    return keys.repeat_interleave(T, 0)


def other_table(t: Tensors, w: str) -> torch.Tensor:
    table = t["table"] if w == "k" else t["table"].flip(1)
    return shared(t[f"nhd_{w}"], table)


def other_end(t: Tensors, w: str) -> torch.Tensor:
    keys = nhd(t[f"nhd_{w}"], t["table"])
    return (keys[:, :, :-2] if w == "k" else keys[:, :, 2:]).repeat_interleave(T, 0)


def fewer_blocks(t: Tensors, w: str) -> torch.Tensor:
    """A negative entry means another block in a pool of another size."""
    pool = t[f"nhd_{w}"] if w == "k" else t[f"nhd_{w}"][:-1]
    return shared(pool, -1 - t["table"].flip(0).remainder(BLOCKS - 1))


NOT_PAGED: dict[str, Build] = {
    "page is the minor digit of the key": page_minor,
    "features in two dims": split_features,
    "K and V have tables of their own": other_table,
    "K and V use other ends of the last page": other_end,
    "K and V have pools of other sizes": fewer_blocks,
}


@pytest.mark.parametrize("name", NOT_PAGED)
def test_look_alikes_are_gathered(name: str) -> None:
    """Read as the tensor that the lookup makes, still shared where that is proved."""
    build, values = NOT_PAGED[name], values_of(tensors())
    prefix = attends(attention(sequence(build)), values)[0]
    assert "page_table" not in prefix.kwargs
    check(attention(sequence(build)), values)


def test_one_table_computed_twice() -> None:
    def build(t: Tensors, w: str) -> torch.Tensor:
        return shared(t[f"nhd_{w}"], t["table"].clamp(min=3))

    prefix, _ = attends(attention(sequence(build)), values_of(tensors()))
    assert "page_table" in prefix.kwargs


def test_repeat_order() -> None:
    def build(t: Tensors, w: str) -> torch.Tensor:
        return nhd(t[f"nhd_{w}"], t["table"].repeat(T, 1))

    values = values_of(tensors())
    prefix, _ = attends(attention(sequence(build)), values)
    assert tensor(prefix.kwargs["page_table"]).shape == (B, P)
    check(attention(sequence(build)), values)


def test_converted_pages_are_gathered_once_a_request() -> None:
    """A pool of another precision would have to be converted whole: its pages are, for B rows."""

    def build(t: Tensors, w: str) -> torch.Tensor:
        half = t[f"nhd_{w}"].to(torch.bfloat16)
        return torch.cat([shared(half, t["table"]).float(), nhd(half, t["suffix"]).float()], 2)

    values = values_of(tensors())
    prefix, _ = attends(attention(build), values)
    assert "page_table" not in prefix.kwargs
    assert tensor(prefix.args[1]).shape == (B, H, P * PAGE, D)


@pytest.mark.parametrize("queries", [1, 7])
def test_pool_written_in_the_same_graph(queries: int) -> None:
    """New tokens go to the branch's own page first, as in a decode step."""
    names = sorted(tensors())

    def run(*values: torch.Tensor) -> torch.Tensor:
        t = dict(zip(names, values, strict=True))
        for which in "kv":
            slot = t["suffix_lens"] % PAGE
            t[f"nhd_{which}"].index_put_((t["suffix"][:, 0], slot), t["q"][:, :H, 0])
        t["q"] = t["q"][:, :, :queries]
        fn = attention(sequence(lambda t, w: shared(t[f"nhd_{w}"], t["table"])))
        return fn(*(t[name] for name in names))

    values = values_of(tensors())
    assert len(attends(run, [v.clone() for v in values])) == 2
    check(run, values)

"""FlashInfer's two-level cascade over a paged cache; planned once, before it is timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cascade.benchmarks.inputs import Inputs

PAGE = 16  # keys a page, its usual
WORKSPACE = 256 * 2**20


Run = Callable[[Tensor, Tensor], Tensor]
"""Attention of queries [tokens, Hq, D] over a pool of pages."""


class Plan(NamedTuple):
    """What FlashInfer plans from, a list entry a level: prefixes, then suffixes.

    Attributes:
        starts: first query token of each sequence, int32 [sequences + 1].
        tables: the results of `page_table`.
        sizes: query heads, KV heads, features, keys a page.
        dtype: of queries, keys and values.
    """

    starts: list[Tensor]
    tables: list[tuple[Tensor, Tensor, Tensor]]
    sizes: tuple[int, int, int, int]
    dtype: torch.dtype


def make(inputs: Inputs, backend: str | None = None) -> Callable[[], Tensor]:
    """A function that runs what was planned and returns [N, Hq, S, D].

    Args:
        inputs: of a row.
        backend: None for FlashInfer's cascade as it comes, which chooses kernels by the device;
            else the backend of both its levels, which that cascade has no option for. On compute
            capability 9 it chooses "fa3", whose plans (0.5.3) do not split keys; "fa2" does.
    """
    flashinfer = importlib.import_module("flashinfer")
    row, device = inputs.row, inputs.q.device
    tables = [
        page_table(row.requests, row.prefix, 0, device),
        page_table(row.batch, row.suffix, row.requests * pages(row.prefix), device),
    ]
    tokens = row.batch * row.queries
    levels = (row.branches * row.queries, row.queries)
    starts = [torch.arange(0, tokens + 1, n, dtype=torch.int32, device=device) for n in levels]
    batch, heads, queries, dim = inputs.q.shape
    plan = Plan(starts, tables, (heads, inputs.prefix_k.shape[1], dim, PAGE), inputs.q.dtype)
    run = _whole(flashinfer, plan) if backend is None else _levels(flashinfer, plan, backend)
    pool = paged(inputs)
    q = inputs.q.transpose(1, 2).reshape(tokens, heads, dim)
    return lambda: run(q, pool).view(batch, queries, heads, dim).transpose(1, 2)


def _workspace(plan: Plan) -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=plan.starts[0].device)


def _whole(flashinfer: Any, plan: Plan) -> Run:
    """FlashInfer's own cascade."""
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, _workspace(plan), "NHD")
    columns = (list(column) for column in zip(*plan.tables, strict=True))
    wrapper.plan(plan.starts, *columns, *plan.sizes, q_data_type=plan.dtype)
    run: Run = wrapper.run
    return run


def _levels(flashinfer: Any, plan: Plan, backend: str) -> Run:
    """The same two levels and their merge, of a backend that is chosen here."""
    made = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    wrappers = [made(_workspace(plan), "NHD", backend=backend) for _ in plan.tables]
    for wrapper, starts, table in zip(wrappers, plan.starts, plan.tables, strict=True):
        wrapper.plan(starts, *table, *plan.sizes, q_data_type=plan.dtype)
    prefix, suffix = wrappers

    def run(q: Tensor, pool: Tensor) -> Tensor:
        out: Tensor
        out, lse = suffix.run(q, pool, return_lse=True)
        flashinfer.merge_state_in_place(out, lse, *prefix.run(q, pool, return_lse=True))
        return out

    return run


def pages(length: int) -> int:
    """Pages that `length` keys fill."""
    return -(-length // PAGE)


def page_table(
    rows: int, length: int, start: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`rows` sequences of `length` keys in consecutive pages from `start`.

    Returns:
        First entry of each sequence [rows + 1], page numbers, keys in the last page [rows]; int32.
    """
    each = pages(length)
    last = length - (each - 1) * PAGE
    with device:
        return (
            torch.arange(0, rows * each + 1, each, dtype=torch.int32),
            torch.arange(start, start + rows * each, dtype=torch.int32),
            torch.full((rows,), last, dtype=torch.int32),
        )


def paged(inputs: Inputs) -> Tensor:
    """All keys and values as pages [pages, 2, PAGE, Hkv, D], prefixes first."""
    prefix = _pages_of(inputs.prefix_k, inputs.prefix_v)
    return torch.cat([prefix, _pages_of(inputs.suffix_k, inputs.suffix_v)])


def _pages_of(k: Tensor, v: Tensor) -> Tensor:
    rows, heads, length, dim = k.shape
    padded = k.new_zeros(rows, pages(length) * PAGE, 2, heads, dim)
    padded[:, :length] = torch.stack([k, v], 2).permute(0, 3, 2, 1, 4)
    return padded.view(-1, PAGE, 2, heads, dim).transpose(1, 2).contiguous()

"""FlashInfer's two-level cascade over a paged cache; planned once, before it is timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from torch_cascade.benchmarks.inputs import Inputs

PAGE = 16  # keys a page, its usual
WORKSPACE = 256 * 2**20


def make(inputs: Inputs) -> Callable[[], Tensor]:
    """A function that runs the planned wrapper and returns [N, Hq, S, D]."""
    flashinfer = importlib.import_module("flashinfer")
    row, device = inputs.row, inputs.q.device
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    tables = [
        page_table(row.requests, row.prefix, 0, device),
        page_table(row.batch, row.suffix, row.requests * pages(row.prefix), device),
    ]
    tokens = row.batch * row.queries
    levels = (row.branches * row.queries, row.queries)
    starts = [torch.arange(0, tokens + 1, n, dtype=torch.int32, device=device) for n in levels]
    batch, heads, queries, dim = inputs.q.shape
    wrapper.plan(
        starts,
        *(list(column) for column in zip(*tables, strict=True)),
        heads,
        inputs.prefix_k.shape[1],
        dim,
        PAGE,
        q_data_type=inputs.q.dtype,
    )
    pool = paged(inputs)
    q = inputs.q.transpose(1, 2).reshape(tokens, heads, dim)
    return lambda: wrapper.run(q, pool).view(batch, queries, heads, dim).transpose(1, 2)


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

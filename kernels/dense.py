"""The extended forms of `cascade::attend` in terms of the base form, in plain functional torch.

Pages become keys [R, Hkv, L, D], fp8 becomes the accumulation dtype, and lengths and ALiBi become
one mask. What results is an ordinary call without these options, which any implementation computes.
The code is run eagerly and also traced on fake tensors: it never branches on data and asks nothing
about symbolic sizes.

A key at or past `kv_lens` may hold anything, NaN included. Hiding its score is not enough, as its
weight of 0 times an infinite value is NaN: its K and V are replaced by zeros.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torch_cascade.kernels.known import known

Size = int | torch.SymInt

FP8 = torch.float8_e4m3fn
_NO_BLOCK = 2**31 - 1  # no pool has as many


class Dense(NamedTuple):
    """What is left of an extended call: keys, values and mask of the base form."""

    k: Tensor
    v: Tensor
    mask: Tensor | None


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    branches: Size = 1,
    q_positions: Tensor | None = None,
    kv_start: Size = 0,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Dense:
    """Keys, values and mask of the base form; the arguments themselves where no option is given.

    Args: see `torch_cascade.kernels.ops.attend`. `q_positions` and `kv_start` are read for ALiBi
        only: what they hide is not in the mask returned, and they stay arguments of the base form.

    Returns:
        k [R, Hkv, L, Dk] and v [R, Hkv, L, Dv] in the dtype given, or float32 for fp8; copies where
        any of `kv_lens`, `page_table` or fp8 is used. mask as in the base form: bool, or floating
        in the accumulation dtype where `alibi_slopes` is given.

    Example:
        Two pages of two keys, the last key unused:

        >>> pool = torch.arange(12.0).view(3, 1, 2, 2)
        >>> table, lens = torch.tensor([[2, 0]]), torch.tensor([3])
        >>> k, _, mask = dense(torch.ones(1, 1, 1, 2), pool, pool, page_table=table, kv_lens=lens)
        >>> k[0, 0].tolist()
        [[8.0, 9.0], [10.0, 11.0], [0.0, 1.0], [0.0, 0.0]]
        >>> mask[0, 0, 0].tolist()
        [True, True, True, False]
    """
    if page_table is not None:
        table = _read_pages(page_table, kv_lens, k.size(2))
        k, v = _gathered(k, table), _gathered(v, table)
    if k.dtype == FP8:
        k, v = _dequantized(k, k_scale), _dequantized(v, v_scale)
    if alibi_slopes is not None:
        assert q_positions is not None, "checked by the op"
        mask = _plus(mask, _alibi(alibi_slopes, q, q_positions, kv_start, k.size(2)))
    if kv_lens is not None:
        # [R, 1, L, 1]
        held = (torch.arange(k.size(2), device=k.device) < kv_lens.view(-1, 1))[:, None, :, None]
        k, v = torch.where(held, k, 0.0), torch.where(held, v, 0.0)
        mask = _only(mask, _of_queries(held, branches))
    return Dense(k, v, mask)


def _read_pages(page_table: Tensor, kv_lens: Tensor | None, page_size: Size) -> Tensor:
    """The page table [R, P] with block 0 in place of the pages that hold no key to be read."""
    if kv_lens is None:
        return page_table
    start = torch.arange(page_table.size(1), device=page_table.device) * cast("int", page_size)
    return torch.where(start < kv_lens.view(-1, 1), page_table, 0)


def _gathered(pool: Tensor, page_table: Tensor) -> Tensor:
    """[blocks, Hkv, page_size, D] -> [R, Hkv, L, D], a copy stored as [R, L, Hkv, D]."""
    (rows, pages), (_, heads, page_size, width) = page_table.shape, pool.shape
    # Compiled code would count a negative entry from the end: it names no block, here as in eager.
    named = torch.where(page_table < 0, _NO_BLOCK, page_table).reshape(-1)
    read = pool.transpose(1, 2).index_select(0, named)
    # Traced, it lies as the pool does, whose dims may stand in any order.
    if not all(known(d) for d in _are_dense(read)):
        read = read.clone(memory_format=torch.contiguous_format)
    return read.view(rows, pages * page_size, heads, width).transpose(1, 2)


def _are_dense(x: Tensor) -> list[bool | torch.SymBool]:
    """For each stride of x whether it is that of a contiguous tensor."""
    inside = [math.prod(x.shape[dim + 1 :]) for dim in range(x.dim())]
    return [stride == dense for stride, dense in zip(x.stride(), inside, strict=True)]


def _dequantized(x: Tensor, scale: Tensor | None) -> Tensor:
    """Fp8 [R, Hkv, L, D] -> float32: the values times the scale of their head.

    Not to the dtype of q: an fp8 value times a scale fits neither bfloat16 nor float16.
    """
    x = x.to(torch.float32)
    return x if scale is None else x * scale.view(1, -1, 1, 1)


def _alibi(slopes: Tensor, q: Tensor, q_positions: Tensor, kv_start: Size, keys: Size) -> Tensor:
    """slope_h * (position of the key - position of the query): [1|N, Hq, 1|M, L]."""
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, queries = (1,) * (2 - q_positions.dim()) + tuple(q_positions.shape)
    key = torch.arange(cast("int", keys), device=q.device).add(cast("int", kv_start))
    distance = key - q_positions.view(rows, 1, queries, 1)  # in integers: exact at any position
    return slopes.to(acc).view(1, -1, 1, 1) * distance.to(acc)


def _plus(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    return mask.to(bias.dtype) + bias


def _only(mask: Tensor | None, visible: Tensor) -> Tensor:
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else torch.where(visible, mask, -math.inf)


def _of_queries(held: Tensor, branches: Size) -> Tensor:
    """[R, 1, L, 1] of the KV rows -> [N, 1, 1, L] of the query rows that read them."""
    rows, _, keys, _ = held.shape
    expanded = held.view(rows, 1, keys).expand(rows, branches, keys)
    return expanded.reshape(rows * branches, 1, 1, keys)

"""What the ops mean, in float64 and the most obvious code: the oracle of the tests.

Nothing else imports this file. K and V are expanded, masks are explicit, every row is computed
against every key. With `dtype=torch.float32` the same formulas show the error that straightforward
code makes at that precision, which is what an implementation's error is judged by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    branches: int = 1,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    kv_start: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """`cascade::attend` in the most obvious code.

    Args: see `torch_cascade.kernels.ops.attend`; any dtypes, computed in `dtype`.

    Returns:
        o [N, Hq, M, Dv] and lse [N, Hq, M], in `dtype`.
    """
    group = q.size(1) // k.size(1)
    k, v = (
        _keys(k, k_scale, kv_lens, page_table, dtype),
        _keys(v, v_scale, kv_lens, page_table, dtype),
    )
    k = k.repeat_interleave(branches, 0).repeat_interleave(group, 1)
    v = v.repeat_interleave(branches, 0).repeat_interleave(group, 1)
    scores = q.to(dtype) @ k.transpose(-1, -2)
    scores = scores * (1.0 / math.sqrt(q.size(-1)) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        assert q_positions is not None
        query = q_positions.expand(q.size(0), q.size(2))[:, None, :, None]
        key = torch.arange(kv_start, kv_start + k.size(2), device=q.device)
        scores = scores + alibi_slopes.to(dtype)[:, None, None] * (key - query).to(dtype)
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(dtype)
    if q_positions is not None:
        rows = q_positions.expand(q.size(0), q.size(2))
        visible = positions_visible(rows, k.size(2), kv_start, window).unsqueeze(1)
        scores = torch.where(visible, scores, -math.inf)
    if kv_lens is not None:
        for n in range(q.size(0)):
            scores[n, :, :, max(0, int(kv_lens[n // branches])) :] = -math.inf
    return _softmax_times(scores, v)


def merge_reference(
    o: Sequence[Tensor],
    lse: Sequence[Tensor],
    *,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """`cascade::merge` in the most obvious code, for finite outputs and an lse below +inf."""
    if sinks is not None:  # the sink is a key of value zero: a part of its own
        o, lse = [*o, torch.zeros_like(o[0])], [*lse, sinks.expand(lse[0].shape)]
    lse_parts = torch.stack([part.to(dtype) for part in lse], -1)  # [..., parts]
    o_parts = torch.stack([part.to(dtype) for part in o], -2)  # [..., parts, D]
    out, total = _softmax_times(lse_parts.unsqueeze(-2), o_parts)
    return out.squeeze(-2), total.squeeze(-1)


def sdpa_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`cascade::sdpa` in the most obvious code, for 4-D q, k, v.

    Args: see `torch_cascade.kernels.ops.sdpa`; heads may be grouped. Computed in `dtype`.

    Returns:
        o [N, Hq, M, Dv], in `dtype`.
    """
    if is_causal:
        attn_mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
    return attend_reference(q, k, v, attn_mask, scale=scale, dtype=dtype)[0]


def positions_visible(
    q_positions: Tensor, keys: int, kv_start: int = 0, window: int | None = None
) -> Tensor:
    """Which of `keys` keys the positions [...] let each query see: bool [..., keys]."""
    position = q_positions.unsqueeze(-1)
    key = torch.arange(kv_start, kv_start + keys, device=q_positions.device)
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


def _keys(
    x: Tensor,
    scale: Tensor | None,
    kv_lens: Tensor | None,
    page_table: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """K or V as [R, Hkv, L, D] in `dtype`, with zeros where `kv_lens` says that no key is."""
    rows, heads = x.size(0) if page_table is None else page_table.size(0), x.size(1)
    keys = x.size(2) if page_table is None else page_table.size(1) * x.size(2)
    found = torch.zeros(rows, heads, keys, x.size(3), dtype=dtype, device=x.device)
    for r in range(rows):
        for j in range(keys if kv_lens is None else min(keys, int(kv_lens[r]))):
            block, slot = r, j
            if page_table is not None:
                block, slot = int(page_table[r, j // x.size(2)]), j % x.size(2)
            found[r, :, j] = x[block, :, slot].to(dtype)
    return found if scale is None else found * scale.to(dtype)[:, None, None]


def _softmax_times(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax(scores) @ v and logsumexp(scores); (0, -inf) for a row of -inf only."""
    if scores.size(-1) == 0:
        return scores @ v, scores.new_full(scores.shape[:-1], -math.inf)  # a sum of nothing
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(lse.unsqueeze(-1) == -math.inf, 0.0, torch.softmax(scores, -1))
    return weights @ v, lse

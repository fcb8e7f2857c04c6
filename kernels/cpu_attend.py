"""`cascade::attend` in plain functional torch: the CPU's flash kernel, and the formula itself.

Both functions compute the contract of `kernels/ops.py`, its extended forms by way of
`kernels/dense.py`. They are run eagerly and also traced on
fake tensors and inlined into compiled graphs, so they only ask what is provable about a size
(`known`) and never branch on data.

Shapes: q [N, Hq, M, Dk], k [R, Hkv, L, Dk], v [R, Hkv, L, Dv]; N = R * T for T branches, and
Hq = Hkv * G. The query rows of one K/V row are those of its T branches, G heads and M queries:
packed as [R, Hkv, T*G*M, D], K and V are read once for all of them, as Hydragen does with a shared
prefix (arXiv 2402.05099, section 3.2).
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torch_cascade.kernels.dense import dense
from torch_cascade.kernels.known import known

Size = int | torch.SymInt


class _Sizes(NamedTuple):
    """N = R * T, Hq = Hkv * G; the sizes that group query rows by the K/V row they read."""

    n: Size
    r: Size
    t: Size
    hq: Size
    hkv: Size
    g: Size
    m: Size

    @classmethod
    def of(cls, q: Tensor, k: Tensor, branches: Size) -> _Sizes:
        return cls(
            n=q.size(0),
            r=k.size(0),
            t=branches,
            hq=q.size(1),
            hkv=k.size(1),
            g=q.size(1) // k.size(1),
            m=q.size(2),
        )


def attend_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    branches: Size = 1,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    kv_start: Size = 0,
    window: Size | None = None,
    softcap: float | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`cascade::attend` through the CPU's flash attention kernel, where that can compute it.

    K and V are neither copied nor expanded, except for the options that `dense` resolves, and that
    bfloat16 and float16 are first converted to float32: the kernel rounds its output to the input
    dtype, and a partial output must not be rounded before the merge.

    Args: see `torch_cascade.kernels.ops.attend`.

    Returns:
        o [N, Hq, M, Dv] and lse [N, Hq, M], contiguous, in the accumulation dtype.
    """
    k, v, mask = dense(
        q,
        k,
        v,
        mask,
        branches=branches,
        q_positions=q_positions,
        kv_start=kv_start,
        kv_lens=kv_lens,
        page_table=page_table,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
    )
    if not _flash_computes(q, k, v, softcap):
        return attend_math(
            q,
            k,
            v,
            mask,
            branches=branches,
            scale=scale,
            q_positions=q_positions,
            kv_start=kv_start,
            window=window,
            softcap=softcap,
        )
    acc = _accumulation_dtype(q)
    sizes = _Sizes.of(q, k, branches)
    bias = _bias(mask, q_positions, kv_start, window, k, acc)
    single = known(sizes.t == 1)
    q = _to(q, acc)
    rows = _dense_last(q) if single else _pack(q, sizes)
    row_bias = bias if bias is None or single else _packed_bias(bias, sizes)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, _to(k, acc), _to(v, acc), attn_mask=row_bias, scale=scale
    )
    if single:
        o, lse = _contiguous(o), _contiguous(lse)
    else:
        o, lse = _unpack(o, sizes), _unpack(lse, sizes)
    if bias is not None:  # the kernel reports lse = 0 for a row that sees no key
        lse = lse.masked_fill(_highest(bias) == -math.inf, -math.inf)
    return o, lse


def attend_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    branches: Size = 1,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    kv_start: Size = 0,
    window: Size | None = None,
    softcap: float | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`cascade::attend` as two matrix products around a softmax: every case, on every device.

    K and V are not expanded. Where R and Hkv are both above 1 and their strides do not merge into
    one batch dim (keys stored as [R, L, Hkv, Dk]), the matrix product copies them.

    Args: see `torch_cascade.kernels.ops.attend`.

    Returns:
        o [N, Hq, M, Dv] and lse [N, Hq, M], contiguous, in the accumulation dtype.
    """
    k, v, mask = dense(
        q,
        k,
        v,
        mask,
        branches=branches,
        q_positions=q_positions,
        kv_start=kv_start,
        kv_lens=kv_lens,
        page_table=page_table,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
    )
    acc = _accumulation_dtype(q)
    sizes = _Sizes.of(q, k, branches)
    if known(k.size(2) == 0):
        return _no_keys(q, v, acc)
    if scale is None:
        scale = 1.0 / torch.sym_sqrt(q.size(3))
    scores = _product(_pack(_to(q, acc) * scale, sizes), _to(k, acc).transpose(-1, -2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    bias = _bias(mask, q_positions, kv_start, window, k, acc)
    if bias is not None:
        scores = _add_bias(scores, bias, sizes)
    top = _row_max(scores, k.size(2))
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    o = _product(weights, _to(v, acc)) / total.masked_fill(total == 0, 1.0)
    lse = (torch.log(total) + top).squeeze(-1)
    return _unpack(o, sizes), _unpack(lse, sizes)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[R, H, n, m] times [R, H, m, p]; the `matmul` of torch 2.11 specialises symbolic sizes."""
    rows, heads, n, p = a.size(0), a.size(1), a.size(2), b.size(3)
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(rows, heads, n, p)


def _flash_computes(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> bool:
    """Whether the flash kernel is known to compute this attention.

    It divides by zero where there is no query or no key (the process dies), takes one head size,
    and reads K and V as if their last stride were 1.
    """
    return (
        softcap is None
        and known(q.size(2) >= 1)
        and known(k.size(2) >= 1)
        and known(k.size(3) == v.size(3))
        and known(k.stride(3) == 1)
        and known(v.stride(3) == 1)
    )


def _highest(bias: Tensor) -> Tensor:
    """The largest value of each row.

    Not `amax`: Inductor would vectorise that together with whatever computes the mask, and does not
    compile some of it (2.13: a padded bool mask read at an index). It calls `topk` as it is.
    """
    return torch.topk(bias, 1)[0].squeeze(-1)


def _accumulation_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`. A `Tensor.to` that changes nothing still leaves an assertion in the trace."""
    return x if x.dtype == dtype else x.to(dtype)


def _no_keys(q: Tensor, v: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """The partial of an empty key set: the identity of the merge."""
    rows = (q.size(0), q.size(1), q.size(2))
    o = q.new_zeros((*rows, v.size(3)), dtype=acc)
    return o, q.new_full(rows, -math.inf, dtype=acc)


def _contiguous(x: Tensor) -> Tensor:
    """A contiguous copy. `Tensor.contiguous` would ask about symbolic strides, and may alias."""
    return x.clone(memory_format=torch.contiguous_format)


def _dense_last(x: Tensor) -> Tensor:
    """`x` with a last stride of 1, which the flash kernel takes for granted."""
    return x if known(x.stride(-1) == 1) else _contiguous(x)


def _pack(x: Tensor, s: _Sizes) -> Tensor:
    """[N, Hq, M, D] -> [R, Hkv, T*G*M, D]; a copy of x."""
    grouped = x.view(s.r, s.t, s.hkv, s.g, s.m, x.size(3)).permute(0, 2, 1, 3, 4, 5)
    return _contiguous(grouped).view(s.r, s.hkv, s.t * s.g * s.m, x.size(3))


def _unpack(x: Tensor, s: _Sizes) -> Tensor:
    """[R, Hkv, T*G*M, ...] -> [N, Hq, M, ...], contiguous; a copy of x."""
    rest = x.shape[3:]
    grouped = x.view(s.r, s.hkv, s.t, s.g, s.m, *rest).transpose(1, 2)
    return _contiguous(grouped).view(s.n, s.hq, s.m, *rest)


def _bias(
    mask: Tensor | None,
    q_positions: Tensor | None,
    kv_start: Size,
    window: Size | None,
    k: Tensor,
    acc: torch.dtype,
) -> Tensor | None:
    """The one additive mask of all visibility rules, [1|N, 1|Hq, 1|M, 1|L]; None without any."""
    visible = _visible(q_positions, kv_start, window, k)
    if mask is not None and mask.dim() < 4:
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    if mask is not None and mask.dtype == torch.bool:
        visible = mask if visible is None else mask & visible
        mask = None
    if visible is None:
        return None if mask is None else _to(mask, acc)
    bias = k.new_zeros((), dtype=acc) if mask is None else _to(mask, acc)
    return torch.where(visible, bias, -math.inf)


def _visible(
    q_positions: Tensor | None, kv_start: Size, window: Size | None, k: Tensor
) -> Tensor | None:
    """Which keys the positions let a query see: bool [1|N, 1, 1|M, L]."""
    if q_positions is None:
        return None
    lead = (1,) * (2 - q_positions.dim())
    rows, queries = lead + tuple(q_positions.shape)
    position = q_positions.view(rows, 1, queries, 1)
    key = torch.arange(k.size(2), device=k.device).add(cast("int", kv_start))
    visible = torch.le(key, position)
    if window is None:
        return visible
    return visible & (key > position - cast("int", window))


def _grouped_bias(bias: Tensor, s: _Sizes) -> Tensor:
    """[1|N, 1|Hq, 1|M, 1|L] -> [1|R, 1|Hkv, 1|T, 1|G, 1|M, 1|L], a view."""
    rows = (1, 1) if known(bias.size(0) == 1) else (s.r, s.t)
    heads = (1, 1) if known(bias.size(1) == 1) else (s.hkv, s.g)
    return bias.view(*rows, *heads, *bias.shape[2:]).transpose(1, 2)


def _packed_bias(bias: Tensor, s: _Sizes) -> Tensor:
    """The bias of packed rows, [1|R, 1|Hkv, 1|T*G*M, 1|L]; at most the rows are expanded."""
    grouped = _grouped_bias(bias, s)
    r, hkv, t, g, m, keys = grouped.shape
    if all(known(size == 1) for size in (t, g, m)):
        return grouped.reshape(r, hkv, 1, keys)
    expanded = grouped.expand(r, hkv, s.t, s.g, s.m, keys)
    return _contiguous(expanded).view(r, hkv, s.t * s.g * s.m, keys)


def _add_bias(scores: Tensor, bias: Tensor, s: _Sizes) -> Tensor:
    """[R, Hkv, T*G*M, L] scores plus the bias, which is broadcast and not expanded."""
    keys = scores.size(3)
    grouped = scores.view(s.r, s.hkv, s.t, s.g, s.m, keys) + _grouped_bias(bias, s)
    return grouped.view(s.r, s.hkv, s.t * s.g * s.m, keys)


def _row_max(scores: Tensor, keys: Size) -> Tensor:
    """Largest score of each row, [..., 1]; -inf for a row of no keys, which `amax` refuses."""
    if not known(keys >= 1):
        column = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        scores = torch.cat([scores, column], -1)
    return scores.amax(-1, keepdim=True)

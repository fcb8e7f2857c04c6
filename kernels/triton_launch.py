"""`cascade::attend` and `merge(attend, ...)` on a GPU: buffers, arguments and grids of the kernels.

Every two segments are one launch that writes partial results, and one launch merges them. The code
runs eagerly and is traced on fake tensors, where sizes may be symbolic: it asks only what is
provable about them, and takes launch configurations from their hints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from torch_cascade.kernels.cpu_attend import known
from torch_cascade.kernels.launch_config import (
    DeviceLimits,
    LaunchConfig,
    SlotConfig,
    SlotShape,
    Widths,
    attend_config,
    invariant_config,
    merge_config,
    padded,
)
from torch_cascade.kernels.triton_attend import attend_parts
from torch_cascade.kernels.triton_merge import merge_parts

Size = int | torch.SymInt

_MASK_KINDS = {torch.bool: 1}  # others are added
# What a size without a hint (data-dependent) is taken for in choosing a configuration.
_UNKNOWN_SIZE = 1024


class KeyPart(NamedTuple):
    """One key segment of `attend_merge`; the fields are the arguments of `cascade::attend`."""

    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    branches: Size = 1
    q_positions: Tensor | None = None
    kv_start: Size = 0
    window: Size | None = None
    kv_lens: Tensor | None = None
    page_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def kv_len(self) -> Size:
        """Number of keys of a KV row."""
        if self.page_table is None:
            return self.k.size(2)
        return self.page_table.size(1) * self.k.size(2)

    @property
    def kv_rows(self) -> Size:
        """Number of KV rows."""
        return self.k.size(0) if self.page_table is None else self.page_table.size(0)


def attend_triton(
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
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """`cascade::attend` on a GPU.

    Args: see `torch_cascade.kernels.ops.attend`; float64 is not computed here.
        batch_invariant: see `attend_merge`.

    Returns:
        o [N, Hq, M, Dv] and lse [N, Hq, M], float32, contiguous.
    """
    part = KeyPart(
        k, v, mask, branches, q_positions, kv_start, window, kv_lens, page_table, k_scale, v_scale
    )
    return attend_merge(
        q,
        [part],
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        batch_invariant=batch_invariant,
    )


def attend_merge(
    q: Tensor,
    parts: Sequence[KeyPart],
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_order: Sequence[int] = (0, 1, 2, 3),
    batch_invariant: bool = False,
    configs: Sequence[LaunchConfig] | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge([attend(q, part) for part in parts], sinks)`, in two launches for up to two parts.

    Args:
        q: queries [N, Hq, M, Dk]; float32, bfloat16 or float16.
        parts: the key segments, one or more; disjoint.
        sinks: broadcastable to [N, Hq, M]: see `torch_cascade.kernels.ops.merge`.
        scale: see `torch_cascade.kernels.ops.attend`, as all options; for all parts.
        softcap: likewise.
        alibi_slopes: likewise.
        out_dtype: dtype of o; None for float32.
        out_order: dims of o from the largest stride to the smallest; the last is 3.
        batch_invariant: the result of a query row is the same bits whatever other rows the call
            has: tiles and splits then depend on the lengths of the segments only.
        configs: a configuration for every launch, instead of the chosen ones (for tuning).

    Returns:
        o [N, Hq, M, Dv] in `out_dtype`, dense in `out_order`, and lse [N, Hq, M], float32,
        contiguous.

    Raises:
        TypeError: q is float64.
        ValueError: no parts.
    """
    if q.dtype == torch.float64:
        raise TypeError("attend_merge: q: expected float32, bfloat16 or float16, got torch.float64")
    if not parts:
        raise ValueError("attend_merge: parts: expected one or more, got 0")
    call = _Call.of(q, parts, sinks, scale, softcap, alibi_slopes)
    pairs = _pairs(call)
    if configs is None:
        configs = [_config(call, pair, len(pairs), batch_invariant) for pair in pairs]
    splits = sum(config.splits for config in configs)
    buffers = _buffers(call, configs, splits, out_dtype or torch.float32, out_order)
    base = 0
    for pair, config in zip(pairs, configs, strict=True):
        _launch_attend(call, pair, config, buffers, base)
        base += config.splits
    if not configs[0].direct:
        _launch_merge(call, buffers, splits)
    return buffers.out.permute([list(out_order).index(dim) for dim in range(4)]), buffers.lse


def _pairs(call: _Call) -> list[list[KeyPart]]:
    """The parts by two, from the last on; the one that more rows share comes first in a pair."""
    parts = call.parts
    odd = len(parts) % 2
    pairs = [parts[:1]] if odd else []
    pairs += [parts[i : i + 2] for i in range(odd, len(parts), 2)]
    return [
        pair[::-1] if len(pair) == 2 and known(pair[0].branches < pair[1].branches) else pair
        for pair in pairs
    ]


def _config(
    call: _Call, pair: Sequence[KeyPart], launches: int, batch_invariant: bool
) -> LaunchConfig:
    part = call.parts[0]
    widths = Widths(call.d_k, call.d_v, call.q.element_size(), part.k.element_size())
    shapes = [_slot_shape(call, part) for part in pair]
    limits = device_limits(call.q.device)
    if batch_invariant:
        return invariant_config(shapes, widths, limits)
    rows: list[Any] = [part.kv_rows for part in pair]
    nested = len(pair) == 2 and not known(rows[0] == 0) and known(rows[1] % rows[0] == 0)
    return attend_config(shapes, widths, limits, alone=launches == 1, nested=nested)


class _Call(NamedTuple):
    """What all launches of one call share."""

    q: Tensor
    parts: list[KeyPart]
    n: Size
    heads: Size
    kv_heads: Size
    m: Size
    d_k: int
    d_v: int
    scale: float
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        parts: Sequence[KeyPart],
        sinks: Tensor | None,
        scale: float | None,
        softcap: float | None,
        alibi_slopes: Tensor | None,
    ) -> _Call:
        d_k = int(q.size(3))
        dense = [p._replace(k=_dense_last(p.k), v=_dense_last(p.v)) for p in parts]
        return cls(
            q=_dense_last(q),
            parts=dense,
            n=q.size(0),
            heads=q.size(1),
            kv_heads=parts[0].k.size(1),
            m=q.size(2),
            d_k=d_k,
            d_v=int(parts[0].v.size(3)),
            scale=1.0 / math.sqrt(d_k) if scale is None else scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        )

    @property
    def group(self) -> Size:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


class _Buffers(NamedTuple):
    """What the kernels of one call write.

    `out` is dense in the order of its dims in memory; `out_strides` are those of n, h and m.
    """

    o_part: Tensor
    lse_part: Tensor
    out: Tensor
    out_strides: tuple[Size, ...]
    lse: Tensor


def _buffers(
    call: _Call,
    configs: Sequence[LaunchConfig],
    splits: int,
    dtype: torch.dtype,
    order: Sequence[int],
) -> _Buffers:
    q = call.q
    sizes = (call.n, call.heads, call.m, call.d_v)
    out = q.new_empty([sizes[dim] for dim in order], dtype=dtype)
    lse = q.new_empty(sizes[:3], dtype=torch.float32)
    strides = tuple(
        math.prod(sizes[d] for d in order[list(order).index(a) + 1 :]) for a in range(3)
    )
    if configs[0].direct:
        o_part, lse_part = out, lse  # never written
    else:
        o_part = q.new_empty((splits, *sizes), dtype=torch.float32)
        lse_part = q.new_empty((splits, *sizes[:3]), dtype=torch.float32)
    return _Buffers(o_part, lse_part, out, strides, lse)


def _inside(order: Sequence[int], axis: int) -> list[int]:
    """The dims that are dense within one step along `axis`."""
    return list(order)[list(order).index(axis) + 1 :]


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA device; those of an H200 for any other (the interpreter)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return DeviceLimits(processors=132, shared_memory=232448)
    properties: Any = torch.cuda.get_device_properties(device)
    return DeviceLimits(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def _hint(size: Size) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return _UNKNOWN_SIZE if hint is None else int(hint)


def _rows(call: _Call, part: KeyPart) -> Size:
    return part.branches * call.m * call.group


def _slot_shape(call: _Call, part: KeyPart) -> SlotShape:
    return SlotShape(
        tiles_of=_hint(part.kv_rows) * _hint(call.kv_heads),
        rows=_hint(_rows(call, part)),
        kv_len=_hint(part.kv_len),
        paged=part.page_table is not None,
    )


def _dense_last(x: Tensor) -> Tensor:
    """`x` with a last stride of 1, which the kernels take for granted."""
    return x if known(x.stride(-1) == 1) else x.clone(memory_format=torch.contiguous_format)


def _strides(x: Tensor | None, rank: int) -> list[Size]:
    """Strides of a tensor that broadcasts to `rank` dims: 0 where it does; all 0 for None."""
    if x is None:
        return [0] * rank
    own: list[Size] = [0 if known(s == 1) else x.stride(d) for d, s in enumerate(x.shape)]
    return [0] * (rank - x.dim()) + own


def _launchable(kernel: Any) -> Any:
    """A Triton kernel that a trace can record; interpreted kernels are called as they are."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def _launch_attend(
    call: _Call,
    pair: Sequence[KeyPart],
    config: LaunchConfig,
    buffers: _Buffers,
    base: int,
) -> None:
    slots = [*zip(pair, config.slots, strict=True)]
    items = [_items(call, part, slot) for part, slot in slots]
    grid = (items[0] if config.tail else sum(items),)
    if known(grid[0] == 0):
        return
    a, b = slots[0], slots[-1]
    arguments = _shared_arguments(call, config, buffers)
    arguments |= {f"{key}_a": value for key, value in _slot_arguments(call, *a, base).items()}
    base += a[1].splits
    arguments |= {f"{key}_b": value for key, value in _slot_arguments(call, *b, base).items()}
    two = len(slots) == 2
    arguments |= {
        "items_a": items[0],
        "ratio": b[0].kv_rows // a[0].kv_rows if two else 1,
        "DIRECT": config.direct,
        "SLOTS": 2 if two and not config.tail else 1,
        "TAIL": config.tail,
    }
    _launchable(attend_parts)[grid](
        **arguments, num_warps=config.warps, num_stages=config.slots[0].stages
    )


def _items(call: _Call, part: KeyPart, slot: SlotConfig) -> Size:
    row_blocks = (_rows(call, part) + slot.block_m - 1) // slot.block_m
    return part.kv_rows * call.kv_heads * row_blocks * slot.splits


def _shared_arguments(call: _Call, config: LaunchConfig, buffers: _Buffers) -> dict[str, Any]:
    q, slopes, sinks = call.q, call.alibi_slopes, call.sinks
    sink_strides = _strides(sinks, 3)
    return {
        "q": q,
        "o_part": buffers.o_part,
        "lse_part": buffers.lse_part,
        "out": buffers.out,
        "lse_out": buffers.lse,
        "sinks": q if sinks is None else sinks,
        "heads": call.heads,
        "kv_heads": call.kv_heads,
        "q_len": call.m,
        "group": call.group,
        "part_rows": call.n * call.heads * call.m,
        "q_stride_n": q.stride(0),
        "q_stride_h": q.stride(1),
        "q_stride_m": q.stride(2),
        "out_stride_n": buffers.out_strides[0],
        "out_stride_h": buffers.out_strides[1],
        "out_stride_m": buffers.out_strides[2],
        "sinks_stride_n": sink_strides[0],
        "sinks_stride_h": sink_strides[1],
        "sinks_stride_m": sink_strides[2],
        "scale": call.scale,
        "softcap": call.softcap or 1.0,
        "slopes": q if slopes is None else slopes.float().contiguous(),
        "D_K": call.d_k,
        "D_V": call.d_v,
        "PAD_K": padded(call.d_k),
        "PAD_V": padded(call.d_v),
        "SOFTCAP": call.softcap is not None,
        "ALIBI": slopes is not None,
        "FOLD": call.scale > 0 and call.softcap is None and slopes is None,
        "SINKS": sinks is not None,
        "PRECISION": _precision(q.dtype),
    }


def _precision(dtype: torch.dtype) -> str:
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def _slot_arguments(call: _Call, part: KeyPart, slot: SlotConfig, base: int) -> dict[str, Any]:
    mask, positions, table = part.mask, part.q_positions, part.page_table
    spare = call.q  # stands for a pointer that is never read
    mask_strides = _strides(mask, 4)
    position_strides = _strides(positions, 2)
    scaled = part.k_scale is not None or part.v_scale is not None
    one = call.q.new_ones((call.kv_heads,), dtype=torch.float32) if scaled else spare
    return {
        "k": part.k,
        "v": part.v,
        "k_stride_r": part.k.stride(0),
        "k_stride_h": part.k.stride(1),
        "k_stride_k": part.k.stride(2),
        "v_stride_r": part.v.stride(0),
        "v_stride_h": part.v.stride(1),
        "v_stride_k": part.v.stride(2),
        "table": spare if table is None else _dense_last(table),
        "table_stride": 0 if table is None else _dense_last(table).stride(0),
        "page_size": 1 if table is None else part.k.size(2),
        "mask": spare if mask is None else mask,
        "mask_stride_n": mask_strides[0],
        "mask_stride_h": mask_strides[1],
        "mask_stride_m": mask_strides[2],
        "mask_stride_k": mask_strides[3],
        "positions": spare if positions is None else positions,
        "positions_stride_n": position_strides[0],
        "positions_stride_m": position_strides[1],
        "kv_start": part.kv_start,
        "window": 0 if part.window is None else part.window,
        "kv_lens": spare if part.kv_lens is None else part.kv_lens.contiguous(),
        "k_scale": one if part.k_scale is None else part.k_scale.contiguous(),
        "v_scale": one if part.v_scale is None else part.v_scale.contiguous(),
        "kv_len": part.kv_len,
        "branches": part.branches,
        "splits": slot.splits,
        "split_len": _split_len(part.kv_len, slot),
        "split_base": base,
        "rows": _rows(call, part),
        "BLOCK_M": slot.block_m,
        "BLOCK_N": slot.block_n,
        "STAGES": slot.stages,
        "MASK": 0 if mask is None else _MASK_KINDS.get(mask.dtype, 2),
        "POSITIONS": positions is not None,
        "WINDOW": part.window is not None,
        "LENS": part.kv_lens is not None,
        "PAGED": table is not None,
        "SCALED": scaled,
        "K_STEP": _step(part.k),
        "V_STEP": _step(part.v),
    }


def _split_len(kv_len: Size, slot: SlotConfig) -> Size:
    """Keys of one split, a multiple of the tile; the last split may have fewer."""
    per_split = (kv_len + slot.splits - 1) // slot.splits
    return (per_split + slot.block_n - 1) // slot.block_n * slot.block_n


def _step(x: Tensor) -> int:
    """The stride of keys if it is a small number, 0 if it is not known to be one."""
    stride = x.stride(2)
    return stride if isinstance(stride, int) and 0 < stride < 2**20 else 0


def _launch_merge(call: _Call, buffers: _Buffers, parts: int) -> None:
    rows = call.n * call.heads * call.m
    if known(rows == 0):
        return
    config = merge_config(parts, _hint(rows))
    grid = ((rows + config.rows - 1) // config.rows,)
    _launchable(merge_parts)[grid](
        buffers.o_part,
        buffers.lse_part,
        call.q if call.sinks is None else call.sinks,
        buffers.out,
        buffers.lse,
        parts,
        rows,
        call.heads,
        call.m,
        *_strides(call.sinks, 3),
        *buffers.out_strides,
        D=call.d_v,
        PAD_D=padded(call.d_v),
        UNROLL=config.unroll,
        ROWS=config.rows,
        SINKS=call.sinks is not None,
        num_warps=config.warps,
    )

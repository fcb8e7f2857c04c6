"""`cascade::attend` and `merge(attend, ...)` on a GPU: buffers, arguments and grids of the kernels.

Every two segments are one launch that writes partial results, and one launch merges them; where
there is one partial result a row it is the result, and nothing is merged. The code runs eagerly and
is traced on fake tensors, where sizes may be symbolic: it asks only what is provable about them,
and takes launch configurations from their hints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cascade.kernels import launchable
from torch_cascade.kernels.known import known
from torch_cascade.kernels.launch_config import (
    DeviceLimits,
    LaunchConfig,
    SlotShape,
    Widths,
    attend_config,
    invariant_config,
    merge_config,
    padded,
)
from torch_cascade.kernels.triton_attend import attend_parts
from torch_cascade.kernels.triton_call import (
    Buffers,
    Call,
    KeyPart,
    Size,
    items_of,
    no_slot,
    packed_rows,
    shared_arguments,
    slot_arguments,
    strides_of,
)
from torch_cascade.kernels.triton_merge import merge_parts

# What a size without a hint (data-dependent) is taken for in choosing a configuration.
_UNKNOWN_SIZE = 1024


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
    """`merge([attend(q, part) for part in parts], sinks)`: one or two launches for up to two parts.

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
    call = Call.of(q, parts, sinks, scale, softcap, alibi_slopes)
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


def _pairs(call: Call) -> list[list[KeyPart]]:
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
    call: Call, pair: Sequence[KeyPart], launches: int, batch_invariant: bool
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


def _buffers(
    call: Call,
    configs: Sequence[LaunchConfig],
    splits: int,
    dtype: torch.dtype,
    order: Sequence[int],
) -> Buffers:
    q = call.q
    sizes = (call.n, call.heads, call.m, call.d_v)
    out = q.new_empty([sizes[dim] for dim in order], dtype=dtype)
    lse = q.new_empty(sizes[:3], dtype=torch.float32)
    # Not `out.stride()`: strides of symbolic sizes are to be said by the sizes themselves.
    strides = tuple(math.prod(sizes[d] for d in _inside(order, axis)) for axis in range(3))
    if configs[0].direct:
        return Buffers(None, None, out, strides, lse)
    o_part = q.new_empty((splits, *sizes), dtype=torch.float32)
    lse_part = q.new_empty((splits, *sizes[:3]), dtype=torch.float32)
    return Buffers(o_part, lse_part, out, strides, lse)


def _inside(order: Sequence[int], axis: int) -> list[int]:
    """The dims that are dense within one step along `axis`."""
    return list(order)[list(order).index(axis) + 1 :]


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA device; those of an H200 for any other (the interpreter)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return DeviceLimits(processors=132, shared_memory=232448)
    its: Any = torch.cuda.get_device_properties(device)
    return DeviceLimits(its.multi_processor_count, its.shared_memory_per_block_optin, its.major)


def _hint(size: Size) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return _UNKNOWN_SIZE if hint is None else int(hint)


def _slot_shape(call: Call, part: KeyPart) -> SlotShape:
    return SlotShape(
        tiles_of=_hint(part.kv_rows) * _hint(call.kv_heads),
        rows=_hint(packed_rows(call, part)),
        kv_len=_hint(part.kv_len),
    )


def _launch_attend(
    call: Call,
    pair: Sequence[KeyPart],
    config: LaunchConfig,
    buffers: Buffers,
    base: int,
) -> None:
    slots = [*zip(pair, config.slots, strict=True)]
    items = [items_of(call, part, slot) for part, slot in slots]
    grid = (items[0] if config.tail else sum(items),)
    if known(grid[0] == 0):
        return
    a, b = slots[0], slots[-1]
    two = len(slots) == 2
    first = slot_arguments(call, *a, base)
    second = slot_arguments(call, *b, base + a[1].splits) if two else no_slot(first)
    arguments = shared_arguments(call, buffers)
    arguments |= {f"{key}_a": value for key, value in first.items()}
    arguments |= {f"{key}_b": value for key, value in second.items()}
    arguments |= {
        "items_a": items[0],
        "ratio": b[0].kv_rows // a[0].kv_rows if two else 1,
        "DIRECT": config.direct,
        "SLOTS": 2 if two and not config.tail else 1,
        "TAIL": config.tail,
        "QUICK": config.quick,
    }
    launchable.called(attend_parts)[grid](
        **arguments, num_warps=config.warps, num_stages=config.slots[0].stages
    )


def _launch_merge(call: Call, buffers: Buffers, parts: int) -> None:
    rows = call.n * call.heads * call.m
    if known(rows == 0):
        return
    config = merge_config(parts, _hint(rows))
    grid = ((rows + config.rows - 1) // config.rows,)
    launchable.called(merge_parts)[grid](
        buffers.o_part,
        buffers.lse_part,
        call.sinks,
        buffers.out,
        buffers.lse,
        parts,
        rows,
        call.heads,
        call.m,
        *strides_of(call.sinks, 3),
        *buffers.out_strides,
        D=call.d_v,
        PAD_D=padded(call.d_v),
        UNROLL=config.unroll,
        ROWS=config.rows,
        SINKS=call.sinks is not None,
        num_warps=config.warps,
    )

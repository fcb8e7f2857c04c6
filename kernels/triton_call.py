"""One call of the Triton kernels: its tensors, and the arguments that the kernels take.

Everything here is traced on fake tensors as well, where sizes may be symbolic: only what is
provable about them is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cascade.kernels.known import known
from torch_cascade.kernels.launch_config import SlotConfig, padded

Size = int | torch.SymInt

_MASK_KINDS = {torch.bool: 1}  # others are added


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


class Call(NamedTuple):
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
    ) -> Call:
        """A call with everything the kernels take for granted settled."""
        d_k = int(q.size(3))
        dense = [p._replace(k=dense_last(p.k), v=dense_last(p.v)) for p in parts]
        return cls(
            q=dense_last(q),
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


class Buffers(NamedTuple):
    """What the kernels of one call write.

    `out` is dense in the order of its dims in memory; `out_strides` are those of n, h and m. There
    are no partial results where the only one of a row is the result.
    """

    o_part: Tensor | None
    lse_part: Tensor | None
    out: Tensor
    out_strides: tuple[Size, ...]
    lse: Tensor


def dense_last(x: Tensor) -> Tensor:
    """`x` with a last stride of 1, which the kernels take for granted."""
    return x if known(x.stride(-1) == 1) else x.clone(memory_format=torch.contiguous_format)


def strides_of(x: Tensor | None, rank: int) -> list[Size]:
    """Strides of a tensor that broadcasts to `rank` dims: 0 where it does; all 0 for None."""
    if x is None:
        return [0] * rank
    own: list[Size] = [0 if known(s == 1) else x.stride(d) for d, s in enumerate(x.shape)]
    return [0] * (rank - x.dim()) + own


def packed_rows(call: Call, part: KeyPart) -> Size:
    """Query rows that read one KV row and KV head: T * M * G."""
    return part.branches * call.m * call.group


def items_of(call: Call, part: KeyPart, slot: SlotConfig) -> Size:
    """Programs of a slot: a tile of rows and a split each."""
    row_blocks = (packed_rows(call, part) + slot.block_m - 1) // slot.block_m
    return part.kv_rows * call.kv_heads * row_blocks * slot.splits


def shared_arguments(call: Call, buffers: Buffers) -> dict[str, Any]:
    """The arguments of `attend_parts` that both slots share, by name.

    Here and in those of a slot, a pointer that is not read is None: Inductor would write a tensor
    that a kernel takes several times as many times, where it is a view of what it computes.
    """
    q, slopes, sinks = call.q, call.alibi_slopes, call.sinks
    sink_strides = strides_of(sinks, 3)
    return {
        "q": q,
        "o_part": buffers.o_part,
        "lse_part": buffers.lse_part,
        "out": buffers.out,
        "lse_out": buffers.lse,
        "sinks": sinks,
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
        "slopes": None if slopes is None else slopes.float().contiguous(),
        "D_K": call.d_k,
        "D_V": call.d_v,
        "PAD_K": padded(call.d_k),
        "PAD_V": padded(call.d_v),
        "SOFTCAP": call.softcap is not None,
        "ALIBI": slopes is not None,
        "POSITIVE": call.scale >= torch.finfo(torch.float32).tiny,  # less may be 0 in the kernel
        "SINKS": sinks is not None,
        "PRECISION": _precision(q.dtype),
    }


def _precision(dtype: torch.dtype) -> str:
    # Not `allow_tf32`: reading it raises where the user has set the precision by its new name.
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed and dtype == torch.float32 else "ieee"


def slot_arguments(call: Call, part: KeyPart, slot: SlotConfig, base: int) -> dict[str, Any]:
    """The arguments of one slot, by name without its suffix; its partials start at `base`."""
    mask, positions, table = part.mask, part.q_positions, part.page_table
    mask_strides = strides_of(mask, 4)
    position_strides = strides_of(positions, 2)
    scaled = part.k_scale is not None or part.v_scale is not None
    one = call.q.new_ones((call.kv_heads,), dtype=torch.float32) if scaled else None
    return {
        "k": part.k,
        "v": part.v,
        "k_stride_r": part.k.stride(0),
        "k_stride_h": part.k.stride(1),
        "k_stride_k": part.k.stride(2),
        "v_stride_r": part.v.stride(0),
        "v_stride_h": part.v.stride(1),
        "v_stride_k": part.v.stride(2),
        "table": None if table is None else dense_last(table),
        "table_stride": 0 if table is None else dense_last(table).stride(0),
        "page_size": 1 if table is None else part.k.size(2),
        "mask": mask,
        "mask_stride_n": mask_strides[0],
        "mask_stride_h": mask_strides[1],
        "mask_stride_m": mask_strides[2],
        "mask_stride_k": mask_strides[3],
        "positions": positions,
        "positions_stride_n": position_strides[0],
        "positions_stride_m": position_strides[1],
        "kv_start": part.kv_start,
        "window": 0 if part.window is None else part.window,
        "kv_lens": None if part.kv_lens is None else part.kv_lens.contiguous(),
        "k_scale": one if part.k_scale is None else part.k_scale.contiguous(),
        "v_scale": one if part.v_scale is None else part.v_scale.contiguous(),
        "kv_len": part.kv_len,
        "branches": part.branches,
        "splits": slot.splits,
        "split_len": _split_len(part.kv_len, slot),
        "split_base": base,
        "rows": packed_rows(call, part),
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


def no_slot(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a second slot that is not there: those of the first without tensors."""
    return {name: None if isinstance(given, Tensor) else given for name, given in arguments.items()}


def _split_len(kv_len: Size, slot: SlotConfig) -> Size:
    """Keys of one split, a multiple of the tile; the last split may have fewer."""
    per_split = (kv_len + slot.splits - 1) // slot.splits
    return (per_split + slot.block_n - 1) // slot.block_n * slot.block_n


def _step(x: Tensor) -> int:
    """The stride of keys if it is a small number, 0 if it is not known to be one."""
    stride = x.stride(2)
    return stride if isinstance(stride, int) and 0 < stride < 2**20 else 0

"""`cascade::merge` over the partial results of `triton_attend.py`, in Triton, in one launch.

The partials of all segments and splits are rows of one buffer, so any number of them is merged in a
fixed order: the same partials give the same bits. Attention sinks are counted here, once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_of(lse, top):
    """e^(lse - top); where both are the same infinity 0 (no keys) or 1 (overflow), not NaN."""
    weight = tl.where(lse == top, 1.0, tl.exp(lse - top))
    return tl.where(lse == float("-inf"), 0.0, weight)


@triton.jit
def part_rows_at(first, parts, row, part_rows, row_ok, CHUNK: tl.constexpr):
    """Row numbers [CHUNK, BLOCK_R] in the buffer of partials, and which of them exist."""
    part = first + tl.arange(0, CHUNK)
    at = part.to(tl.int64)[:, None] * part_rows + row[None, :]
    return at, (part < parts)[:, None] & row_ok[None, :]


@triton.jit
def merge_parts(
    o_part,
    lse_part,
    sinks,
    out,
    lse_out,
    parts,
    part_rows,
    heads,
    q_len,
    sinks_stride_n,
    sinks_stride_h,
    sinks_stride_m,
    out_stride_n,
    out_stride_h,
    out_stride_m,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SINKS: tl.constexpr,
):
    """BLOCK_R rows of [N, Hq, M]: o_part [parts, rows, D] -> out, lse_part [parts, rows] -> lse_out.

    Grid: (cdiv(rows, BLOCK_R),). CHUNK partials are read at once.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = row < part_rows
    d = tl.arange(0, PAD_D)
    m = row % q_len
    h = (row // q_len) % heads
    n = (row // (q_len * heads)).to(tl.int64)

    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    if SINKS:
        at_sink = n * sinks_stride_n + h * sinks_stride_h + m * sinks_stride_m
        sink = tl.load(sinks + at_sink, mask=row_ok, other=float("-inf")).to(tl.float32)
        top = sink
    for first in range(0, parts, CHUNK):
        at, present = part_rows_at(first, parts, row, part_rows, row_ok, CHUNK)
        lse = tl.load(lse_part + at, mask=present, other=float("-inf"))
        top = tl.maximum(top, tl.max(lse, 0))

    total = tl.zeros([BLOCK_R], tl.float32)
    if SINKS:
        total += weight_of(sink, top)
    merged = tl.zeros([BLOCK_R, PAD_D], tl.float32)
    for first in range(0, parts, CHUNK):
        at, present = part_rows_at(first, parts, row, part_rows, row_ok, CHUNK)
        lse = tl.load(lse_part + at, mask=present, other=float("-inf"))
        weight = weight_of(lse, top[None, :])
        present_o = present[:, :, None] & (d < D)[None, None, :]
        o = tl.load(o_part + at[:, :, None] * D + d[None, None, :], mask=present_o, other=0.0)
        # A part that saw no key has no share, whatever its output holds.
        merged += tl.sum(tl.where(weight[:, :, None] == 0, 0.0, o * weight[:, :, None]), 0)
        total += tl.sum(weight, 0)
    total = tl.where(total < 1.0, 1.0, total)  # 0 where nothing was seen; NaN stays NaN
    merged = merged / total[:, None]

    at_out = n * out_stride_n + h * out_stride_h + m * out_stride_m
    out_ok = row_ok[:, None] & (d < D)[None, :]
    tl.store(out + at_out[:, None] + d[None, :], merged.to(out.dtype.element_ty), mask=out_ok)
    tl.store(lse_out + row, top + tl.log(total), mask=row_ok)

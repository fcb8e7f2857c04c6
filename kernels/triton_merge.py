"""`cascade::merge` over the partial results of `triton_attend.py`, in Triton, in one launch.

The partials of all segments and splits are rows of one buffer, so any number of them is merged in a
fixed order: the same partials give the same bits. Attention sinks are counted here, once; where
nothing is to be merged, `triton_finish.py` counts them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relative(lse, reference):
    """e^(lse - reference); 1 where both are +inf (an overflow), not NaN."""
    return tl.where(lse == reference, 1.0, tl.exp(lse - reference))


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
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """ROWS rows of [N, Hq, M]: o_part [parts, rows, D] -> out, lse_part [parts, rows] -> lse_out.

    Grid: (cdiv(rows, ROWS),). One row at a time, so that its log-sum-exps are scalars: nothing is
    exchanged between threads, and the loads of UNROLL partials are in flight at once.
    """
    part_rows = tl.cast(part_rows, tl.int64)
    d = tl.arange(0, PAD_D)
    d_ok = d < D
    for i in tl.static_range(ROWS):
        row = tl.program_id(0) * ROWS + i
        row_ok = row < part_rows
        # int64: any stride may be huge
        m = (row % q_len).to(tl.int64)
        h = ((row // q_len) % heads).to(tl.int64)
        n = (row // (q_len * heads)).to(tl.int64)

        top = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        if SINKS:
            at_sink = n * sinks_stride_n + h * sinks_stride_h + m * sinks_stride_m
            top = tl.load(sinks + at_sink, mask=row_ok, other=float("-inf")).to(tl.float32)
            total = tl.where(top == float("-inf"), 0.0, 1.0)
        merged = tl.zeros([PAD_D], tl.float32)
        o_row = o_part + row.to(tl.int64) * D
        lse_row = lse_part + row
        for _ in tl.range(parts, loop_unroll_factor=UNROLL):
            lse = tl.load(lse_row, mask=row_ok, other=float("-inf"))
            o = tl.load(o_row + d, mask=row_ok & d_ok, other=0.0)
            new_top = tl.maximum(top, lse)
            reference = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = relative(lse, reference)
            shrink = relative(top, reference)
            # A part that saw no key has no share, whatever its output holds.
            merged = merged * shrink + tl.where(weight == 0, 0.0, o * weight)
            total = total * shrink + weight
            top = new_top
            o_row += part_rows * D
            lse_row += part_rows
        total = tl.where(total == 0, 1.0, total)

        at_out = n * out_stride_n + h * out_stride_h + m * out_stride_m + d
        merged = (merged / total).to(out.dtype.element_ty)
        tl.store(out + at_out, merged, mask=row_ok & d_ok)
        tl.store(lse_out + row, top + tl.log(total), mask=row_ok)

"""How the results of `triton_attend.py` are written.

A partial result is (o, lse) of a tile, lse in units of log2. In the buffers of partials row i of
[N, Hq, M] of split s is at o_part[s, i, :] and lse_part[s, i], lse in natural logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_cascade.kernels.triton_step import LN2, LOG2E, place_at, result_of


@triton.jit
def row_numbers(rows, heads, q_len):
    """The row of [N, Hq, M] of each packed row, int64."""
    _row_ok, batch, head, token = rows
    return (batch.to(tl.int64) * heads + head) * q_len + token


@triton.jit
def write_partial(o, lse, part, rows, row, o_part, lse_part, part_rows, D: tl.constexpr):
    """Store a partial result as split `part`."""
    d = tl.arange(0, o.shape[1])
    at = part.to(tl.int64) * part_rows + row
    tl.store(o_part + at[:, None] * D + d[None, :], o, mask=rows[0][:, None] & (d < D)[None, :])
    tl.store(lse_part + at, lse * LN2, mask=rows[0])


@triton.jit
def relative(lse, reference):
    """2^(lse - reference); 1 where both are +inf, not NaN."""
    return tl.where(lse == reference, 1.0, tl.exp2(lse - reference))


@triton.jit
def with_sinks(o, lse, rows, sinks, SINKS: tl.constexpr):
    """A finished result with one more key a row, of value zero and score `sink`."""
    if SINKS:
        row_ok, batch, head, token = rows
        pointer, stride_n, stride_h, stride_m = sinks
        at = place_at(batch, head, token, stride_n, stride_h, stride_m)
        sink = tl.load(pointer + at, mask=row_ok, other=float("-inf")).to(tl.float32) * LOG2E
        top = tl.maximum(lse, sink)
        reference = tl.where(top == float("-inf"), 0.0, top)
        weight = relative(lse, reference)
        total = weight + relative(sink, reference)
        total = tl.where(total == 0, 1.0, total)
        return o * (weight / total)[:, None], top + tl.log2(total)
    else:
        return o, lse


@triton.jit
def write_final(o, lse, rows, row, sinks, out, strides, lse_out, D: tl.constexpr, SINKS):
    """Store a finished result in the dtype and the layout of `out`."""
    o, lse = with_sinks(o, lse, rows, sinks, SINKS)
    row_ok, batch, head, token = rows
    stride_n, stride_h, stride_m = strides
    d = tl.arange(0, o.shape[1])
    at = place_at(batch, head, token, stride_n, stride_h, stride_m)
    ok = row_ok[:, None] & (d < D)[None, :]
    tl.store(out + at[:, None] + d[None, :], o.to(out.dtype.element_ty), mask=ok)
    tl.store(lse_out + row, lse * LN2, mask=row_ok)


@triton.jit
def finish(
    state,
    scale,
    split,
    rows,
    heads,
    q_len,
    sinks,
    partials,
    result,
    D: tl.constexpr,
    RAW: tl.constexpr,
    DIRECT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Store what a program found: the result, or the partial result of a split."""
    o, lse = result_of(state, scale, RAW)
    row = row_numbers(rows, heads, q_len)
    if DIRECT:
        out, strides, lse_out = result
        write_final(o, lse, rows, row, sinks, out, strides, lse_out, D, SINKS)
    else:
        o_part, lse_part, part_rows = partials
        write_partial(o, lse, split, rows, row, o_part, lse_part, part_rows, D)

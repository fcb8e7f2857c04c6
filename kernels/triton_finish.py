"""How the partial results of `triton_attend.py` are written and completed.

A partial result is (o, lse) of a tile, lse in units of log2. In the buffers of partials row i of
[N, Hq, M] of split s is at o_part[s, i, :] and lse_part[s, i], lse in natural logarithms.

Two counters a tile tell other programs how far it is: [0, tiles) splits written, [tiles, 2 tiles)
rows merged. They are zero before a launch, and the launch leaves them zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_cascade.kernels.triton_step import LN2, LOG2E


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
def with_sinks(o, lse, rows, sinks, SINKS: tl.constexpr):
    """A finished result with one more key a row, of value zero and score `sink`."""
    if SINKS:
        row_ok, batch, head, token = rows
        pointer, stride_n, stride_h, stride_m = sinks
        at = batch.to(tl.int64) * stride_n + head * stride_h + token * stride_m
        sink = tl.load(pointer + at, mask=row_ok, other=float("-inf")).to(tl.float32) * LOG2E
        top = tl.maximum(lse, sink)
        reference = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(lse - reference)
        total = weight + tl.exp2(sink - reference)
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
    at = batch.to(tl.int64) * stride_n + head * stride_h + token * stride_m
    ok = row_ok[:, None] & (d < D)[None, :]
    tl.store(out + at[:, None] + d[None, :], o.to(out.dtype.element_ty), mask=ok)
    tl.store(lse_out + row, lse * LN2, mask=row_ok)


@triton.jit
def arrive(counter, amount):
    """Add to a counter after all that this program has stored; returns its value before."""
    tl.debug_barrier()  # the stores of all threads come before the one thread that adds
    return tl.atomic_add(counter, amount, sem="acq_rel", scope="gpu")


@triton.jit
def wait_for(counter, amount):
    """Return when a counter has reached `amount`, with all that was stored before."""
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while seen < amount:
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@triton.jit
def merge_splits(o, lse, first, splits, rows, row, o_part, lse_part, part_rows, D: tl.constexpr):
    """(o, lse) merged with the splits [first, splits) of the same rows, in order."""
    d = tl.arange(0, o.shape[1])
    ok = rows[0][:, None] & (d < D)[None, :]
    total = tl.where(lse == float("-inf"), 0.0, tl.full(lse.shape, 1.0, tl.float32))
    o = o * total[:, None]
    top = lse
    for split in range(first, splits):
        at = tl.full([], split, tl.int64) * part_rows + row
        # Written by other programs of this launch: read past the cache of this multiprocessor.
        part = tl.load(lse_part + at, mask=rows[0], other=float("-inf"), cache_modifier=".cg")
        o_split = tl.load(
            o_part + at[:, None] * D + d[None, :], mask=ok, other=0.0, cache_modifier=".cg"
        )
        part = part * LOG2E
        new_top = tl.maximum(top, part)
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part - reference)
        shrink = tl.exp2(top - reference)
        o = o * shrink[:, None] + tl.where(weight[:, None] == 0, 0.0, o_split * weight[:, None])
        total = total * shrink + weight
        top = new_top
    total = tl.where(total == 0, 1.0, total)
    return o / total[:, None], top + tl.log2(total)

"""`cascade::linears` in Triton: products of the same few rows with several weights, in one launch.

With few rows a product is as fast as its weight is read. One launch for the weights that read the
same rows (queries, keys and values; gate and up) saves launches, and fills the device where one of
the weights is small. A program computes all rows against a tile of columns of one weight, over all
features in order: no partial sums, and the same bits whatever else the launch computes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linears_tile(
    x,
    w_0,
    w_1,
    w_2,
    b_0,
    b_1,
    b_2,
    o_0,
    o_1,
    o_2,
    rows,
    x_stride,
    w_stride_0,
    w_stride_1,
    w_stride_2,
    columns_0,
    columns_1,
    columns_2,
    K: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Products o_i [rows, columns_i] = x [rows, K] @ w_i [columns_i, K]^T + b_i [columns_i].

    Grid: (sum of columns_i / BLOCK_N,). BLOCK_N divides every columns_i, BLOCK_K divides K, and
    BLOCK_M holds all rows. What is of weights that there are not is None.
    """
    tile = tl.program_id(0)
    w, b, o, w_stride, columns = w_0, b_0, o_0, w_stride_0, columns_0
    if WEIGHTS > 1:
        tiles = columns_0 // BLOCK_N
        if tile >= tiles:
            tile -= tiles
            w, o, w_stride, columns = w_1, o_1, w_stride_1, columns_1
            if BIAS:
                b = b_1
            if WEIGHTS > 2:
                tiles = columns_1 // BLOCK_N
                if tile >= tiles:
                    tile -= tiles
                    w, o, w_stride, columns = w_2, o_2, w_stride_2, columns_2
                    if BIAS:
                        b = b_2
    row, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row[:, None] < rows
    # int64: a vocabulary's weight has more than 2^31 elements
    x_at = x + row[:, None].to(tl.int64) * x_stride + k[None, :]
    w_at = w + column[:, None].to(tl.int64) * w_stride + k[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        sums = tl.dot(tl.load(x_at, mask=there, other=0.0), tl.load(w_at).T, sums)
        x_at += BLOCK_K
        w_at += BLOCK_K
    if BIAS:
        sums += tl.load(b + column).to(tl.float32)[None, :]
    o_at = o + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(o_at, sums.to(o.dtype.element_ty), mask=there)

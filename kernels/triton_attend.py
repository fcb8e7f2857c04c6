"""`cascade::attend` in Triton: up to two key segments, each split over its keys, in one launch.

A program computes one tile of packed query rows against one run of keys of one segment and writes a
partial result; `triton_merge.py` completes them. The query rows of one K/V row are those of its T
branches, M queries and G heads, packed as row (t * M + m) * G + g: keys and values are read once
for all of them, and no other code knows about groups (Hydragen, arXiv 2402.05099, section 3.2).
The split over keys is that of Flash-Decoding; the loop is the online softmax of FlashAttention-2
(arXiv 2307.08691).

The two segments ("slots") differ in everything but the queries: a shared prefix has few, tall tiles
of rows and many splits, the suffixes of the branches have many short tiles. In one launch the
second fills the multiprocessors that the first leaves idle.

Scores are kept in units of log2, sums and outputs in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """tanh of float32, without cancellation near 0 being worse than that of exp."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    magnitude = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def key_offsets(
    start,
    length,
    table,
    page_size,
    block_stride,
    key_stride,
    BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Where each key of the tile at `start` is, as (scalar int64, [BLOCK_N] to be added to it).

    Contiguous keys have an offset that no tile changes, in int32 where that is provably enough.
    """
    lane = tl.arange(0, BLOCK_N)
    base = tl.zeros([], tl.int64)
    if PAGED:
        key = start + lane
        page = tl.load(table + key // page_size, mask=key < length, other=0).to(tl.int64)
        return base, page * block_stride + (key % page_size) * key_stride
    elif WIDE:
        return (base + start) * key_stride, lane.to(tl.int64) * key_stride
    else:
        return (base + start) * key_stride, lane * key_stride


@triton.jit
def attend_tile(
    row_block,
    kv_row,
    kv_head,
    split,
    q,
    o_part,
    lse_part,
    heads,
    q_len,
    group,
    rows,
    part_rows,
    q_stride_n,
    q_stride_h,
    q_stride_m,
    scale,
    softcap,
    slopes,
    k,
    v,
    k_stride_r,
    k_stride_h,
    k_stride_k,
    v_stride_r,
    v_stride_h,
    v_stride_k,
    kv_len,
    split_len,
    branches,
    mask,
    mask_stride_n,
    mask_stride_h,
    mask_stride_m,
    mask_stride_k,
    positions,
    positions_stride_n,
    positions_stride_m,
    kv_start,
    window,
    kv_lens,
    table,
    table_stride,
    page_size,
    k_scale,
    v_scale,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    POSITIONS: tl.constexpr,
    WINDOW: tl.constexpr,
    LENS: tl.constexpr,
    PAGED: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of rows of one slot against keys [split * split_len, ...) of its segment.

    Writes row i of split s at o_part[s, i, :] and lse_part[s, i] for the rows i of [N, Hq, M].
    """
    packed = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = packed < rows
    head = kv_head * group + packed % group
    token = (packed // group) % q_len
    batch = kv_row * branches + packed // (group * q_len)
    d_k = tl.arange(0, PAD_K)
    d_v = tl.arange(0, PAD_V)

    q_rows = batch.to(tl.int64) * q_stride_n + head * q_stride_h + token * q_stride_m
    q_ok = row_ok[:, None] & (d_k < D_K)[None, :]
    q_tile = tl.load(q + q_rows[:, None] + d_k[None, :], mask=q_ok, other=0.0)
    head_scale = scale * tl.load(k_scale + kv_head) if SCALED else scale

    low = split * split_len
    high = tl.minimum(low + split_len, kv_len)
    if LENS:
        high = tl.minimum(high, tl.load(kv_lens + kv_row).to(tl.int32))
    if POSITIONS:
        at = batch.to(tl.int64) * positions_stride_n + token * positions_stride_m
        position = tl.load(positions + at, mask=row_ok, other=0) - kv_start
        # The first key that a row does not see any more, and the first that it sees.
        end = tl.minimum(tl.maximum(position + 1, 0), kv_len).to(tl.int32)
        begin = tl.zeros_like(end)
        if WINDOW:
            begin = tl.minimum(tl.maximum(position + 1 - window, 0), kv_len).to(tl.int32)
            first = tl.min(tl.where(row_ok, begin, kv_len), 0)
            low = tl.maximum(low, low + (first - low) // BLOCK_N * BLOCK_N)
        high = tl.minimum(high, tl.max(tl.where(row_ok, end, 0), 0))
    if ALIBI:
        slope = tl.load(slopes + head, mask=row_ok, other=0.0) * LOG2E
    if MASK != 0:
        mask_rows = (
            batch.to(tl.int64) * mask_stride_n + head * mask_stride_h + token * mask_stride_m
        )
    if PAGED:
        table += kv_row.to(tl.int64) * table_stride
        k += kv_head.to(tl.int64) * k_stride_h
        v += kv_head.to(tl.int64) * v_stride_h
    else:
        k += kv_row.to(tl.int64) * k_stride_r + kv_head.to(tl.int64) * k_stride_h
        v += kv_row.to(tl.int64) * v_stride_r + kv_head.to(tl.int64) * v_stride_h

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        in_range = keys < high
        base, at = key_offsets(
            start, high, table, page_size, k_stride_r, k_stride_k, BLOCK_N, PAGED, WIDE
        )
        k_ok = in_range[None, :] if D_K == PAD_K else in_range[None, :] & (d_k < D_K)[:, None]
        k_tile = tl.load(k + base + at[None, :] + d_k[:, None], mask=k_ok, other=0.0)
        scores = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision=PRECISION)

        if SOFTCAP:
            scores = tanh(scores * (head_scale / softcap)) * (softcap * LOG2E)
        else:
            scores = scores * (head_scale * LOG2E)
        if ALIBI:
            scores += slope[:, None] * (keys[None, :] - position[:, None]).to(tl.float32)
        if MASK == 1:
            at = mask_rows[:, None] + keys.to(tl.int64)[None, :] * mask_stride_k
            seen = tl.load(mask + at, mask=row_ok[:, None] & in_range[None, :], other=0)
            scores = tl.where(seen != 0, scores, float("-inf"))
        if MASK == 2:
            at = mask_rows[:, None] + keys.to(tl.int64)[None, :] * mask_stride_k
            added = tl.load(mask + at, mask=row_ok[:, None] & in_range[None, :], other=0.0)
            scores += added.to(tl.float32) * LOG2E
        if POSITIONS:
            visible = keys[None, :] < end[:, None]
            if WINDOW:
                visible = visible & (keys[None, :] >= begin[:, None])
            scores = tl.where(visible & in_range[None, :], scores, float("-inf"))
        elif start + BLOCK_N > high:
            scores = tl.where(in_range[None, :], scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet: any finite reference keeps its weights at 0.
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        top = new_top

        base, at = key_offsets(
            start, high, table, page_size, v_stride_r, v_stride_k, BLOCK_N, PAGED, WIDE
        )
        v_ok = in_range[:, None] if D_V == PAD_V else in_range[:, None] & (d_v < D_V)[None, :]
        v_tile = tl.load(v + base + at[:, None] + d_v[None, :], mask=v_ok, other=0.0)
        v_tile = v_tile.to(q_tile.dtype)
        acc = tl.dot(weights.to(q_tile.dtype), v_tile, acc, input_precision=PRECISION)

    unseen = total == 0  # not total <= 0: a NaN must come out as NaN, in o and lse
    total = tl.where(unseen, 1.0, total)
    out = acc / total[:, None]
    if SCALED:
        out *= tl.load(v_scale + kv_head)
    lse = tl.where(unseen, float("-inf"), (top + tl.log2(total)) * LN2)
    row = (batch.to(tl.int64) * heads + head) * q_len + token + split.to(tl.int64) * part_rows
    out_ok = row_ok[:, None] & (d_v < D_V)[None, :]
    tl.store(o_part + row[:, None] * D_V + d_v[None, :], out, mask=out_ok)
    tl.store(lse_part + row, lse, mask=row_ok)


@triton.jit
def attend_parts(
    q,
    o_part,
    lse_part,
    heads,
    kv_heads,
    q_len,
    group,
    part_rows,
    q_stride_n,
    q_stride_h,
    q_stride_m,
    scale,
    softcap,
    slopes,
    k_a,
    v_a,
    k_stride_r_a,
    k_stride_h_a,
    k_stride_k_a,
    v_stride_r_a,
    v_stride_h_a,
    v_stride_k_a,
    kv_len_a,
    split_len_a,
    branches_a,
    mask_a,
    mask_stride_n_a,
    mask_stride_h_a,
    mask_stride_m_a,
    mask_stride_k_a,
    positions_a,
    positions_stride_n_a,
    positions_stride_m_a,
    kv_start_a,
    window_a,
    kv_lens_a,
    table_a,
    table_stride_a,
    page_size_a,
    k_scale_a,
    v_scale_a,
    rows_a,
    splits_a,
    split_base_a,
    items_a,
    k_b,
    v_b,
    k_stride_r_b,
    k_stride_h_b,
    k_stride_k_b,
    v_stride_r_b,
    v_stride_h_b,
    v_stride_k_b,
    kv_len_b,
    split_len_b,
    branches_b,
    mask_b,
    mask_stride_n_b,
    mask_stride_h_b,
    mask_stride_m_b,
    mask_stride_k_b,
    positions_b,
    positions_stride_n_b,
    positions_stride_m_b,
    kv_start_b,
    window_b,
    kv_lens_b,
    table_b,
    table_stride_b,
    page_size_b,
    k_scale_b,
    v_scale_b,
    rows_b,
    splits_b,
    split_base_b,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M_a: tl.constexpr,
    BLOCK_N_a: tl.constexpr,
    MASK_a: tl.constexpr,
    POSITIONS_a: tl.constexpr,
    WINDOW_a: tl.constexpr,
    LENS_a: tl.constexpr,
    PAGED_a: tl.constexpr,
    SCALED_a: tl.constexpr,
    WIDE_a: tl.constexpr,
    STAGES_a: tl.constexpr,
    BLOCK_M_b: tl.constexpr,
    BLOCK_N_b: tl.constexpr,
    MASK_b: tl.constexpr,
    POSITIONS_b: tl.constexpr,
    WINDOW_b: tl.constexpr,
    LENS_b: tl.constexpr,
    PAGED_b: tl.constexpr,
    SCALED_b: tl.constexpr,
    WIDE_b: tl.constexpr,
    STAGES_b: tl.constexpr,
):
    """The partial results of one or two key segments; a program for each tile and split.

    Grid: (items_a + items_b,), where a slot has KV rows * KV heads * splits * row tiles items.
    """
    part_rows = part_rows.to(tl.int64)
    item = tl.program_id(0)
    if item < items_a:
        row_blocks = tl.cdiv(rows_a, BLOCK_M_a)
        row_block = item % row_blocks
        item = item // row_blocks
        split = item % splits_a
        item = item // splits_a
        attend_tile(
            row_block,
            item // kv_heads,
            item % kv_heads,
            split,
            q,
            o_part + split_base_a * part_rows * D_V,
            lse_part + split_base_a * part_rows,
            heads,
            q_len,
            group,
            rows_a,
            part_rows,
            q_stride_n,
            q_stride_h,
            q_stride_m,
            scale,
            softcap,
            slopes,
            k_a,
            v_a,
            k_stride_r_a,
            k_stride_h_a,
            k_stride_k_a,
            v_stride_r_a,
            v_stride_h_a,
            v_stride_k_a,
            kv_len_a,
            split_len_a,
            branches_a,
            mask_a,
            mask_stride_n_a,
            mask_stride_h_a,
            mask_stride_m_a,
            mask_stride_k_a,
            positions_a,
            positions_stride_n_a,
            positions_stride_m_a,
            kv_start_a,
            window_a,
            kv_lens_a,
            table_a,
            table_stride_a,
            page_size_a,
            k_scale_a,
            v_scale_a,
            D_K,
            D_V,
            PAD_K,
            PAD_V,
            BLOCK_M_a,
            BLOCK_N_a,
            MASK_a,
            POSITIONS_a,
            WINDOW_a,
            LENS_a,
            PAGED_a,
            SCALED_a,
            SOFTCAP,
            ALIBI,
            PRECISION,
            WIDE_a,
            STAGES_a,
        )
    elif SLOTS == 2:
        item -= items_a
        row_blocks = tl.cdiv(rows_b, BLOCK_M_b)
        row_block = item % row_blocks
        item = item // row_blocks
        split = item % splits_b
        item = item // splits_b
        attend_tile(
            row_block,
            item // kv_heads,
            item % kv_heads,
            split,
            q,
            o_part + split_base_b * part_rows * D_V,
            lse_part + split_base_b * part_rows,
            heads,
            q_len,
            group,
            rows_b,
            part_rows,
            q_stride_n,
            q_stride_h,
            q_stride_m,
            scale,
            softcap,
            slopes,
            k_b,
            v_b,
            k_stride_r_b,
            k_stride_h_b,
            k_stride_k_b,
            v_stride_r_b,
            v_stride_h_b,
            v_stride_k_b,
            kv_len_b,
            split_len_b,
            branches_b,
            mask_b,
            mask_stride_n_b,
            mask_stride_h_b,
            mask_stride_m_b,
            mask_stride_k_b,
            positions_b,
            positions_stride_n_b,
            positions_stride_m_b,
            kv_start_b,
            window_b,
            kv_lens_b,
            table_b,
            table_stride_b,
            page_size_b,
            k_scale_b,
            v_scale_b,
            D_K,
            D_V,
            PAD_K,
            PAD_V,
            BLOCK_M_b,
            BLOCK_N_b,
            MASK_b,
            POSITIONS_b,
            WINDOW_b,
            LENS_b,
            PAGED_b,
            SCALED_b,
            SOFTCAP,
            ALIBI,
            PRECISION,
            WIDE_b,
            STAGES_b,
        )
